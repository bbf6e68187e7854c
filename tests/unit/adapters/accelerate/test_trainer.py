"""A stock Trainer under `use_shardstack`: losses, norms and weights of one process, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.errors import CheckpointError
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters.accelerate._trainers import (
    STRATEGIES,
    Trained,
    fresh_accelerate,
    pad,
    result,
    samples,
    some_and_others,
    tiny,
    train,
    trainer_of,
    whole_weights,
)

pytestmark = needs("transformers", "accelerate")

EPS = 2.0**-23
UNITS = 3  # two layers and the root


def assert_as_one_process(found: Trained, expected: Trained) -> None:
    """Sums of six micro-batches in another order round otherwise, by some `EPS` of what is added. A step moves a
    weight by 0.05 times a gradient of norm 0.3 at most, and rounds it."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=32 * EPS, atol=0.0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=64 * EPS, atol=0.0)
    torch.testing.assert_close(found.rates, expected.rates, rtol=0.0, atol=0.0)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        largest = weight.abs().max().item()
        bound = len(expected.losses) * (0.05 * 0.3 * 64 * EPS + largest * EPS)
        torch.testing.assert_close(found.weights[name], weight, rtol=0.0, atol=bound)


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


# ---- the numbers


def _trained(kind: str, folder: str, strategies: list[str | None], fields: dict, arguments: dict) -> list[Trained]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            found.append(train(trainer_of(tiny(kind, **fields), folder, strategy, **arguments)))
    return found


@pytest.mark.parametrize(
    ("kind", "fields"), [("llama", {"tied": True}), pytest.param("qwen3", {}, marks=pytest.mark.long)]
)
def test_a_trainer_computes_what_it_does_in_one_process(kind, fields, tmp_path):
    (expected, alone) = run_distributed(_trained, 1, kind, str(tmp_path), [None, "optim_grads_params"], fields, {})[0]
    assert len(expected.losses) == 4  # of windows of 6, 4, 6 and 4 sequences
    assert_as_one_process(alone, expected)
    of_ranks = run_distributed(_trained, 2, kind, str(tmp_path), list(STRATEGIES), fields, {})
    for strategy, found, other in zip(STRATEGIES, *of_ranks, strict=True):
        assert_as_one_process(found, expected)
        assert_same_bits(other, found)
        assert_same_bits(found, of_ranks[0][0])
        assert found.reductions == [UNITS if strategy in ("optim_grads_params", "fsdp2") else 1] * 4


def _in_hybrids(folder: str, strategies: list[str]) -> list[Trained]:
    from core.adapters.accelerate import ShardstackPlugin

    found = []
    for strategy in strategies:
        with fresh_accelerate(local=2):
            plugin = ShardstackPlugin(strategy, hybrid=True)
            trainer = trainer_of(tiny("llama"), folder, None, plugin=plugin, count=12, gradient_accumulation_steps=2)
            found.append(train(trainer))
    return found


@pytest.mark.long
def test_hybrids_on_four_ranks_compute_what_one_process_does(tmp_path):
    arguments = {"count": 12, "gradient_accumulation_steps": 8}
    (expected,) = run_distributed(_trained, 1, "llama", str(tmp_path), [None], {}, arguments)[0]
    for found in run_distributed(_in_hybrids, 4, str(tmp_path), ["optim", "optim_grads_params", "fsdp2"])[0]:
        assert_as_one_process(found, expected)


def _with_adapters(method: str) -> Any:
    import peft

    torch.manual_seed(5)
    model = tiny("llama")
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, use_dora=method == "dora")
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros at the start, which would leave the other factor without a gradient
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
            elif "lora_A" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(2 * len(name)))
    return adapted


def _trained_adapters(method: str, folder: str, strategies: list[str | None]) -> list[Trained]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            where = f"{folder}/{strategy}"
            trainer = trainer_of(_with_adapters(method), where, strategy, gradient_checkpointing=True)
            found.append(train(trainer))
            trainer.save_model(where)
    return found


@pytest.mark.long
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_train_under_recomputation_and_are_saved(method, tmp_path):
    pytest.importorskip("peft")
    import peft

    start = dict(_with_adapters(method).named_parameters())
    ((expected,),) = run_distributed(_trained_adapters, 1, method, str(tmp_path / "one"), [None])
    found, _ = run_distributed(_trained_adapters, 2, method, str(tmp_path), list(STRATEGIES))
    for strategy, trained in zip(STRATEGIES, found, strict=True):
        assert_as_one_process(trained, expected)
        for name, weight in trained.weights.items():
            assert torch.equal(weight, start[name]) != start[name].requires_grad, name
        loaded = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / strategy))
        for name, weight in loaded.named_parameters():
            assert torch.equal(weight, trained.weights[name]), name


# ---- in the middle of training


class _Generates:
    """A callback that generates from the trainer's model after each step, which ranks end at different lengths."""

    def __new__(cls) -> Any:
        import transformers

        class Callback(transformers.TrainerCallback):
            texts: list = []

            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
                tokens = torch.tensor([[2 + args.process_index, 3, 4]])
                model.eval()
                self.texts.append(model.generate(tokens, max_new_tokens=3 + args.process_index, do_sample=False))

        made = Callback()
        made.texts = []
        return made


def _evaluated(folder: str, strategies: list[str | None]) -> list[tuple[Trained, list[float], list[Any]]]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            generates = _Generates()
            trainer = trainer_of(
                tiny("llama"), folder, strategy, callbacks=[generates],
                eval_strategy="steps", eval_steps=1, eval_on_start=True,
                per_device_eval_batch_size=1,
            )  # fmt: skip
            # A stock Trainer that evaluates first never wraps its model, and its replicas part.
            before = [trainer.evaluate()["eval_loss"]] if strategy else []
            trained = train(trainer)
            losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
            found.append(
                (trained, [*(before or losses[:1]), *losses, trainer.evaluate()["eval_loss"]], generates.texts)
            )
    return found


