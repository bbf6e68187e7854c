"""The described traffic of a step equals that of its collectives, counted call by call."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import parallel_state
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from core.distributed.distributed_data_parallel_config import EngineKind
from core.distributed.groups import DataParallelGroups
from core.distributed.plan import ParamPlan, PiecePlan, Plan, UnitPlan
from core.distributed.plan.parts import Traffic
from core.distributed.plan.settings import Settings
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import UNITS, CountedTraffic, Toy, accumulate, build, toy

MICRO_BATCHES = 3
_KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}


class CollectiveBytes(TorchDispatchMode):
    """Calls and bytes of the whole tensors of torch's own collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func._schema.name.removeprefix("c10d::")) if func.namespace == "c10d" else None
        if kind is not None:
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            self.counted[kind, "calls"] += 1
            self.counted[kind, "bytes"] += max(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def _said(model: Any) -> dict[tuple[str, str], int]:
    said: Counter[tuple[str, str]] = Counter()
    for entry in model.plan.traffic(MICRO_BATCHES):
        said[entry.kind, "calls"] += entry.calls
        said[entry.kind, "bytes"] += entry.calls * entry.nbytes
    return dict(said)


def _step(model: Any) -> None:
    model.zero_grad_buffer()
    accumulate(model, MICRO_BATCHES)
    model.finish_grad_sync()


def _frozen_below(module: Toy) -> Toy:
    module.embedding.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    return module


MODELS = {
    "tied": lambda: toy(),
    "untied": lambda: toy(tied=False),
    "frozen below": lambda: _frozen_below(toy(tied=False)),
    "adapters": lambda: _adapted(),
}


def _adapted() -> nn.Module:
    """Freezes all but the gains of the blocks, so that backward runs through weights that get no gradient."""
    module = toy(tied=False).requires_grad_(False)
    for block in module.blocks:
        block.gain.requires_grad_(True)
    return module


@pytest.mark.parametrize(
    ("kind", "fields", "config", "spared"),
    [
        ("tied", {}, {}, False),
        ("untied", {}, {}, True),
        ("untied", {"reshard_after_forward": False}, {}, False),
        ("untied", {"grad_reduce_in_fp32": True}, {"bf16": True}, False),
        ("untied", {}, {"bf16": True}, True),
        ("frozen below", {}, {}, False),
        ("adapters", {}, {}, False),
        ("frozen below", {"backward_prefetch": 0}, {}, False),
        ("untied", {"keep_gathered_between_micro_batches": "all"}, {}, False),
        ("untied", {"keep_gathered_between_micro_batches": "all"}, {}, True),
        ("untied", {"keep_gathered_between_micro_batches": "none"}, {}, True),
        ("untied", {"keep_gathered_between_micro_batches": "none"}, {}, False),
        ("untied", {"reduce_every_micro_batch": True}, {}, True),
        ("untied", {"reshard_overrides": ("blocks.0=False", "head=True", "=True")}, {}, False),
    ],
)
@on_ranks(2)
def test_sharded_units_send_what_is_said(
    kind: str, fields: dict[str, Any], config: dict[str, Any], spared: bool
) -> None:
    module = MODELS[kind]()
    if spared:
        module.embedding.weights_used_in_backward = False
    model = build("fsdp2", module, config=SimpleNamespace(**config), collectives="torch", **fields)
    for _ in range(2):  # FSDP2 sets itself up in the first
        with CollectiveBytes() as counter:
            _step(model)
        assert dict(counter.counted) == _said(model)


@on_ranks(4)
def test_parameters_whole_among_two_of_four_ranks_are_gathered() -> None:
    model = build("fsdp2", toy(tied=False), reshard_after_forward=2, collectives="torch")
    for _ in range(2):
        with CollectiveBytes() as counter:
            _step(model)
        assert dict(counter.counted) == _said(model)
    within = [entry for entry in model.plan.traffic(MICRO_BATCHES) if entry.ranks == 2]
    assert sum(entry.calls for entry in within) == 3 * MICRO_BATCHES  # embedding and both blocks
    assert "1/2" in model.describe()


@on_ranks(4)
def test_hybrid_units_send_what_is_said() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    settings = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2, collectives="torch")
    model = TorchFullyShardedDataParallel(SimpleNamespace(), settings, toy(), UNITS)
    for _ in range(2):
        with CollectiveBytes() as counter:
            _step(model)
        said = _said(model)
        assert dict(counter.counted) == said
        assert said["all-reduce", "calls"] == said["reduce-scatter", "calls"] == 3
    assert "everything sharded over 2, 2 replicas of each shard" in model.describe()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ddp", {}),
        ("zero1", {}),
        ("zero2", {"bucket_size": 50}),
        ("zero2", {"bucket_size": 50, "reduce_every_micro_batch": True}),
        ("fsdp2", {}),
        ("fsdp2", {"reduce_every_micro_batch": True}),
    ],
)
@on_ranks(2)
def test_a_rank_sends_what_is_said(kind: str, fields: dict[str, Any]) -> None:
    model = build(kind, toy(), **fields)
    sent = sum(entry.sent_bytes for entry in model.plan.traffic(MICRO_BATCHES))
    with CountedTraffic() as traffic:  # between gloo's ranks every piece is a message of ours
        _step(model)
        if kind.startswith("zero"):
            model.start_param_sync(force_sync=True)
    assert traffic.sent_bytes == sent > 0


