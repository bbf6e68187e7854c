"""TRL's trainers under `use_shardstack`: equal to stock ones, and vLLM gets whole weights.

vLLM does not install on a CPU. Its server and its engine are stubs here, which keep what TRL's own code hands them.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError, ShardstackError
from core.weights import WeightStream
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters.accelerate._trainers import STRATEGIES, fresh_accelerate, some_and_others, tiny, whole_weights
from tests.unit.distributed._hugging_face import VOCAB
from tests.unit.weights._live_bytes import LiveBytes
from tests.unit.weights.test_peft_layers import merged_by_peft

pytestmark = needs("trl", "transformers", "accelerate", "peft")

EPS = 2.0**-23
PROMPTS = [{"prompt": f"t{2 + n} t{3 + n} t{4 + n}"} for n in range(8)]


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = {f"t{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1")


def _reward(completions: list[str], **unused: Any) -> list[float]:
    """Prefers tokens of low numbers."""
    return [-sum(int(token[1:]) for token in text.split()) / (VOCAB * (1 + len(text.split()))) for text in completions]


def _arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "max_steps": 3, "learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 0.3, "seed": 11,
        "bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False,
    }  # fmt: skip


def _grpo(folder: str, model: Any = None, kind: str = "GRPO", peft_config: Any = None, **arguments: Any) -> Any:
    import datasets
    import trl

    given = _arguments(folder) | {
        "per_device_train_batch_size": 4 // dist.get_world_size(), "num_generations": 4, "max_completion_length": 5,
        "gradient_accumulation_steps": 2, "beta": 0.0, "temperature": 1.0,
    }  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model=tiny("llama") if model is None else model,
        reward_funcs=_reward,
        args=getattr(trl, f"{kind}Config")(**{**given, **arguments}),
        train_dataset=datasets.Dataset.from_list(PROMPTS),
        processing_class=_tokenizer(),
        peft_config=peft_config,
    )


def _rloo(folder: str, **arguments: Any) -> Any:
    return _grpo(folder, kind="RLOO", **arguments)


def _grpo_from_base(folder: str, **arguments: Any) -> Any:
    """Trains a new adapter. The reference is the model without it."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return _grpo(folder, peft_config=config, beta=0.1, **arguments)


def _grpo_from_adapter(folder: str, **arguments: Any) -> Any:
    """Trains an adapter further. The reference is its copy, which TRL adds under the name "ref"."""
    return _grpo(folder, _model(adapted=True, dtype=torch.float32), beta=0.1, **arguments)


