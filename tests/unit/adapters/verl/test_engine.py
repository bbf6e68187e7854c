"""verl's worker on two ranks: losses, norms and weights of a plain loop in one process, one reduction a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.base.errors import ConfigError, OptimizerError
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w
from tests.unit.distributed._toys import recorded_collectives

pytestmark = needs("verl")

EPS = 2.0**-23
UNITS = 3
POLICY = {"entropy_coeff": 0.01, "calculate_entropy": True}
# A step's loss and norm are sums of some hundred terms. AdamW's eps of 1e-3 lets a difference of gradients grow by at
# most 1000 times the rate of 0.05, in each of three steps; gradients are below 1.
LOSSES, WEIGHTS = {"rtol": 256 * EPS, "atol": 0.0}, {"rtol": 0.0, "atol": 3 * 50 * 256 * EPS * 0.05}


def _reference(path: str, is_policy: bool) -> Any:
    w._use_cpu()
    return w.reference(path, range(3), w.policy_loss() if is_policy else None)


def _trained(path: str, is_policy: bool, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Returns steps, weights, and reductions of each step."""
    found = []
    with w.verl_environment():
        for strategy, fields in cases:
            worker = w.worker_of(path, strategy, **fields)
            if is_policy:
                worker.set_loss_fn(w.policy_loss())
            with recorded_collectives("the gradients of") as begun:
                steps = w.train(worker, range(3))
            found.append((steps, w.weights(worker), len(begun)))
    return found


@pytest.mark.parametrize("is_policy", [False, True], ids=["sft", "policy"])
def test_losses_and_weights_are_those_of_one_process(tmp_path, is_policy):
    path = w.save_model(tmp_path / "model")
    ((steps, weights),) = run_distributed(_reference, 1, path, is_policy)
    of_ranks = run_distributed(_trained, 2, path, is_policy, [(strategy, {}) for strategy in w.STRATEGIES])
    assert of_ranks[0][0][0] == of_ranks[1][0][0]
    for strategy, found in zip(w.STRATEGIES, of_ranks[0], strict=True):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(steps), **LOSSES)
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, **WEIGHTS)
            assert torch.equal(found[1][name], of_ranks[0][0][1][name]), (strategy, name)
        # Of three micro-batches each the last alone communicates.
        assert found[2] == 3 * (UNITS if strategy in ("optim_grads_params", "fsdp2") else 1), strategy


def test_batches_of_any_form_are_those_of_one_process(tmp_path):
    path = w.save_model(tmp_path / "model", tied=False)  # which verl leaves on the meta device on all ranks but one
    ((steps, weights),) = run_distributed(_reference, 1, path, False)
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 16}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("optim", {"model": {"use_remove_padding": False, "enable_gradient_checkpointing": True}}),
        ("optim_grads_params", {"micro_batch_size_per_gpu": 3, "pad_to_length": True, "pad_to_length_bucket": 16}),
        ("optim_grads_params", dynamic | {"settings": {"reshard_after_forward": False}}),
        ("fsdp2", dynamic),
    ]
    for case, found in zip(cases, run_distributed(_trained, 2, path, False, cases)[0], strict=True):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(steps), **LOSSES, msg=str(case))
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, **WEIGHTS)


def _over_split_sequences(path: str) -> list[Any]:
    found = []
    model = {"override_config": {"attn_implementation": "flash_attention_2"}}
    with w.verl_environment(), w.stub_of_flash_attention():
        for strategy in ("no_shard", "optim_grads_params", "fsdp2"):
            worker = w.worker_of(path, strategy, ulysses_sequence_parallel_size=2, model=model)
            done = [worker.train_batch(w.batch(step, 0, 1)) for step in range(3)]
            metrics = [each["metrics"] for each in done if each is not None]  # of the first rank alone
            found.append(([(each["loss"], each["grad_norm"]) for each in metrics], w.weights(worker)))
    return found


def test_split_sequences_train_as_one_process(tmp_path):
    path = w.save_model(tmp_path / "model")
    ((steps, weights),) = run_distributed(_reference, 1, path, False)
    for found in run_distributed(_over_split_sequences, 2, path)[0]:
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(steps), **LOSSES)
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, **WEIGHTS)


