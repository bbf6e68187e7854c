"""Modules of other libraries get the same initial values on any number of ranks, by their own reset methods."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from core.base.errors import ConfigError
from core.base.initialization import allocate_meta_tensors, initialize_parameters
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import full

SEED = 5


class Scaled(nn.Module):
    """A user's own: it owns a weight and a table, and fills both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.5)
        self.weight.data[0].zero_()
        self.table = torch.arange(4.0)  # a new tensor, not the old one filled
        self.count.zero_()


class Around(nn.Module):
    """It fills what the modules in it own, after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.empty(3))
        self.plain = nn.Module()
        self.plain.weight = nn.Parameter(torch.empty(3, 2))  # nothing else would fill it
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.xavier_normal_(self.inner.weight)
        self.inner.weight.data.add_(torch.arange(15.0).view(5, 3))
        nn.init.constant_(self.inner.bias, 0.25)
        nn.init.kaiming_uniform_(self.plain.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, padding_idx=2)
        self.linear = nn.Linear(3, 5)
        self.norms = nn.Sequential(nn.LayerNorm(5), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False))
        self.attention = nn.MultiheadAttention(4, 2)
        self.scaled, self.around = Scaled(), Around()
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.head.weight.partition_dim = 0


def _on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def _filled(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = allocate_meta_tensors(model, "cpu")
    initialize_parameters(model, SEED, only=tensors)
    return {name: full(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}


def test_reset_parameters_fill_each_tensor():
    model = _on_meta()
    values = _filled(model)
    assert model.head.weight is model.embedding.weight and model.head.weight.partition_dim == 0
    assert values.keys() == dict([*Model().named_parameters(), *Model().named_buffers()]).keys()
    assert not any(value.isnan().any() for value in values.values())
    assert not values["embedding.weight"][2].any() and values["embedding.weight"].std() > 0.5
    assert torch.equal(values["norms.1.running_var"], torch.ones(5)) and values["norms.2.num_batches_tracked"] == 0
    assert not values["attention.out_proj.bias"].any()  # what is around a module has the last word
    assert not values["scaled.weight"][0].any() and values["scaled.weight"][1:].all()
    assert torch.equal(values["scaled.table"], torch.arange(4.0))
    assert torch.equal(values["around.inner.bias"], torch.full((5,), 0.25))
    assert torch.equal(values["around.gain"], torch.ones(3))
    assert values["around.inner.weight"][4, 2] > 10


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks("world_size")
def test_values_agree_at_every_world_size(world_size):
    expected = _filled(_on_meta())
    units = world_size < 3
    torch.manual_seed(dist.get_rank())  # streams apart: initialisation looks at none of them
    before = torch.get_rng_state()
    model = _on_meta()
    if units:
        for unit in (model.linear, model.norms, model.attention, model.around.inner, model.around, model.scaled):
            fully_shard(unit)
    fully_shard(model)
    values = _filled(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.around.inner.weight, DTensor)
    assert values.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(values[name], value)]


@pytest.mark.long
@on_ranks(4)
def test_torchs_tensor_parallelism_changes_no_value():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    actual = _filled(model)
    expected = _filled(nn.Sequential(nn.Linear(3, 6, device="meta")))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


class WithHook(nn.Module):
    """As Hugging Face's and nanoGPT's models do it: one method of the model for the modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)  # and not the bias: that stays as constructed


def test_init_weights_hook_follows_reset():
    model = WithHook().to("meta")
    values = _filled(model)
    assert 0 < values["linear.weight"].abs().max() < 0.1
    assert 0 < values["linear.bias"].abs().max() <= 3**-0.5  # nn.Linear's own
    assert torch.equal(values["norm.weight"], torch.ones(4))


def test_transformers_model_initial_values():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)
    direct = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    values = _filled(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, expected in [*direct.named_parameters(), *direct.named_buffers()]:
        if "norm" in name or "inv_freq" in name:
            assert torch.equal(values[name], expected), name
        else:
            assert values[name].std().item() == pytest.approx(config.initializer_range, rel=0.3), name


class Forgetful(nn.Module):
    def __init__(self, forgets: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(2))
        self.forgets = forgets

    def reset_parameters(self) -> None:
        for name in {"weight", "table"} - {self.forgets}:
            getattr(self, name).data.fill_(1.0)


@pytest.mark.parametrize(
    ("forgets", "message"),
    [
        ("weight", r"nothing says how to initialise parameter part\.weight of Forgetful"),
        ("table", r"buffers on the meta device.*part\.'table' of Forgetful.*reset_parameters"),
    ],
)
def test_unfilled_tensors_are_named(forgets, message):
    model = nn.ModuleDict({"part": Forgetful(forgets)}).to("meta")
    with pytest.raises(ConfigError, match=message):
        _filled(model)


class Slicing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 4)

    def reset_parameters(self) -> None:
        self.inner.weight[0].zero_()


@on_ranks(2)
def test_lost_writes_are_refused():
    model = nn.Sequential(Slicing()).to("meta")
    fully_shard(model)
    with pytest.raises(ConfigError, match=r"initialisation of 0 looks at a part of a sharded parameter"):
        _filled(model)


def test_parents_do_not_reset_filled_modules():
    model = Around()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.inner.weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    values = _filled(model)
    assert all(torch.equal(values[name], before[name]) for name in before if name != "inner.weight")
    assert not torch.equal(values["inner.weight"], before["inner.weight"])
