"""Wrappers that a sharding strategy chooses inside Megatron-LM, by its schedule, against its own DDP."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError, ParallelConfigError
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

NOTHING: Mapping[str, Any] = MappingProxyType({})
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0}
"""Shows the bits of gradients. Two ranks add two numbers, in any order."""
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}

CLASSES = {
    "no_shard": "DistributedDataParallel",
    "optim": "DistributedDataParallel",
    "optim_grads": "DistributedDataParallel",
    "optim_grads_params": "FullyShardedDataParallel",
}


def parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state


def _train(
    strategy: str | None,
    changed: Mapping[str, Any] = NOTHING,
    *,
    layout: Mapping[str, int] = NOTHING,
    model: Mapping[str, Any] = NOTHING,
    **fields: Any,
) -> tuple[Any, ...]:
    """Returns losses, norms and whole weights under a strategy's wrapper, or under Megatron-LM's DDP."""
    from megatron.core import distributed
    from megatron.core.distributed import DistributedDataParallelConfig

    stock, chosen = _megatron.stock("DistributedDataParallel"), {"data_parallel_sharding_strategy": strategy}
    kind = distributed.FullyShardedDataParallel if strategy else stock
    settings = DistributedDataParallelConfig(**changed, **({"use_megatron_fsdp": True, **chosen} if strategy else {}))
    with _megatron.groups(**layout):
        stages = parallel_state().get_pipeline_model_parallel_world_size()
        built = _megatron.build_stage(**model) if stages > 1 else _megatron.build(**model)
        wrapper = _megatron.wrap(kind, built, settings)
        if strategy is not None:
            expected = f"shardstack.adapters.megatron_lm.wrappers.{CLASSES[strategy]}"
            assert (f"{type(wrapper).__module__}.{type(wrapper).__name__}", wrapper.plan.strategy) == (
                expected,
                strategy,
            )
        if settings.overlap_grad_reduce:
            wrapper.config.no_sync_func = wrapper.no_sync  # as Megatron-LM's loop
        losses, norms, _ = _megatron.train(wrapper, **fields)
        return losses, norms, _megatron.weights(wrapper)


def _assert_equal(found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compares losses, norms and weights. By default to the bit, but for norms, which this library sums in double."""
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(found[1], expected[1], rtol=max(rtol, 1e-6), atol=atol)
    torch.testing.assert_close(found[2], expected[2], rtol=rtol, atol=atol)


@on_ranks(2)
def test_a_chosen_strategy_has_the_bits_of_megatrons_ddp() -> None:
    expected = _train(None, **SGD)
    for strategy in CLASSES:
        _assert_equal(_train(strategy, **SGD), expected)
        _assert_equal(_train(strategy, {"overlap_grad_reduce": True}, **SGD), expected)


@on_ranks(2)
def test_adam_in_fp32_and_bf16_is_as_near_as_its_rounding() -> None:
    # Adam rounds in another order here than in torch's AdamW. A step changes a weight by `LR`, also one whose gradient
    # is rounding alone, as a key's bias. In bf16 fp32 masters are rounded, to 8 bits.
    for model, fields, rtol, atol in (({}, {}, 1e-5, 1e-2), ({"bf16": True}, {"bf16": True}, 2**-8, 2.0)):
        expected = _train(None, model=model, **fields)
        for strategy in ("optim_grads", "optim_grads_params"):
            _assert_equal(_train(strategy, model=model, **fields), expected, rtol=rtol, atol=atol * _megatron.LR)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"pipeline": 2}, {"tied": True}),
        ({"tensor": 2}, {"qk_layernorm": True}),
        ({"expert": 2}, EXPERTS),
        ({}, {"calculate_per_token_loss": True}),
    ],
    ids=["pipeline", "tensor", "experts", "per-token"],
)
@on_ranks(2)
def test_a_chosen_strategy_trains_under(layout: dict[str, int], model: dict[str, Any]) -> None:
    expected = _train(None, layout=layout, model=model, **SGD)
    for strategy in ("optim_grads", "optim_grads_params"):
        _assert_equal(_train(strategy, layout=layout, model=model, **SGD), expected)


