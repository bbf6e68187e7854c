"""What the plan says is what the engines do: compared with torch's groups, and with the buffers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import core
from core.base._torch_compat import fsdp_param_groups
from core.dist_checkpointing import local_tensor
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from core.distributed.distributed_data_parallel_config import EngineKind
from core.distributed.groups import DataParallelGroups
from core.distributed.plan import plan_model
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import UNITS, toy


class Uneven(nn.Module):
    """Rows that two and three ranks do not divide, fewer rows than ranks, frozen and tied weights, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1)])
        self.norm = nn.LayerNorm(3, dtype=torch.float64)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.layers[2].weights_used_in_backward = False


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"keep_gathered_between_micro_batches": "all"},
    "overrides": {"reshard_overrides": ("layers.1=False", "=True"), "grad_reduce_in_fp32": True},
    "no prefetch": {"forward_prefetch": 0, "backward_prefetch": 0, "reduce_every_micro_batch": True},
}


def _groups(module: Any) -> list[Any]:
    return fsdp_param_groups(module._get_fsdp_state())


def _name(module: nn.Module, parameter: Any) -> str:
    info = parameter._module_info
    held = getattr(info.module, info.param_name)
    return next(name for name, p in module.named_parameters() if p is held)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_the_plan_of_fsdp2_is_what_torch_has_been_given(name: str, ranks: int):
    module = Uneven()
    names = {id(p): n for n, p in module.named_parameters()}
    settings = TorchFullyShardedDataParallelConfig(**SETTINGS[name])
    planned = plan_model(module, None, settings, DataParallelGroups(dist.group.WORLD, dist.group.WORLD), [nn.Linear])
    assert names == {id(p): n for n, p in module.named_parameters()}  # planning touches nothing
    model = TorchFullyShardedDataParallel(None, settings, module, [nn.Linear], process_group=dist.group.WORLD)
    plan = model.plan
    assert plan.engine is planned.engine is EngineKind.FSDP2
    assert [unit.params for unit in planned.units] == [unit.params for unit in plan.units]
    groups = {id(g): g for m in module.modules() if isinstance(m, FSDPModule) for g in _groups(m) if g.fsdp_params}
    found = {tuple(sorted(_name(module, p) for p in group.fsdp_params)): group for group in groups.values()}
    units = {tuple(sorted(p.name for p in unit.params)): unit for unit in plan.units if unit.params}
    assert found.keys() == units.keys()
    rank = dist.get_rank()
    parameters = dict(module.named_parameters())
    for key, unit in units.items():
        group = found[key]
        assert (
            unit.precision == group.fsdp_params[0].mp_policy
            and unit.is_needed_in_backward == group.unshard_in_backward
        )
        assert unit.is_freed == (group.post_forward_mesh_info is not None)
        for param in unit.params:
            of_torch = next(p for p in group.fsdp_params if _name(module, p) == param.name)
            assert param.shard_numel == of_torch.padded_sharded_param_size.numel()
            assert param.shape == tuple(of_torch._orig_size) and param.numel == of_torch._orig_size.numel()
            sharded = parameters[param.name]
            assert isinstance(sharded, DTensor) and sharded.requires_grad == (param.name in plan.trained_params)
            assert local_tensor(sharded).numel() == param.bounds[rank + 1] - param.bounds[rank]
            whole = sharded.full_tensor().flatten()
            assert torch.equal(local_tensor(sharded).flatten(), whole[param.bounds[rank] : param.bounds[rank + 1]])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("bucket_size", [None, 40])
@on_ranks(2)
def test_the_plan_of_buffers_is_where_parameters_are(strategy: str, bucket_size: int | None) -> None:
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, bucket_size=bucket_size)
    model = wrap_model(toy(), None, settings, process_group=dist.group.WORLD)
    plan = model.plan
    assert plan.engine is EngineKind.FLAT_BUFFERS
    rank = dist.get_rank() if plan.num_shards > 1 else 0
    buckets = [plan.buffers[index][number] for index, number in plan.reduction_order]
    assert len(buckets) == len(model.bucket_groups)
    for planned, group in zip(buckets, model.bucket_groups, strict=True):
        bucket = group
        assert [param.name for param in planned.params] == [slot.name for slot in bucket.slots]
        assert planned.elements == bucket.numel
        length = bucket.numel // plan.num_shards
        places = planned.places_in_shard(rank)
        for param, slot, place in zip(planned.params, bucket.slots, places, strict=True):
            held = [element for element in range(slot.start, slot.end) if element // length == rank]
            assert param.bounds[rank + 1] - param.bounds[rank] == len(held)
            assert place == ((held[0] - length * rank, held[-1] + 1 - length * rank) if held else (0, 0))
            assert (param.bounds[0], param.bounds[-1]) == (0, slot.param.numel())
            assert param.num_parts == plan.num_shards


@on_ranks(4)
def test_a_hybrid_cuts_within_its_instances() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    config = SimpleNamespace(calculate_per_token_loss=True, bf16=True)
    for settings in (
        TorchFullyShardedDataParallelConfig(reshard_after_forward=1),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    ):
        model = toy() if isinstance(settings, TorchFullyShardedDataParallelConfig) else toy().to(torch.bfloat16)
        plan = plan_model(model, config, settings, DataParallelGroups.of_mesh(mesh), UNITS)
        assert plan.sums_gradients
        assert (plan.num_shards, plan.groups.num_replicas, plan.groups.whole.size()) == (2, 2, 4)
        if plan.engine is EngineKind.FSDP2:
            assert not any(unit.is_freed for unit in plan.units)
            assert plan.root.precision.param_dtype is torch.bfloat16
        else:
            assert plan.buffers[0][0].param_dtype is torch.bfloat16


CORE = Path(core.__file__).parent


def _files_with(pattern: str) -> set[str]:
    found = re.compile(pattern)
    return {str(p.relative_to(CORE)) for p in CORE.rglob("*.py") if found.search(p.read_text(encoding="utf-8"))}


def test_a_setting_is_written_only_where_it_is_planned():
    asked_for = {"distributed/fully_sharded_data_parallel_config.py", "training/config/build.py"}
    carried_out = {f"distributed/fsdp2/{file}.py" for file in ("shard_model", "fsdp2_engine")}
    carried_out.add("diagnostics/out_of_memory.py")  # names it as a remedy
    elsewhere = _files_with("reshard_after_forward") - asked_for - carried_out
    assert {path for path in elsewhere if not path.startswith(("distributed/plan/", "adapters/"))} == set()


def test_one_function_says_which_engine_a_strategy_means():
    configs = {"distributed/distributed_data_parallel_config.py"}
    assert _files_with(r'(==|!=) "optim_grads_params"|"optim_grads_params" (==|!=)') == configs
    assert not _files_with(r"isinstance\(\w*(config|settings|ddp), TorchFullyShardedDataParallelConfig\)")
    before_a_plan = {"dist_checkpointing/inspect.py", "adapters/accelerate/prepared.py", "adapters/nemo/__init__.py"}
    before_a_plan |= {"adapters/megatron_lm/wrappers.py", "training/config/megatron.py"}
    assert _files_with(r'(==|!=) "no_shard"') - before_a_plan == configs | {"distributed/plan/values.py"}