def _dpo(folder: str, model: Any = None, **arguments: Any) -> Any:
    import datasets
    import trl

    arguments = {key: value for key, value in _arguments(folder).items() if key != "shuffle_dataset"} | arguments
    rows = [row | {"chosen": f" t{9 + n} t5", "rejected": f" t{20 + n} t7 t8"} for n, row in enumerate(PROMPTS)]
    return trl.DPOTrainer(
        model=tiny("llama") if model is None else model,
        ref_model=tiny("llama") if model is None else None,
        args=trl.DPOConfig(per_device_train_batch_size=4 // dist.get_world_size(), **arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )


def _dpo_from_adapter(folder: str, **arguments: Any) -> Any:
    return _dpo(folder, _model(adapted=True, dtype=torch.float32), **arguments)


def _run(trainer: Any, strategy: str | None, **settings: Any) -> tuple[Any, ...]:
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    if strategy is not None:
        use_shardstack(trainer, ShardstackPlugin(strategy, **settings))
    trainer.train()
    steps = [(log["loss"], float(log["grad_norm"])) for log in trainer.state.log_history if "grad_norm" in log]
    reference = getattr(trainer, "ref_model", None)
    weights = whole_weights(trainer)
    assert weights.keys() == before.keys()
    changed = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    return steps, weights, reference and dict(reference.named_parameters()), changed


def _by_row(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Takes the place of `torch.multinomial`: each of a group's four completions takes another of the four likeliest
    tokens, on any number of ranks."""
    likeliest = probabilities.topk(4).indices
    return likeliest.gather(1, torch.arange(len(likeliest))[:, None] % 4)


def _runs(folder: str, kind: str, strategies: list[str | None], arguments: dict[str, Any]) -> list[Any]:
    found = []
    for strategy in strategies:
        with fresh_accelerate(), mock.patch.object(torch, "multinomial", _by_row):
            trainer = KINDS[kind](folder, **arguments)
            found.append(_run(trainer, strategy))
    return found


KINDS = {
    "grpo": _grpo,
    "rloo": _rloo,
    "dpo": _dpo,
    "grpo_from_base": _grpo_from_base,
    "grpo_from_adapter": _grpo_from_adapter,
    "dpo_from_adapter": _dpo_from_adapter,
}
ARGUMENTS = {"dpo": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}}


def _assert_as_stock(kind: str, strategies: list[str], folder: str) -> None:
    arguments = ARGUMENTS.get(kind, {})
    ((steps, weights, reference, changed),) = run_distributed(_runs, 1, folder, kind, [None], arguments)[0]
    assert len(steps) == 3 and any(norm for _, norm in steps)
    assert changed and (not kind.endswith("adapter") or any(".ref." in name for name in weights))
    assert not any(".ref." in name for name in changed)
    of_ranks = run_distributed(_runs, 2, folder, kind, strategies, arguments)
    for found, other in zip(*of_ranks, strict=True):
        assert found[3] == changed
        # Sums in another order, as in test_trainer: losses near 0 by an absolute tolerance.
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(steps), rtol=512 * EPS, atol=64 * EPS)
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, rtol=0.0, atol=256 * EPS)
            assert torch.equal(found[1][name], other[1][name])
            assert torch.equal(found[1][name], of_ranks[0][0][1][name])
        for name, weight in (reference or {}).items():
            torch.testing.assert_close(found[2][name], weight, rtol=0.0, atol=256 * EPS)
    if reference:
        start = dict(tiny("llama").named_parameters())
        assert any(not torch.equal(value, start[name]) for name, value in reference.items())


@pytest.mark.parametrize("kind", KINDS)
@some_and_others("strategies", ["optim_grads_params", "fsdp2"], ["no_shard", "optim", "optim_grads"])
def test_a_trainer_computes_as_stock_in_one_process(kind, strategies, tmp_path):
    _assert_as_stock(kind, strategies, str(tmp_path))


# ---- vLLM


class Server:
    """A stub of TRL's client of a vLLM server, without NCCL: keeps what it should receive, and what came. Completions
    are fixed."""

    def __init__(self) -> None:
        self.updates: list[tuple[list[Any], dict[str, torch.Tensor]]] = []

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        received: dict[str, torch.Tensor] = {}
        self.updates.append((metadata, received))
        for name, tensor in named_params:
            received[name] = tensor.clone()

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], n: int, **unused: Any) -> dict[str, Any]:
        completions = [[2 + (3 * k) % 5, 3 + k % 4, 1] for _ in prompts for k in range(n)]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": _logprobs(completions)}


class Engine:
    """A stub of the vLLM engine in a rank's process. It keeps what it loads."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        model = SimpleNamespace(load_weights=self._load)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}

    def reset_prefix_cache(self) -> None: ...


@contextmanager
def _vllm(stubs: list[Any]) -> Any:
    """Lets TRL build its `VLLMGeneration` without vLLM."""
    from trl.generation.vllm_generation import VLLMGeneration

    def connect(self: Any) -> None:
        stubs.append(Server() if self.mode == "server" else Engine())
        if self.mode == "server" and self.accelerator.is_main_process:
            self.vllm_client = stubs[-1]
            self.vllm_client.get_server_info = lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.llm, self._llm_weights_sleeping = stubs[-1], False

    with mock.patch.object(VLLMGeneration, "_init_vllm", connect):
        yield


def _logprobs(completions: list[list[int]]) -> list[list[list[float]]]:
    return [[[-1.0] for _ in tokens] for tokens in completions]


def _generate(prompts: list[Any], **unused: Any) -> Any:
    completions = [[2 + (3 * n) % 5, 6, 1] for n in range(len(prompts))]
    return prompts, completions, _logprobs(completions), None


def _model(adapted: bool, dtype: torch.dtype) -> Any:
    import peft

    model = tiny("llama", tied=not adapted).to(dtype)
    if not adapted:
        return model
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
    return model


def _synced(folder: str, strategies: list[str], mode: str, adapted: bool, dtype: torch.dtype) -> list[Any]:
    """Trains by a stub of vLLM, syncs once more, and returns what the stub has and what a plain copy would send."""
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    found, beta = [], {"beta": 0.1} if adapted else {}  # by which TRL adds an adapter "ref"
    for strategy in strategies:
        stubs: list[Any] = []
        with fresh_accelerate(), _vllm(stubs):
            trainer = _grpo(folder, _model(adapted, dtype), use_vllm=True, vllm_mode=mode, max_steps=2, **beta)
            generation = trainer.vllm_generation
            use_shardstack(trainer, ShardstackPlugin(strategy))
            if mode == "colocate":  # its sampling is vLLM's alone
                generation.generate = _generate
            trainer.train()
            generation.sync_weights()
            plain, weights = _model(adapted, dtype), _whole(trainer)
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(weights[name])
            start = dict(_model(adapted, dtype).named_parameters())
            assert any(not torch.equal(value, start[name]) for name, value in plain.named_parameters())
            expected = merged_by_peft(plain) if adapted else dict(plain.named_parameters())
            got = stubs[0].loaded if mode == "colocate" else stubs[0].updates[-1:]
            found.append((got, {name: value.detach().clone() for name, value in expected.items()}))
    return found


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    from core.adapters.bridge.checkpoints import whole_state_dict

    return whole_state_dict(trainer._trained.wrapper, keep=True)


SENT = {"whole": (False, torch.float32), "bf16": (False, torch.bfloat16), "peft": (True, torch.float32)}


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("case", ["whole", pytest.param("bf16", marks=pytest.mark.long), pytest.param("peft")])
def test_vllm_gets_whole_weights_of_the_last_step(case, mode, tmp_path):
    of_ranks = run_distributed(_synced, 2, str(tmp_path), list(STRATEGIES), mode, *SENT[case])
    for rank, found in enumerate(of_ranks):
        for strategy, (got, expected) in zip(STRATEGIES, found, strict=True):
            if mode == "server" and rank:
                assert not got
                continue
            received = got
            if mode == "server":
                ((metadata, received),) = got
                names = {name: (str(v.dtype).removeprefix("torch."), [*v.shape]) for name, v in received.items()}
                assert metadata == [(name, *names[name]) for name in received], strategy
            assert [*received] == [*expected], strategy
            for name, value in expected.items():
                assert received[name].dtype == SENT[case][1] and torch.equal(received[name], value), (strategy, name)


def _walk_memory(folder: str, strategies: list[str], adapted: bool, bucket: int) -> list[tuple[int, int, int]]:
    """Returns the most bytes that live in TRL's walk on this rank, those of the largest tensor, and of all tensors."""
    from core.adapters.accelerate import ShardstackPlugin, trl, use_shardstack

    def small(*arguments: Any, **receivers: Any) -> WeightStream:
        stream = WeightStream(*arguments, **receivers, bucket_bytes=bucket)
        assert stream.owners  # which takes memory that no weights are in
        return stream

    found = []
    for strategy in strategies:
        model: Any = tiny("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=8, head_dim=16)
        if adapted:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        sizes = [parameter.nbytes for parameter in model.parameters()]
        with fresh_accelerate(), _vllm([]), mock.patch.object(trl, "WeightStream", small):
            trainer = _grpo(folder, model, use_vllm=True, vllm_mode="server", max_steps=1)
            use_shardstack(trainer, ShardstackPlugin(strategy))
            trainer.train()
            walk = trainer.vllm_generation._iter_named_params()
            with LiveBytes() as live:
                for _, _tensor in walk:
                    pass
        found.append((live.peak, max(sizes), sum(sizes)))
    return found


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "peft"])
def test_a_walk_takes_a_bucket_of_whole_tensors(adapted, tmp_path):
    bucket = 32768
    of_ranks = run_distributed(_walk_memory, 2, str(tmp_path), ["optim_grads_params", "fsdp2"], adapted, bucket)
    for rank, found in enumerate(of_ranks):
        for peak, largest, total in found:
            # Whole tensors, what messages are packed into, and the last tensor. A merged layer is a copy, to which a
            # product is added.
            bound = 2 * bucket + largest * (3 if adapted and rank == 0 else 1)
            assert peak <= bound < total / 4 and (rank or peak), (rank, peak, largest, total)


def _broken(folder: str) -> list[tuple[str, int]]:
    """Returns errors of syncs that cannot be made, and how many weights were announced to the server by then.

    In the middle of a step, and where vLLM has another model.
    """
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    def refuse(weights: Any) -> None:
        raise ValueError(f"there is no parameter named {weights[0][0]} in this model")

    found: list[tuple[str, int]] = []
    for mode in ("server", "colocate"):
        stubs: list[Any] = []
        with fresh_accelerate(), _vllm(stubs):
            trainer = _grpo(folder, use_vllm=True, vllm_mode=mode, max_steps=1)
            generation = trainer.vllm_generation
            use_shardstack(trainer, ShardstackPlugin("optim_grads_params"))
            if mode == "colocate":
                generation.generate = _generate
            trainer.train()
            if mode == "server":
                announced = len(stubs[0].updates)
                tokens = torch.tensor([[2, 3, 4]])
                trainer.model_wrapped(input_ids=tokens, labels=tokens).loss.backward()
            else:
                announced = 0
                stubs[0].llm_engine.model_executor.driver_worker.model_runner.model.load_weights = refuse
            with pytest.raises((ShardstackError, ValueError)) as raised:
                generation.sync_weights()
            found.append((str(raised.value), len(stubs[0].updates) - announced if mode == "server" else 0))
    return found


def test_what_cannot_be_sent_raises_on_every_rank(tmp_path):
    for (mid_step, num_announced), (unknown, _) in run_distributed(_broken, 2, str(tmp_path)):
        assert "in mid-step" in mid_step and num_announced == 0
        assert unknown == "there is no parameter named model.embed_tokens.weight in this model"


# ---- what is refused


def _refused(trainer: Any, strategy: str = "optim_grads_params") -> str:
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    with pytest.raises(ConfigError) as raised:
        use_shardstack(trainer, ShardstackPlugin(strategy))
    return str(raised.value)


@on_ranks(1)
def test_what_cannot_be_synced_is_refused_before_training(tmp_path):
    import peft

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    tokens = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with fresh_accelerate(), _vllm([]):
        for config, message in ((prompts, "has nothing to merge; set use_vllm=False"), (tokens, "trained in part")):
            model = peft.get_peft_model(tiny("llama"), config)
            assert message in _refused(_grpo(str(tmp_path), model, use_vllm=True, vllm_mode="server"))
        trainer = _grpo(str(tmp_path), use_vllm=True, vllm_mode="server")
        trainer.args.vllm_enable_sleep_mode, trainer.args.steps_per_generation = True, 1
        assert "make the first a multiple of the second" in _refused(trainer)
        trainer = _grpo(str(tmp_path), use_vllm=True, vllm_mode="server")
        trainer.vllm_generation = SimpleNamespace()
        assert "of this trl has no _iter_named_params" in _refused(trainer)
        trainer = _grpo(str(tmp_path))
        trainer._move_model_to_vllm, trainer.use_vllm = (lambda: None), True
        assert "GRPOTrainer sends weights to vLLM by _move_model_to_vllm, which takes shards" in _refused(trainer)
