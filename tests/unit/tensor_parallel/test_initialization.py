"""Initial values depend only on the seed and the name: not on layout, sharding, world size or a start on meta."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from core.base.errors import ConfigError
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel import (
    ColumnParallelLinear,
    ParameterOwner,
    RowParallelLinear,
    VocabParallelEmbedding,
    deferred_initialization,
    draw_init_seed,
    initialize_parameters,
)
from tests.unit._ranks import fake_world
from tests.unit.tensor_parallel._layers import config, normal

SEED = 77
ODD = 5  # rows that no two ranks share evenly
PINNED_UP = [-0.02550245262682438, 0.007450059987604618, -0.03771556168794632, -0.0011494950158521533]


class _Model(nn.Module):
    """Every kind of parameter: cut by column, row and vocabulary, whole, and of a module from elsewhere."""

    def __init__(self, tp: int = 1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        options = {"config": config(tp), "init_method": normal, "tp_group": group}
        with deferred_initialization():
            self.embedding = VocabParallelEmbedding(2 * ODD, 4, **options)
            self.up = ColumnParallelLinear(4, 2 * ODD, **options)
            self.down = RowParallelLinear(2 * ODD, ODD, **options)
            self.norm = nn.LayerNorm(ODD)
            self.head = nn.Linear(ODD, 3)


def _serial_values(seed: int = SEED) -> dict[str, torch.Tensor]:
    model = _Model()
    initialize_parameters(model, seed)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _mesh_of(rank: int, outer: int, inner: int) -> dist.DeviceMesh:
    """Names the mesh after the rank: DTensor's caches, which outlive a group, would take an equal mesh for that of
    rank 0."""
    return init_device_mesh("cpu", (outer, inner), mesh_dim_names=(f"outer{rank}", f"inner{rank}"))


def _local_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()
    }


def _cut_over_tp(name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cuts a tensor by its name alone, so that the marks that the code reads are checked as well."""
    if name in ("embedding.weight", "up.weight", "up.bias"):
        return whole.chunk(tp, 0)[rank]
    return whole.chunk(tp, 1)[rank] if name == "down.weight" else whole


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_parameters_have_different_values():
    values = _serial_values()
    assert values["up.weight"].std().item() == pytest.approx(0.02, rel=0.5)
    assert not values["up.bias"].any()
    assert torch.equal(values["norm.weight"], torch.ones(ODD))
    # embedding, up: one shape, one initializer, two names
    assert not torch.equal(values["embedding.weight"], values["up.weight"])
    assert not torch.equal(values["up.weight"], _serial_values(SEED + 1)["up.weight"])
    assert not torch.equal(values["head.weight"], _serial_values(SEED + 1)["head.weight"])


def test_values_are_pinned():
    # Other machines, Pythons and hash seeds must draw the same: another hash would change every run.
    up = _serial_values()["up.weight"]
    assert up[0].tolist() == pytest.approx(PINNED_UP, rel=1e-6)