@pytest.mark.long
def test_a_hybrid_trains_as_one_process(tmp_path):
    path = w.save_model(tmp_path / "model")
    ((steps, weights),) = run_distributed(_reference, 1, path, False)
    for found in run_distributed(_hybrids, 4, path)[0]:
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(steps), **LOSSES)
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, **WEIGHTS)


def _hybrids(path: str) -> list[Any]:
    found = []
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
    with w.verl_environment(local=2):
        for strategy in ("optim", "optim_grads_params", "fsdp2"):
            worker = w.worker_of(path, strategy, hybrid=True, **dynamic)
            found.append((w.train(worker, range(3)), w.weights(worker)))
    return found


def _in_bf16(path: str) -> None:
    with w.verl_environment():
        losses = {}
        for strategy in ("optim", "optim_grads_params", "fsdp2"):
            worker = w.worker_of(path, strategy, mixed_precision=None)
            losses[strategy] = [loss for loss, _ in w.train(worker, range(3))]
            assert worker.engine._autocast_dtype == torch.bfloat16
            assert all(weight.dtype == torch.float32 for weight in w.weights(worker).values())
        for found in losses.values():  # bf16 keeps 8 bits
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses["optim"]), rtol=2.0**-6, atol=0.0)


def test_mixed_precision_keeps_weights_in_fp32(tmp_path):
    run_distributed(_in_bf16, 2, w.save_model(tmp_path / "model"))