@pytest.mark.long
@on_ranks(4)
def test_four_ranks_add_gradients_in_another_order() -> None:
    for layout, model in (({}, {}), ({"pipeline": 2}, {"tied": True}), ({"expert": 2}, EXPERTS)):
        expected = _train(None, layout=layout, model=model, **SGD)
        for strategy in ("optim_grads", "optim_grads_params"):
            found = _train(strategy, layout=layout, model=model, **SGD)
            _assert_equal(found, expected, rtol=1e-5, atol=1e-6)


def test_a_strategy_counts_if_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters.megatron_lm.wrappers import chosen_strategy

    of_arguments = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    for words, expected in (
        ([], None),
        (["--data-parallel-sharding-strategy", "optim_grads_params"], "optim_grads_params"),
        (["--data-parallel-sharding-strategy=optim_grads_params"], "optim_grads_params"),
        (["--outer-dp-sharding-strategy", "optim"], None),
    ):  # what is typed
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        assert chosen_strategy(of_arguments) == expected
    assert chosen_strategy(replace(of_arguments, use_megatron_fsdp=True)) == "optim_grads_params"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--data-parallel-sharding-strategy", "no_shard"])
    replicas = replace(of_arguments, data_parallel_sharding_strategy="no_shard")
    assert chosen_strategy(replicas) is None  # --use-distributed-optimizer goes on to count
    assert chosen_strategy(replace(replicas, use_megatron_fsdp=True)) == "no_shard"


@on_ranks(1)
def test_what_the_optimizer_cannot_honour_is_one_line() -> None:
    for fields, match in (
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload is True"),
        ({"optimizer": "lion"}, "optimizer"),
    ):
        with pytest.raises(ConfigError, match=match) as raised:
            _train("optim_grads", **fields)
        assert "\n" not in str(raised.value)
    with pytest.raises(ParallelConfigError, match="its thresholds are updated by Megatron-LM's finalize_model_grads"):
        _train("optim_grads", model=EXPERTS | {"moe_router_load_balancing_type": "quantile_balancing"})


@on_ranks(1)
def test_a_layer_wise_optimizer_is_refused_on_shards() -> None:
    match = "use_layer_wise_distributed_optimizer is True: it needs whole matrices"
    with _megatron.groups():
        for is_sharded in (False, True):
            wrapper, config = _wrapper(None, use_distributed_optimizer=is_sharded), _config(optimizer="adam", lr=0.1)
            config.use_layer_wise_distributed_optimizer = True  # a field from 0.17 on
            with pytest.raises(ParallelConfigError, match=match) if is_sharded else nullcontext():
                _build(config, wrapper)


@on_ranks(1)
def test_masters_of_a_file_are_refused_in_one_line() -> None:
    with _megatron.groups():
        optimizer = _optimizer("optim_grads", bf16=True, lr=0.1)
        _megatron.raises_one_line(ConfigError, "--load-main-params-from-ckpt", optimizer.reload_model_params, {})


@on_ranks(1)
def test_lion_updates_what_muon_does_not() -> None:
    with _megatron.groups():
        config = _config(optimizer="muon", muon_scalar_optimizer="lion", lr=0.1, weight_decay=0.0, clip_grad=0.0)
        wrapper = _wrapper("optim_grads")
        optimizer = _build(config, wrapper)
        for step in range(2):
            before = _megatron.weights(wrapper)
            wrapper.zero_grad_buffer()
            _backward(wrapper, step)
            megatron_step().finalize_model_grads([wrapper])
            optimizer.step()
            moved = {name: (weight - before[name]).abs() for name, weight in _megatron.weights(wrapper).items()}
            is_sign = {name: torch.allclose(by, torch.full_like(by, 0.1), atol=1e-6) for name, by in moved.items()}
            # Lion moves all by the rate. So does the first step of Adam alone.
            assert is_sign["decoder.layers.0.mlp.linear_fc2.bias"], step
            assert not is_sign["decoder.layers.0.mlp.linear_fc1.weight"], step