@pytest.mark.parametrize("tp", [2, 5])
def test_tp_keeps_values(tp: int):
    whole = _serial_values()
    for rank in range(tp):
        with fake_world(rank, tp):
            model = _Model(tp, dist.group.WORLD)
            initialize_parameters(model, SEED)
            _assert_same(_local_values(model), {n: _cut_over_tp(n, v, tp, rank) for n, v in whole.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_start_and_dtype_change_no_draw(dtype: torch.dtype):
    with torch.device("meta"):
        model = _Model().to(dtype)
    model.to_empty(device="cpu")
    assert model.down.weight.partition_dim == 1  # to_empty makes new parameters, which are marked like the old
    initialize_parameters(model, SEED)
    _assert_same(_local_values(model), {name: value.to(dtype) for name, value in _serial_values().items()})


def _sharded_on_meta(model: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    for unit in (model.up, model.down, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model.to_empty(device="cpu")


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 2), (2, 3), (1, 7)])
def test_uneven_and_empty_shards_keep_values(replicas: int, shards: int):
    whole = _serial_values()
    for rank in range(replicas * shards):
        with fake_world(rank, replicas * shards):
            mesh = _mesh_of(rank, replicas, shards)
            with torch.device("meta"):
                model = _Model()
            _sharded_on_meta(model, mesh if replicas > 1 else mesh[f"inner{rank}"])
            initialize_parameters(model, SEED)
            for name, local in _local_values(model).items():
                parts = whole[name].chunk(shards, 0)
                position = rank % shards
                expected = parts[position] if position < len(parts) else whole[name][:0]
                assert torch.equal(local, expected), (name, rank)


def test_tp_and_sharding_keep_values():
    whole = _serial_values()
    for rank in range(4):
        with fake_world(rank, 4):
            mesh = _mesh_of(rank, 2, 2)
            with torch.device("meta"):
                model = _Model(2, mesh[f"inner{rank}"].get_group())
            _sharded_on_meta(model, mesh[f"outer{rank}"])
            initialize_parameters(model, SEED)
            for name, local in _local_values(model).items():
                cut = _cut_over_tp(name, whole[name], 2, rank % 2)
                assert torch.equal(local, cut.chunk(2, 0)[rank // 2]), (name, rank)


def test_manual_seed_decides_all_values():
    def build(meta: bool) -> ColumnParallelLinear:
        torch.manual_seed(5)
        with torch.device("meta" if meta else "cpu"):
            layer = ColumnParallelLinear(4, ODD, config=config(), init_method=normal)
        if meta:
            initialize_parameters(layer.to_empty(device="cpu"), draw_init_seed())
        return layer

    assert torch.equal(build(False).weight, build(True).weight)
    torch.manual_seed(5)
    first, second = (ColumnParallelLinear(4, ODD, config=config(), init_method=normal) for _ in range(2))
    assert torch.equal(first.weight, build(False).weight)
    assert not torch.equal(first.weight, second.weight)
    torch.manual_seed(5)
    expected = draw_init_seed()
    torch.manual_seed(5)
    with torch.device("meta"):
        assert draw_init_seed() == expected


def test_deferred_layers_draw_nothing():
    before = torch.get_rng_state()
    filled = []

    def note(tensor: torch.Tensor, generator: torch.Generator) -> None:
        filled.append(tensor.shape)

    with pytest.raises(RuntimeError, match="planted"), deferred_initialization():
        ColumnParallelLinear(4, ODD, config=config(), init_method=note)
        raise RuntimeError("planted")
    ColumnParallelLinear(4, ODD, config=ModelParallelConfig(perform_initialization=False), init_method=note)
    assert not filled
    assert torch.equal(torch.get_rng_state(), before)
    ColumnParallelLinear(4, ODD, config=config(), init_method=note)  # the exception ended the deferral
    assert filled == [(ODD, 4)]


def test_names_are_relative_to_seed_owner():
    whole = _serial_values()
    layer = ColumnParallelLinear(4, 2 * ODD, config=config(), init_method=normal)
    initialize_parameters(layer, SEED, prefix="up.")
    assert torch.equal(layer.weight, whole["up.weight"])
    wrapped = nn.Module()
    wrapped._orig_mod = _Model()  # as torch.compile registers what it wraps
    initialize_parameters(wrapped, SEED)
    _assert_same(_local_values(wrapped._orig_mod), whole)


def test_a_shared_parameter_is_filled_once_under_its_first_name():
    calls = []

    class Owner(ParameterOwner):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.add_parameter("weight", (3, 2), self._fill, config=ModelParallelConfig())

        def _fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
            calls.append(self.name)
            normal(tensor, generator)

    model = nn.Module()
    model.first, model.second, model.foreign = Owner("first"), Owner("second"), nn.Linear(2, 3)
    model.second.weight = model.foreign.weight = model.first.weight
    initialize_parameters(model, SEED)
    assert calls == ["first"]
    alone = Owner("first")
    initialize_parameters(alone, SEED, prefix="first.")
    assert torch.equal(model.first.weight, alone.weight)
    assert model.foreign.weight is model.first.weight


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_fp32_parameters_start_at_low_precision_values(low: str):
    drawn = ColumnParallelLinear(4, ODD, config=ModelParallelConfig(), init_method=normal)
    computed = ColumnParallelLinear(4, ODD, config=ModelParallelConfig(**{low: True}), init_method=normal)
    for layer in (drawn, computed):
        initialize_parameters(layer, SEED)
    dtype = computed.config.compute_dtype
    assert computed.weight.dtype == torch.float32 and not torch.equal(computed.weight, drawn.weight)
    assert torch.equal(computed.weight, drawn.weight.to(dtype).float())


def test_unfilled_parameter_is_named():
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.scale = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"parameter outer\.inner\.scale of Module.*initializers\['scale'\]"):
        initialize_parameters(model, SEED, prefix="outer.")
    owner = ParameterOwner()
    owner.register_parameter("forgotten", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match="forgotten of ParameterOwner"):
        initialize_parameters(owner, SEED)


def test_meta_parameter_is_refused_with_remedy():
    with torch.device("meta"):
        model = _Model()
    with pytest.raises(ConfigError, match=r"embedding\.weight is on the meta device.*to_empty"):
        initialize_parameters(model, SEED)