def _planned(*, shards: int = 8, replicas: int = 1, is_trained: bool = True, **fields: Any) -> Plan:
    """A plan of one unit of 200 fp32 elements, which are reduced in double precision."""
    bounds = tuple(range(0, 201, 200 // shards))
    param = ParamPlan(names=("w",), places=(0,), shape=(200,), bounds=bounds)
    piece = PiecePlan(
        is_trained=is_trained,
        param_dtype=torch.float32,
        gathered_dtype=torch.float32,
        grad_dtype=torch.float64,
        shard_grad_dtype=torch.float64,
        device=torch.device("cpu"),
        num_param_shards=shards if fields.get("is_gathered", True) else 1,
        params=(param,),
    )
    of_unit = {"is_gathered": True, "is_freed": True, "stays_whole": False, "gathered_again_over": shards}
    strategy = fields.pop("strategy", "optim_grads_params")
    settings = Settings(reduce_every_micro_batch=fields.pop("reduce_every_micro_batch", False))
    whole, shard = (SimpleNamespace(size=lambda size=size: size) for size in (shards * replicas, shards))
    of_replicas: Any = SimpleNamespace(size=lambda: replicas) if replicas > 1 else None
    groups = DataParallelGroups(whole, shard, of_replicas)  # type: ignore[arg-type]
    return Plan(
        caller="test",
        engine=EngineKind.FSDP2,
        groups=groups,
        units=(UnitPlan(pieces=(piece,), **{**of_unit, **fields}),),
        sums_gradients=False,
        strategy=strategy,
        settings=settings,
    )


@pytest.mark.parametrize(
    ("number", "fields", "expected"),
    [
        (1, {}, [("all-gather", 2, 800, 8), ("reduce-scatter", 1, 1600, 8)]),
        (4, {}, [("all-gather", 8, 800, 8), ("reduce-scatter", 1, 1600, 8)]),
        (
            4,
            {"gathered_again_over": 2},
            [("all-gather", 4, 800, 8), ("all-gather", 4, 800, 2), ("reduce-scatter", 1, 1600, 8)],
        ),
        (4, {"is_kept": True}, [("all-gather", 5, 800, 8), ("reduce-scatter", 1, 1600, 8)]),
        (4, {"is_kept": True, "gathered_again_over": 0}, [("all-gather", 4, 800, 8), ("reduce-scatter", 1, 1600, 8)]),
        (
            4,
            {"is_kept": True, "stays_whole": True, "gathered_again_over": 0},
            [("all-gather", 1, 800, 8), ("reduce-scatter", 1, 1600, 8)],
        ),
        (
            4,
            {"replicas": 3, "gathered_again_over": 0, "reduce_every_micro_batch": True},
            [("all-gather", 4, 800, 8), ("reduce-scatter", 4, 1600, 8), ("all-reduce", 4, 200, 3)],
        ),
        (4, {"is_trained": False, "gathered_again_over": 0}, [("all-gather", 4, 800, 8)]),
        (4, {"shards": 1}, []),
    ],
)
def test_the_traffic_of_a_sharded_unit_follows_from_the_plan(number, fields, expected):
    assert _planned(**fields).traffic(number) == tuple(Traffic(*entry) for entry in expected)


def test_a_hybrid_bucket_scatters_within_and_reduces_across():
    whole = {"is_gathered": False, "stays_whole": True, "gathered_again_over": 0, "strategy": "optim"}
    found = _planned(shards=4, replicas=2, **whole).traffic(2)
    assert found == (
        Traffic("all-gather", 1, 800, 4),
        Traffic("reduce-scatter", 1, 1600, 4),
        Traffic("all-reduce", 1, 400, 2),
    )
    assert [entry.sent_bytes for entry in found] == [600, 1200, 400]
    assert _planned(**whole, is_trained=False).traffic() == ()  # what is frozen is whole, and never moves


def test_bytes_of_a_unit_are_those_of_its_pieces():
    sharded, whole = _planned().root, _planned(is_gathered=False, strategy="optim").root
    assert (sharded.kept_bytes, sharded.gathered_bytes, sharded.gradient_bytes) == (100, 800, 200)
    assert (whole.kept_bytes, whole.gradient_bytes) == (800, 200)
    assert _planned(is_trained=False).root.gradient_bytes == 0