@pytest.mark.parametrize("strategy", [None, "optim"])
@on_ranks(2)
def test_force_all_reduce_leaves_whole_gradients(strategy: str | None) -> None:
    with _megatron.groups():
        plain = _megatron.build()
        for rank in range(2):
            _backward(plain, rank)
        expected = {name: parameter.grad / 2 for name, parameter in plain.named_parameters()}
        for force in (False, True):
            wrapper = _wrapper(strategy, use_distributed_optimizer=True)
            wrapper.zero_grad_buffer()
            _backward(wrapper, dist.get_rank())
            megatron_step().finalize_model_grads([wrapper], force_all_reduce=force)
            found = {name: parameter.main_grad for name, parameter in wrapper.module.named_parameters()}
            are_close = [torch.allclose(found[name], grad, rtol=1e-5, atol=1e-6) for name, grad in expected.items()]
            assert all(are_close) == force


@on_ranks(1)
def test_settings_of_the_wrapper_that_change_numbers_are_refused() -> None:
    for name, value in (("num_distributed_optimizer_instances", 2), ("delay_wgrad_compute", True)):
        with pytest.raises(ParallelConfigError if name[0] == "n" else ConfigError, match=f"{name} is {value}"):
            _train("optim_grads", {name: value})


@on_ranks(1)
def test_rates_of_single_parameters_are_megatrons() -> None:
    rates = {"lr": 0.1, "min_lr": 0.0, "decoupled_lr": 0.5, "decoupled_min_lr": 0.2}
    with _megatron.groups():
        stock, own = (_optimizer(strategy, **rates) for strategy in (None, "optim_grads"))
        expected = {(g["max_lr"], g["min_lr"], g["wd_mult"]) for g in stock.param_groups}
        assert {(g["max_lr"], g["min_lr"], g["wd_mult"]) for g in own.param_groups} == expected
        assert (0.5, 0.2, 1.0) in expected


@on_ranks(1)
def test_the_loop_finds_what_it_reads_of_an_optimizer() -> None:
    with _megatron.groups():
        # Fields that Megatron-LM's arguments set in every run, and that Adam does not read.
        optimizer = _optimizer("optim_grads", bf16=True, lr=0.1, muon_momentum=0.9, fp8_recipe="delayed")
        (wrapper,) = optimizer.wrappers
        assert optimizer.is_stub_optimizer is False and wrapper.config.no_sync_func == wrapper.no_sync
        with torch.no_grad():
            for parameter in wrapper.parameters():
                parameter.fill_(0.5)
        optimizer.reload_model_params()
        optimizer.prepare_model_params_for_param_sync()
        wrapper.zero_grad_buffer()
        sum(parameter.float().sum() * 0.0 for parameter in wrapper.parameters()).backward()
        megatron_step().finalize_model_grads([wrapper])
        optimizer.step()  # by no gradient: AdamW decays what was loaded, by 0.001
        for group in optimizer.param_groups:
            for main in group["params"]:
                expected = 0.5 * (1.0 - 0.1 * group["weight_decay"])
                torch.testing.assert_close(main.detach(), torch.full_like(main, expected))


def megatron_step() -> Any:
    from megatron.core import distributed

    return distributed


def _optimizer(strategy: str | None, bf16: bool = False, **fields: Any) -> Any:
    """Returns the optimizer of a new model under a strategy's wrapper, or under the adapter's replicas."""
    return _build(_config(optimizer="adam", bf16=bf16, **fields), _wrapper(strategy, bf16))


def _wrapper(strategy: str | None, bf16: bool = False, **settings: Any) -> Any:
    from core.adapters import megatron_lm  # isort: skip  # before what it replaces is imported

    from megatron.core.distributed import DistributedDataParallelConfig

    chosen = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy} if strategy else {}
    config = DistributedDataParallelConfig(**chosen, **settings)
    return _megatron.wrap(megatron_lm.DistributedDataParallel, _megatron.build(bf16=bf16), config)


def _config(**fields: Any) -> Any:
    """Returns Megatron-LM's settings of an optimizer. Fields of newer versions are added."""
    from megatron.core.optimizer import OptimizerConfig

    newer = [(name, Any, None) for name in fields if not hasattr(OptimizerConfig, name)]
    return make_dataclass("OptimizerConfig", newer, bases=(OptimizerConfig,))(**fields)


def _build(config: Any, wrapper: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(config, [wrapper])


def _backward(model: Any, rank: int) -> None:
    text = _megatron.tokens(0, 0, rank)
    model(text, torch.arange(_megatron.SEQUENCE).expand_as(text), None, labels=text.roll(-1, 1)).mean().backward()
