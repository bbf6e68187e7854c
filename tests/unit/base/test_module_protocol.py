"""A stranger's modules say by attributes what the library has to know of them, and import nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import ParallelConfigError
from core.base.module_protocol import (
    FusedRows,
    ModelContents,
    counting_modules,
    fused_rows,
    is_one_layer,
    names_of_borrowers,
    saved_operations,
    set_gradient_rows,
    unit_classes,
    unwrap_model,
)
from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
from core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from core.transformer import Float16Module, TransformerConfig, TransformerLayer
from core.transformer.dot_product_attention import DotProductAttention
from tests.unit._spawn import on_ranks


class Layer(nn.Module):
    is_unit = True
    is_one_layer = True
    adds_gradient_rows = False
    saved_operations = ("strangers::attend",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.linear.weight.fused_rows = FusedRows((("gate", 1), ("up", 1)))


class Counter(nn.Module):
    """Counts its rows in each step."""

    rank_dependence = ""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.linear, self.step_sums_group = nn.Linear(2, 1), group
        self.step_sums, self.totals = torch.zeros(1), []

    def forward(self, x: Tensor) -> Tensor:
        self.step_sums += len(x)
        return self.linear(x)

    def use_step_sums(self, totals: Tensor) -> None:
        self.totals.append(totals.tolist())
        self.clear_step_sums()

    def clear_step_sums(self) -> None:
        self.step_sums = torch.zeros(1)


class Passing(nn.Module):
    """Passes unknown names on, as the module of `torch.compile` does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__("inner"), name) if name != "inner" else super().__getattr__(name)


def test_attributes_of_classes_are_read() -> None:
    model = nn.Sequential(Layer(), nn.Linear(4, 4), nn.Sequential(Layer()))
    assert unit_classes(model) == (Layer,)
    assert saved_operations(model) == {"strangers::attend"} and saved_operations(nn.Linear(1, 1)) == set()
    assert [is_one_layer(part) for part in model] == [True, True, False]
    set_gradient_rows(model, True)
    assert [getattr(part, "adds_gradient_rows", None) for part in model] == [True, None, None]
    assert not Layer.adds_gradient_rows
    assert fused_rows(model[0].linear.weight) == FusedRows((("gate", 1), ("up", 1)))
    assert fused_rows(model[1].weight) is None
    assert unit_classes(Passing(nn.Linear(1, 1))) == () and unit_classes(Passing(Layer())) == (Layer,)


def test_wrappers_are_opened_down_to_the_model() -> None:
    class Outer(nn.Module):
        is_model_wrapper = True

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = nn.ModuleDict({"module": nn.Linear(1, 1)})  # an attribute alone makes no wrapper
    assert unwrap_model(Outer(Outer(model))) is model and unwrap_model(Passing(Outer(model))) is not model
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    assert unwrap_model(Float16Module(config, model)) is model


def test_layers_of_megatron_say_what_they_are() -> None:
    units = (TransformerLayer, LanguageModelEmbedding, RotaryEmbedding, ColumnParallelLinear)
    assert all(kind.is_unit for kind in units)
    others = (RowParallelLinear, VocabParallelEmbedding, DotProductAttention)
    assert not any(getattr(kind, "is_unit", False) for kind in others)
    names = {"shardstack::attend_in_pieces", "shardstack::attend_within_documents"}
    assert {*DotProductAttention.saved_operations} == names
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    options = {"config": config, "init_method": nn.init.zeros_}
    head = ColumnParallelLinear(4, 4, skip_weight_param_allocation=True, **options)
    model = nn.ModuleDict({"own": ColumnParallelLinear(4, 4, **options), "head": head})
    assert names_of_borrowers(model) == ["head.weight"]


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "freeze": lambda m: m[0].weight.requires_grad_(False),
    "thaw": lambda m: m[1].weight.requires_grad_(),
    "assign": lambda m: m[0].register_parameter("weight", nn.Parameter(m[0].weight.detach())),
    "tie": lambda m: m[0].register_parameter("weight", m[2].weight),
    "drop": lambda m: m[0].register_parameter("bias", None),
    "add a module": lambda m: m[1].add_module("late", nn.Linear(1, 1)),
    "replace a module": lambda m: m.__setitem__(0, nn.Linear(2, 2)),
    "replace one without parameters": lambda m: m.__setitem__(3, nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_model_holds_is_compared(change: str) -> None:
    model, contents = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), ModelContents()
    model[1].requires_grad_(False)
    assert contents.have_changed()  # nothing is noted
    contents.note(model)
    model[0].weight.data = torch.zeros(2, 2)  # its memory is looked at elsewhere
    assert not contents.have_changed()
    CHANGES[change](model)
    assert contents.have_changed()
    contents.note(model)
    assert not contents.have_changed()


@on_ranks(2)
def test_counts_of_a_step_are_added_over_ranks() -> None:
    rank, config = dist.get_rank(), DistributedDataParallelConfig()
    first, second = Counter(), Counter(dist.group.WORLD)  # the second is added over two groups
    model = wrap_model(nn.Sequential(first, second), None, config, process_group=dist.group.WORLD)
    for _ in range(2):
        model.zero_grad_buffer()
        first(torch.ones(rank + 1, 2)).sum().backward()
        second(torch.ones(5, 2)).sum().backward()
        finalize_model_grads([model])
    assert first.totals == [[3.0], [3.0]] and second.totals == [[20.0], [20.0]]
    first(torch.ones(7, 2))
    model.zero_grad_buffer()  # that step did not end
    assert first.step_sums.item() == 0 and len(first.totals) == 2
    assert counting_modules(model) == model.counting_modules == [first, second]


@on_ranks(2)
def test_what_depends_on_ranks_is_refused_where_bits_may_not() -> None:
    model, config = Counter(), DistributedDataParallelConfig(reproducible_across_ranks=True)
    wrap_model(Counter(), None, config, process_group=dist.group.WORLD)
    model.rank_dependence = "its count depends on the number of ranks; leave it out"
    with pytest.raises(ParallelConfigError, match=r"^reproducible_across_ranks is set, and its count depends on"):
        wrap_model(model, None, config, process_group=dist.group.WORLD)
