"""The optimizer's state sharded over optimizer instances too: the same bits, less memory, the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import ParallelConfigError
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import FullyShardedDataParallel, finalize_model_grads, wrap_model
from core.distributed.report.table import model_facts
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import UNITS, accumulate, build, full, gradients, settings, toy

VARIANTS: list[dict[str, Any]] = [
    {},
    {"reduce_every_micro_batch": True},
    {"shard_cut": "tensor", "cpu_offload": True, "pin_memory": False},
    {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"average_in_collective": True},
]


def _build(**fields: Any) -> tuple[FullyShardedDataParallel, MegatronOptimizer]:
    ddp_config = settings("zero3", num_distributed_optimizer_instances=2, **fields)
    model = wrap_model(toy(), SimpleNamespace(), ddp_config, sub_modules_to_wrap=UNITS)
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.1), [model])


def _whole(model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    return {name: full(held) for name, held in model.state_dict().items()}


def _step(model: FullyShardedDataParallel, optimizer: MegatronOptimizer) -> tuple[dict[str, torch.Tensor], float]:
    model.zero_grad_buffer()
    accumulate(model)
    finalize_model_grads([model])
    found = gradients(model)
    return found, optimizer.step()[1]


def _is_the_same() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for fields in VARIANTS:
        if "reduce_every_micro_batch" in fields and dist.get_world_size() == 2:
            continue  # instances of one rank reduce each only where they share the update: another order of additions
        (model, optimizer), (outer, other) = _build(**fields), _build(outer_dp_sharding_strategy="optim", **fields)
        for _ in range(3):
            (expected, norm), (found, other_norm) = _step(model, optimizer), _step(outer, other)
            assert norm == other_norm, fields
            assert_same(found, expected)
        assert_same(_whole(outer), _whole(model))
        sizes = [sum(p.main.numel() for p in each._params) for each in (optimizer, other)]
        total = torch.tensor(sizes)
        dist.all_reduce(total)
        assert total[0] == 2 * total[1]  # every element has one owner, where each instance had one


@pytest.mark.parametrize("num_ranks", quick([2, 4], {4}.__contains__))
def test_sharding_over_instances_too_changes_no_bit(num_ranks):
    run_distributed(_is_the_same, num_ranks)


def _state(model: FullyShardedDataParallel, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    return model_state_dict(model) | {f"optimizer.{name}": held for name, held in optimizer.state_tensors().items()}


@on_ranks(4)
def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for saving, loading in (("optim", "no_shard"), ("no_shard", "optim")):
        model, optimizer = _build(outer_dp_sharding_strategy=saving)
        _step(model, optimizer)
        save(_state(model, optimizer), tmp_path / saving, metadata={"optimizer": optimizer.state_scalars()})
        _step(model, optimizer)
        other, continued = _build(outer_dp_sharding_strategy=loading)
        metadata = load(_state(other, continued), tmp_path / saving)
        continued.load_state_scalars(metadata["optimizer"])
        _step(other, continued)
        assert_same(_whole(other), _whole(model))


@on_ranks(4)
def test_the_description_counts_what_instances_exchange() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model, _ = _build(outer_dp_sharding_strategy="optim", reshard_after_forward=False)
    block = next(unit for unit in model_facts(model.plan, model.module, 1).units if unit.name == "blocks.0")
    traffic = [(entry.kind, entry.nbytes, entry.ranks) for entry in block.traffic]
    whole = traffic[0][1]
    assert traffic == [
        ("all-gather", whole, 2),
        ("reduce-scatter", whole, 2),
        ("reduce-scatter", whole // 2, 2),
        ("all-gather", whole // 2, 2),
    ]


@on_ranks(1)
def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match="outer_dp_sharding_strategy is 'optim' with one optimizer instance"):
        build("zero3", toy(), outer_dp_sharding_strategy="optim")
    with pytest.raises(ParallelConfigError, match="FSDP2 replicates shards over optimizer instances"):
        build("fsdp2", toy(), outer_dp_sharding_strategy="optim")
    with pytest.raises(ParallelConfigError, match="it takes one of no_shard, optim"):
        build("zero3", toy(), outer_dp_sharding_strategy="optim_grads")