@some_and_others("strategies", ["optim_grads_params", "fsdp2"], ["no_shard", "optim", "optim_grads"])
def test_evaluation_and_generation_in_training_change_nothing(strategies, tmp_path):
    ((expected,),) = run_distributed(_trained, 1, "llama", str(tmp_path), [None], {}, {})
    (((_, _, texts),),) = run_distributed(_evaluated, 1, str(tmp_path), [None])
    for rank, of_rank in enumerate(run_distributed(_evaluated, 2, str(tmp_path), [None, *strategies])):
        # Not one process's: a Trainer weighs the tokens of ranks that evaluate together otherwise.
        stock, *ours = of_rank
        for trained, losses, generated in ours:
            assert_as_one_process(trained, expected)
            torch.testing.assert_close(losses, stock[1], rtol=64 * EPS, atol=0.0)
            assert len(losses) == 7 and len(generated) == len(texts) == 4
            wanted = texts if rank == 0 else stock[2]
            assert all(torch.equal(one, other) for one, other in zip(generated, wanted, strict=True))


# ---- checkpoints


SAVES = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}


SOME = [("optim", "optim"), ("optim_grads_params", "optim_grads_params"), ("fsdp2", "optim_grads")]
OTHERS = [("no_shard", "no_shard"), ("optim_grads", "optim_grads"), ("fsdp2", "fsdp2"), ("no_shard", "fsdp2")]


@some_and_others("pairs", SOME, OTHERS)
@on_ranks(2)
def test_a_run_resumes_bitwise_under_its_or_another_strategy(pairs, tmp_path):
    found = []
    for number, (saving, resuming) in enumerate(pairs):
        where = f"{tmp_path}/{number}"
        with fresh_accelerate():
            whole = train(trainer_of(tiny("qwen3", attention_dropout=0.1), where, saving, **SAVES))
        with fresh_accelerate():
            trainer = trainer_of(tiny("qwen3", attention_dropout=0.1), where, resuming, **SAVES)
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.zero_()  # all that counts is in the checkpoint
            found.append((whole, train(trainer, resume_from_checkpoint=f"{where}/checkpoint-2")))
    for whole, resumed in found:
        assert resumed.losses == whole.losses  # those before the checkpoint are in the trainer's state
        assert_same_bits(resumed, whole)


def _saved(folder: str, strategies: list[str]) -> list[dict[str, Any]]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            trainer = trainer_of(
                tiny("llama", tied=True), f"{folder}/{strategy}", strategy, save_strategy="steps", save_steps=1,
                eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                metric_for_best_model="eval_loss", greater_is_better=True, save_total_limit=2,
            )  # fmt: skip
            trainer.train()
            trainer.save_model(f"{folder}/{strategy}/last")
            evaluated = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
            found.append(
                {
                    "weights": whole_weights(trainer),
                    "best": trainer.state.best_model_checkpoint,
                    "largest loss": max(evaluated, key=evaluated.__getitem__),
                }
            )
            trainer.accelerator.wait_for_everyone()
    return found


@some_and_others("strategies", ["optim", "optim_grads_params"], ["no_shard", "optim_grads", "fsdp2"])
def test_save_pretrained_writes_the_best_model_of_the_run(strategies, tmp_path):
    import transformers

    from core.dist_checkpointing import verify

    of_ranks = run_distributed(_saved, 2, str(tmp_path), strategies)
    for strategy, saved in zip(strategies, of_ranks[0], strict=True):
        best = Path(saved["best"])
        assert best.is_dir() and best.name == f"checkpoint-{saved['largest loss']}"
        for folder in (best, tmp_path / strategy / "last"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            weights = dict(loaded.named_parameters())
            assert weights.keys() == saved["weights"].keys()
            for name, weight in saved["weights"].items():
                assert torch.equal(weights[name], weight), (strategy, name)
        verify(best / "shardstack")


@on_ranks(2)
def test_the_best_model_is_loaded_from_weights_alone(tmp_path):
    import transformers

    with fresh_accelerate():
        trainer = trainer_of(
            tiny("llama", tied=True), tmp_path, "optim_grads_params", save_strategy="steps", save_steps=1,
            save_only_model=True, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
            metric_for_best_model="eval_loss", greater_is_better=True,
        )  # fmt: skip
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        assert best.name != f"checkpoint-{trainer.state.global_step}" and not (best / "shardstack").exists()
        found = whole_weights(trainer)
        for name, weight in transformers.AutoModelForCausalLM.from_pretrained(best).named_parameters():
            assert torch.equal(found[name], weight), name
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            (best / "model.safetensors").write_bytes(b"damaged")
        trainer.accelerator.wait_for_everyone()
        with pytest.raises(CheckpointError) as refused:
            trainer._load_best_model()
        message = str(refused.value)
    assert "is no safetensors file, or damaged" in message


@on_ranks(2)
def test_a_trainer_trains_twice(tmp_path):
    with fresh_accelerate():
        trainer = trainer_of(tiny("llama"), tmp_path, "optim_grads_params", num_train_epochs=1)
        first = train(trainer)
        trainer.train()
        first, second = first, result(trainer, [])
    assert len(first.losses) == len(second.losses) == 2 and first.losses != second.losses


def test_the_data_is_ragged():
    lengths = {len(row["input_ids"]) for row in samples(10)}
    assert len(lengths) > 4
    assert len({int((row["labels"] != -100).sum()) for row in samples(10)}) > 3
    assert pad(samples(3))["labels"].shape == pad(samples(3))["attention_mask"].shape
