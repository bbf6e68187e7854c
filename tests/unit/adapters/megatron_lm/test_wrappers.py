"""Megatron-LM's schedule, gradients and optimizer on this library's FSDP2 wrapper, and what they check of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError, ParallelConfigError, WrapError
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

UNITS = 5  # two layers, the embedding, the output layer, and the root, which has the last norm


@pytest.mark.parametrize(
    ("tied", "per_token"), [(False, False), pytest.param(True, False, marks=pytest.mark.long), (False, True)]
)
@on_ranks(2)
def test_it_trains_as_one_process_with_one_reduction_a_step(tied: bool, per_token: bool) -> None:
    from core.adapters import megatron_lm

    with _megatron.groups(), _megatron.counted() as calls:
        model = _megatron.build(tied, calculate_per_token_loss=per_token)
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, model)
        losses, norms, _ = _megatron.train(model)
        found = _megatron.weights(model)
        expected_losses, expected_norms, expected = _megatron.serial(2, tied, per_token)
    units = UNITS - 2 * tied  # the root has the embedding, which the output layer reads
    assert calls["foreach_reduce"] == units * _megatron.STEPS, "more than one reduction a step"
    # Norms are sums of squares by shard, not by parameter: that rounding scales the clipped gradients, and Adam
    # carries it on. A step changes a weight by `LR`, which is 0.01.
    torch.testing.assert_close(losses, expected_losses[dist.get_rank()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-2 * _megatron.LR)


@on_ranks(2)
def test_its_stages_train_by_megatrons_schedule_as_one_process() -> None:
    from core.adapters import megatron_lm

    with _megatron.groups(pipeline=2), _megatron.counted() as calls:
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, _megatron.build_stage())
        losses, norms, _ = _megatron.train(model)
        found = _megatron.weights(model)
        expected_losses, expected_norms, expected = _megatron.serial(1)
        names = {name: _megatron.name_in_model(name) for name in found}
    rank = dist.get_rank()
    # The first stage has the embedding and a layer; the second a layer, the output layer, and the root's last norm.
    assert calls["foreach_reduce"] == (2, 3)[rank] * _megatron.STEPS, "more than one reduction a step"
    torch.testing.assert_close(losses, expected_losses[0] if rank else [], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0.0)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[names[name]], rtol=0.0, atol=1e-2 * _megatron.LR, msg=name)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        # What Megatron-LM's arguments set in every run. It counts with `use_megatron_fsdp` alone.
        {"data_parallel_sharding_strategy": "optim_grads_params", "bucket_size": 500, "overlap_grad_reduce": True},
    ],
    ids=lambda changed: "-".join(changed) or "replicas",
)
@on_ranks(2)
def test_its_ddp_trains_with_megatrons_optimizer_as_megatrons(changed: dict[str, Any]) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    is_sharded, results = changed.get("use_distributed_optimizer", False), []
    for kind in (_megatron.stock("DistributedDataParallel"), megatron_lm.DistributedDataParallel):
        with _megatron.groups():
            model = _megatron.wrap(kind, _megatron.build(), DistributedDataParallelConfig(**changed))
            model.config.no_sync_func = model.no_sync if changed.get("overlap_grad_reduce") else None
            losses, norms, _ = _megatron.train(model, use_distributed_optimizer=is_sharded)
            if changed.get("overlap_param_gather"):
                model.disable_forward_pre_hook()  # as before an evaluation
            results.append((losses, norms, _megatron.weights(model)))
    (losses, norms, expected), (own_losses, own_norms, found) = results
    assert (own_losses, own_norms) == (losses, norms) and expected.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


@on_ranks(1)
def test_a_model_in_bf16_is_loaded_as_megatron_loads_it() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    with _megatron.groups():
        for settings in (
            DistributedDataParallelConfig(),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
        ):
            model = _megatron.wrap(megatron_lm.DistributedDataParallel, _megatron.build(bf16=True), settings)
            state = {name: torch.full_like(p, 0.5) for name, p in model.module.module.named_parameters()}
            model.load_state_dict(state, strict=False)  # as Megatron-LM's `load_checkpoint` calls it
            assert all((parameter == 0.5).all() for parameter in model.parameters())


@on_ranks(2)
def test_an_fp16_overflow_in_one_shard_skips_every_ranks_step() -> None:
    from core.adapters import megatron_lm

    steps: list[int] = []

    def overflow_once(optimizer: Any) -> None:
        steps.append(len(steps))
        if steps[-1] == 1 and dist.get_rank() == 1:  # in the shard of one rank alone
            next(model.parameters()).grad.to_local().fill_(float("inf"))

    with _megatron.groups():
        model = _megatron.build(fp16=True)
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, model)
        scaler = {"initial_loss_scale": 256.0, "min_loss_scale": 1.0, "hysteresis": 1}
        losses, norms, optimizer = _megatron.train(model, each_step=overflow_once, fp16=True, **scaler)
        scale = optimizer.get_loss_scale().item()
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert all(p.isfinite().all() for p in _megatron.weights(model).values())
        expected = _megatron.serial(2)[0][dist.get_rank()]
    of_first_step = slice(_megatron.MICRO_BATCHES)
    assert losses[of_first_step] == pytest.approx(expected[of_first_step], rel=2e-3)  # fp16 has 11 bits
    assert [norm is None for norm in norms] + [scale] == [False, True, False, False, 128.0]


@on_ranks(1)
def test_a_setting_that_its_ddp_cannot_honour_is_one_line() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    kind = megatron_lm.DistributedDataParallel
    with _megatron.groups():
        settings = DistributedDataParallelConfig(check_for_large_grads=True)
        _megatron.raises_one_line(
            ConfigError, "check_for_large_grads is True", _megatron.wrap, kind, _megatron.build(), settings
        )
        model = _megatron.wrap(kind, _megatron.build(), DistributedDataParallelConfig())
        _megatron.raises_one_line(
            WrapError, "wrapper already", _megatron.wrap, kind, model, DistributedDataParallelConfig()
        )


@on_ranks(1)
def test_a_model_or_config_that_it_cannot_take_is_one_line() -> None:
    from core.adapters import megatron_lm

    kind = megatron_lm.TorchFullyShardedDataParallel
    with _megatron.groups():
        once = _megatron.wrap(kind, _megatron.build())
        _megatron.raises_one_line(WrapError, "wrapper already", _megatron.wrap, kind, once)
        model = _megatron.build()
        model.config.no_sync_func = once.no_sync  # of a model built before with the same config
        _megatron.wrap(kind, model)
        for name, value, match in (
            ("no_sync_func", print, "leave it None"),
            ("virtual_pipeline_model_parallel_size", 2, "use one stage a rank"),
            ("expert_model_parallel_size", 2, "use expert size 1"),
            ("gradient_accumulation_fusion", True, "--no-gradient-accumulation-fusion"),
        ):
            model = _megatron.build()
            setattr(model.config, name, value)
            _megatron.raises_one_line(ParallelConfigError, match, _megatron.wrap, kind, model)
        _megatron.raises_one_line(
            ConfigError, "nothing says how to initialise", _megatron.wrap, kind, _megatron.build().to("meta")
        )


@on_ranks(2)
def test_groups_are_taken_by_position() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    from core.adapters import megatron_lm

    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    with _megatron.groups():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.dp_cp = groups.dp = dist.new_group([0, 1])  # the same ranks, another group
        for name, fields, more in (
            ("DistributedDataParallel", {}, (False, groups)),
            ("FullyShardedDataParallel", sharded, (None, False, None, groups)),
            (
                "FullyShardedDataParallel",
                sharded | {"data_parallel_sharding_strategy": "optim"},
                (None, False, None, groups),
            ),
            ("TorchFullyShardedDataParallel", {}, (None, False, groups.dp_cp)),
        ):
            model, settings = _megatron.build(), DistributedDataParallelConfig(**fields)
            wrapper = getattr(megatron_lm, name)(model.config, settings, model, *more)
            assert wrapper.process_group is groups.dp_cp, name