def _skipped_update(path: str) -> None:
    with w.verl_environment():
        worker = w.worker_of(path, "optim_grads")
        before = w.weights(worker)

        def infinite(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            return model_output["log_probs"].values().sum() * torch.inf, {}

        worker.set_loss_fn(infinite)
        assert not torch.isfinite(torch.tensor(w.train(worker, range(1))[0][1]))
        after = w.weights(worker)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_norm_that_is_not_finite_skips_the_update(tmp_path):
    run_distributed(_skipped_update, 2, w.save_model(tmp_path / "model"))


def _inferred(path: str) -> None:
    from verl.utils import tensordict_utils as tu

    with w.verl_environment():
        log_probs = {}
        for strategy, fields in (("no_shard", {}), ("optim_grads_params", {"forward_only": True})):
            worker = w.worker_of(path, strategy, **fields)
            output = worker.infer_batch(w.batch(0, compute_loss=False, calculate_entropy=True))
            log_probs[strategy] = tu.get(output, "log_probs").values()
            assert tu.get(output, "entropy").values().shape == log_probs[strategy].shape
        assert torch.equal(log_probs["no_shard"], log_probs["optim_grads_params"])
        assert not any(parameter.requires_grad for parameter in worker.engine.module.parameters())


def test_an_engine_of_forward_alone_infers_the_same(tmp_path):
    run_distributed(_inferred, 2, w.save_model(tmp_path / "model"))


def _in_mini_batches(path: str) -> None:
    from verl.utils import tensordict_utils as tu

    with w.verl_environment():
        worker, other = w.worker_of(path, "optim_grads"), w.worker_of(path, "optim_grads", optim={"clip_grad": 1e9})
        data = w.batch(0, mini_batch_size=w.SEQUENCES, epochs=2, dataloader_kwargs={"shuffle": False})
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        assert metrics["loss"] == [loss for loss, _ in w.train(w.worker_of(path, "fsdp2"), [0, 0])]
        data = w.batch(0, mini_batch_size=2, epochs=1, dataloader_kwargs={"shuffle": False})
        assert len(tu.get(other.train_mini_batch(data), "metrics")["grad_norm"]) == w.SEQUENCES // 2


def test_mini_batches_are_steps(tmp_path):
    run_distributed(_in_mini_batches, 2, w.save_model(tmp_path / "model"))


def _critic(path: str) -> None:
    from functools import partial

    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils.losses import value_loss

    with w.verl_environment():
        config = FSDPCriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        found = {}
        for strategy in ("no_shard", "optim_grads_params", "fsdp2"):
            loss = partial(value_loss, config=config)
            worker = w.worker_of(path, strategy, model_type="value_model", loss=loss)
            steps = w.train(worker, range(2))
            values = tu.get(worker.infer_batch(w.batch(0, compute_loss=False)), "values").values()
            found[strategy] = (steps, values, w.weights(worker)["score.weight"])
        # A product with one column is added up in an order that depends on where its memory begins.
        close = {"rtol": 64 * EPS, "atol": 64 * EPS}
        for steps, values, head in found.values():
            torch.testing.assert_close(torch.tensor(steps), torch.tensor(found["no_shard"][0]), **close)
            torch.testing.assert_close(values, found["no_shard"][1], **close)
            torch.testing.assert_close(head, found["no_shard"][2], **close)
        assert values.shape == w.batch(0)["input_ids"].values().shape and values.std() > 0


def test_a_critic_trains_by_its_value_head(tmp_path):
    run_distributed(_critic, 2, w.save_model(tmp_path / "model", head="TokenClassification"))


def _with_adapters(path: str, strategies: list[str]) -> list[Any]:
    from verl.utils import tensordict_utils as tu

    found = []
    with w.verl_environment():
        for strategy in strategies:
            torch.manual_seed(5)  # adapters are drawn
            model = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
            worker = w.worker_of(path, strategy, model=model)
            data = {"compute_loss": False, "no_lora_adapter": True}
            before = tu.get(worker.infer_batch(w.batch(0, **data)), "log_probs").values()
            steps = w.train(worker, range(2))
            after = tu.get(worker.infer_batch(w.batch(0, **data)), "log_probs").values()
            assert torch.equal(before, after), "the base model has changed, or adapters were not disabled"
            adapted = tu.get(worker.infer_batch(w.batch(0, compute_loss=False)), "log_probs").values()
            assert not torch.equal(adapted, after)
            steps += w.train(worker, range(2, 3))  # adapters are trained again after they were disabled
            found.append((steps, w.weights(worker), worker.engine))
            found[-1] = (*found[-1][:2], *_sent(worker.engine))
    return found


def _sent(engine: Any) -> list[Any]:
    base, config = engine.get_per_tensor_param(base_sync_done=False)
    only, _ = engine.get_per_tensor_param(base_sync_done=True, layered_summon=True)
    sent = [{name: tensor.clone() for name, tensor in stream} for stream in (base, only)]
    engine.model_config.lora["merge"] = True
    merged, none = engine.get_per_tensor_param()
    assert none is None and config["r"] == 2 and config["peft_type"] == "LORA", config
    for call in (engine.get_per_tensor_param_shard, engine.get_per_tensor_param_delta_shard):
        with pytest.raises(ConfigError, match="model with adapters; sync whole tensors"):
            call()
    return [*sent, {name: tensor.clone() for name, tensor in merged}]


def test_adapters_are_trained_disabled_and_sent(tmp_path):
    path = w.save_model(tmp_path / "model")
    strategies = ["no_shard", "optim_grads_params", "fsdp2"]
    of_ranks = run_distributed(_with_adapters, 2, path, strategies)
    first = of_ranks[0][0]
    for steps, weights, base, only, merged in (*of_ranks[0], *of_ranks[1]):
        assert steps == first[0]
        for found, expected in zip((weights, base, only, merged), first[1:], strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
    _, weights, base, only, merged = first
    layer = "model.layers.0.self_attn.q_proj"
    plain = weights[f"base_model.model.{layer}.base_layer.weight"]
    assert torch.equal(base[f"{layer}.base_layer.weight"], plain) and "model.norm.weight" in base
    assert not any("lora" in name for name in base)
    a, b = (only[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
    assert len(only) == 8 and all("lora" in name for name in only)
    assert torch.equal(merged[f"{layer}.weight"], torch.add(plain, b @ a, alpha=2.0).bfloat16())


def test_bad_input_is_one_line(tmp_path):
    run_distributed(_reject, 1, w.save_model(tmp_path / "model"))


def _reject(path: str) -> None:
    with w.verl_environment():
        with pytest.raises(ConfigError, match="set offload_activations in the engine's settings"):
            w.worker_of(path, "optim", model={"enable_activation_offload": True})
        with pytest.raises(OptimizerError, match="Adafactor is not elementwise"):
            w.worker_of(path, "no_shard", optim={"optimizer": "Adafactor", "override_optimizer_config": None})
        engine = w.worker_of(path, "optim").engine
        with pytest.raises(ConfigError, match="to was given 'meta'; it takes 'cpu'"):
            engine.to("meta")
        with pytest.raises(AssertionError, match="no seed snapshot for this shard; run the seed export first"):
            next(engine.get_per_tensor_param_delta_shard()[0])
