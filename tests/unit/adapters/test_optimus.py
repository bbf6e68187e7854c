"""Optimus-dl's transforms: a model's own hook, accumulation, one rank, and every field."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from core.adapters.optimus import (
    Collective,
    DDPTransform,
    DDPTransformConfig,
    FullyShardTransform,
    FullyShardTransformConfig,
    MeshCollective,
    MixedPrecisionConfig,
    OffloadConfig,
)
from core.base.errors import ConfigError, ParallelConfigError, warn_once
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.adapters._adapters import Net, batch
from tests.unit.distributed._toys import CountedTraffic

CPU = torch.device("cpu")


class _Hooked(Net):
    """Shards its second layer alone, and frees it after forward under every config."""

    def fully_shard(self, **kwargs: Any) -> None:
        fully_shard(self.layers[1], **{**kwargs, "reshard_after_forward": True})

    def make_parameter_groups(self) -> Any:
        return [{"params": list(self.parameters())}]


@on_ranks(2)
def test_a_models_own_hook_decides_its_units() -> None:
    model = _Hooked()
    config = FullyShardTransformConfig(mixed_precision=MixedPrecisionConfig("bf16"))
    assert FullyShardTransform(config, MeshCollective(), CPU).apply(model) is model
    assert [name for name, m in model.named_modules() if isinstance(m, FSDPModule)] == ["", "layers.1"]
    group = model.layers[1]._get_fsdp_state()._fsdp_param_group
    assert group.post_forward_mesh_info is not None and group.fsdp_params[0].mp_policy.param_dtype == torch.bfloat16
    model(batch(0, 0, dist.get_rank())).backward()
    wrapped = DDPTransform(DDPTransformConfig(), MeshCollective(), CPU).apply(_Hooked())
    assert wrapped.make_parameter_groups() == wrapped.module.make_parameter_groups()
    plain = DDPTransform(DDPTransformConfig(), MeshCollective(), CPU).apply(Net())
    assert [name for name, _ in plain.make_parameter_groups()["params"]] == [n for n, _ in Net().named_parameters()]


@pytest.mark.parametrize("sync_always", [True, False])
@on_ranks(2)
def test_the_last_micro_batch_alone_communicates_unless_asked(sync_always: bool) -> None:
    config = FullyShardTransformConfig(sync_grad_accum=sync_always)
    model = FullyShardTransform(config, MeshCollective(), CPU).apply(Net())
    with CountedTraffic() as traffic, model.accumulation_context(False):
        model(batch(0, 0, dist.get_rank())).backward()
    assert bool(traffic.reductions) == sync_always
    with pytest.raises(ZeroDivisionError), model.accumulation_context(False):
        raise ZeroDivisionError
    with CountedTraffic() as traffic:  # sync is as it was
        model(batch(0, 1, dist.get_rank())).backward()
    assert traffic.reductions
    replicas = DDPTransform(DDPTransformConfig(), MeshCollective(), CPU).apply(Net())
    with CountedTraffic() as traffic, replicas.accumulation_context(False):
        replicas(batch(0, 0, dist.get_rank())).backward()
    assert not traffic.reductions
    with pytest.raises(ZeroDivisionError), replicas.accumulation_context(False):
        raise ZeroDivisionError
    with replicas.accumulation_context(True):
        replicas(batch(0, 1, dist.get_rank())).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    expected = dict(zip(found, (parameter.grad for parameter in replicas.parameters()), strict=True))
    assert_same_sums(found, expected, additions=3)  # two micro-batches of two ranks


def test_one_rank_keeps_its_model_with_an_accumulation_context():
    for transform, config in (
        (DDPTransform, DDPTransformConfig()),
        (FullyShardTransform, FullyShardTransformConfig()),
    ):
        model = Net()
        assert transform(config, Collective(), CPU).apply(model) is model
        assert not any(isinstance(m, FSDPModule) for m in model.modules())
        with model.accumulation_context(False), model.accumulation_context(is_last_microbatch=True):
            model(batch(0, 0, 0)).backward()
        assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_every_field_changes_something_or_warns() -> None:
    def observed(transform: Any, config: Any) -> tuple[Any, list[str]]:
        warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = transform(config, MeshCollective(sharding_world_size=1), CPU).apply(Net())
        weight = next(model.parameters())
        shown: Any = (type(model).__name__, str(getattr(weight, "placements", None)))
        if isinstance(model, FSDPModule):
            states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
            groups = [state._fsdp_param_group for state in states]
            shown += tuple(
                (g.fsdp_params[0].mp_policy, str(type(g.offload_policy)), g.post_forward_mesh_info is None)
                for g in groups
            )
            with CountedTraffic() as traffic, model.accumulation_context(False):
                model(batch(0, 0, dist.get_rank())).backward()
            shown += (bool(traffic.reductions),)
        return shown, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]

    plain, warned = observed(DDPTransform, DDPTransformConfig())
    assert not warned
    for name, value in (("find_unused_parameters", True), ("gradient_as_bucket_view", False), ("static_graph", True)):
        seen, warned = observed(DDPTransform, DDPTransformConfig(**{name: value}))
        assert seen == plain and any(f"{name}={value} changes nothing" in message for message in warned)
    plain, warned = observed(FullyShardTransform, FullyShardTransformConfig())
    assert not any("changes" in message for message in warned)
    for fields in (
        {"reshard_after_forward": True},
        {"use_hybrid_sharding": False},
        {"sync_grad_accum": True},
        {"offload": OffloadConfig(cpu_offload=True)},
        {"mixed_precision": MixedPrecisionConfig(param_dtype="bf16")},
        {"mixed_precision": MixedPrecisionConfig(reduce_dtype="double")},
        {"mixed_precision": MixedPrecisionConfig(output_dtype="float64")},
        {"mixed_precision": MixedPrecisionConfig(cast_forward_inputs=False)},
    ):
        assert observed(FullyShardTransform, FullyShardTransformConfig(**fields))[0] != plain, fields
    _, warned = observed(FullyShardTransform, FullyShardTransformConfig(offload=OffloadConfig(True, False)))
    assert any("pin_memory=False changes nothing" in message for message in warned)


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "fp16", "float16", "half", "float32", "fp32", "float", "double"])
def test_names_of_dtypes(name):
    MixedPrecisionConfig(name, name, name)


def test_wrong_dtypes_collectives_and_sizes_are_named():
    with pytest.raises(ConfigError, match=r"param_dtype is 'bfloat1'; did you mean 'bfloat16'"):
        MixedPrecisionConfig("bfloat1")
    with pytest.raises(ParallelConfigError, match="rank is 2 of a world of 2"):
        Collective(2, 2)
    with pytest.raises(ParallelConfigError, match="takes a MeshCollective"):
        FullyShardTransform(FullyShardTransformConfig(), Collective(0, 2), CPU).apply(nn.Linear(2, 2))


@on_ranks(2)
def test_a_collective_knows_its_meshes() -> None:
    collective = MeshCollective(sharding_world_size=1)
    assert (collective.world_size, collective.rank, collective.dp_world_size) == (2, dist.get_rank(), 2)
    assert tuple(collective.dp_mesh.shape) == (2, 1) and collective.tp_mesh.size() == 1
    assert collective.process_group is dist.group.WORLD
    assert (collective.dp_rank, collective.tp_rank, collective.local_rank) == (dist.get_rank(), 0, dist.get_rank())
    named = MeshCollective(dist.get_rank(), 2, 1, 0, "cpu")  # as its original is called: one rank a machine
    assert tuple(named.dp_mesh.shape) == (2, 1) and named.local_rank == 0
    with pytest.raises(ParallelConfigError, match="world_size is 4, but the process group has 2"):
        MeshCollective(dist.get_rank(), 4)
    with pytest.raises(ParallelConfigError, match="sharding_world_size 2 times tp_size 2"):
        MeshCollective(tp_size=2, sharding_world_size=2)
    with pytest.raises(ParallelConfigError, match="flat buffers take no DTensors"):
        DDPTransform(DDPTransformConfig(), MeshCollective(tp_size=2), CPU).apply(Net())
