"""Which modules become units, named by a user or not, and their transforms."""

from __future__ import annotations

import re
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import WrapError, warn_once
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from core.distributed.model.initial_values import parameter_attributes_kept
from core.distributed.plan.units import default_units, find_units, resolve_names
from tests.unit._spawn import on_ranks


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(), Leaf()


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.branches = nn.ModuleList([Branch(), Branch()])


def planned(root: nn.Module, *classes: type[nn.Module]) -> list[list[str]]:
    names = {module: name for name, module in root.named_modules()}
    return [[names[module] for module in unit.modules] for unit in find_units(root, classes)]


def test_outermost_matches_become_units():
    assert planned(Tree(), Branch, Leaf) == [["leaf"], ["branches.0"], ["branches.1"]]


def test_a_root_that_matches_is_the_root_and_not_a_unit():
    assert planned(Branch(), Branch) == []


@pytest.mark.parametrize("on_class", [True, False])
def test_fsdp_modules_become_nested_units_children_first(on_class):
    class Declaring(Tree):
        pass

    tree = Declaring()
    if on_class:
        Declaring._fsdp_modules = [Leaf]
    else:
        tree.branches[1]._fsdp_modules = (entry for entry in [Leaf])  # declared by a descendant, any iterable
    assert planned(tree, Branch) == [
        ["leaf"],
        *(["branches.0.first"], ["branches.0.second"], ["branches.0"]),
        *(["branches.1.first"], ["branches.1.second"], ["branches.1"]),
    ]


def test_a_module_without_parameters_is_no_unit():
    root = nn.Sequential(nn.Tanh(), Leaf())
    assert planned(root, nn.Tanh, Leaf) == [["1"]]


def test_a_module_registered_twice_is_one_unit():
    root = Tree()
    root.again = root.leaf
    assert planned(root, Leaf)[0] == ["leaf"]
    assert sum("leaf" in unit or "again" in unit for unit in planned(root, Leaf)) == 1


def test_units_that_share_a_weight_are_united():
    root = Tree()
    root.branches[1].first.weight = root.leaf.weight
    assert planned(root, Branch, Leaf) == [["branches.0"], ["leaf", "branches.1"]]


def test_a_weight_that_the_root_holds_too_is_left_to_the_root():
    root = Tree()
    root.tied = root.leaf.weight
    assert planned(root, Branch, Leaf) == [["branches.0"], ["branches.1"]]


def test_a_shared_weight_is_left_to_the_root():
    root = Tree()
    root._fsdp_modules = [Leaf]
    root.branches[0].first.weight.shared_embedding = True
    assert planned(root, Branch) == [
        ["leaf"],
        ["branches.0.second"],
        *(["branches.1.first"], ["branches.1.second"], ["branches.1"]),
    ]


@pytest.mark.parametrize("entry", ["Leaf", int, Leaf()])
def test_what_is_not_a_module_class_is_refused(entry):
    with pytest.raises(WrapError, match="sub_modules_to_wrap holds"):
        find_units(Tree(), [entry])


def test_names_of_classes_stand_for_them():
    tree = Tree()
    assert resolve_names(tree, ["Leaf", Branch, tree.leaf]) == (Leaf, Branch, tree.leaf)
    assert resolve_names(tree, "Branch") == (Branch,)
    said = "sub_modules_to_wrap names the class 'Branh', and Tree has no module of it; did you mean 'Branch'?"
    with pytest.raises(WrapError, match=re.escape(said)):
        resolve_names(tree, ["Branh"])


@on_ranks(1)
def test_wrappers_take_names_of_classes() -> None:
    world = dist.group.WORLD
    for config in (FullyShardedDataParallelConfig(), TorchFullyShardedDataParallelConfig()):
        plans = [
            wrap_model(Tree(), None, config, process_group=world, sub_modules_to_wrap=units).plan
            for units in (["Branch"], [Branch])
        ]
        assert [unit.names for unit in plans[0].units] == [unit.names for unit in plans[1].units]
        assert ("branches.0",) in [unit.names for unit in plans[0].units]


def test_a_module_itself_is_a_unit_inside_another_too():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert [unit.names for unit in find_units(root, [root[0][1], root[0]])] == [("0.1",), ("0",)]
    assert [unit.names for unit in find_units(root, [root[0][1], nn.Sequential])] == [("0.1",), ("0",)]


def test_parameter_attributes_are_put_back_after_a_replacement():
    root = nn.Linear(2, 2)
    root.weight.partition_dim = 1
    with parameter_attributes_kept(root):
        root.weight = nn.Parameter(torch.zeros(2, 2))
        root.weight.kept = "its own"
    assert (root.weight.partition_dim, root.weight.kept) == (1, "its own")


# ---- where the user names no units

SHARDED = {"zero3": FullyShardedDataParallelConfig, "fsdp2": TorchFullyShardedDataParallelConfig}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Embedding, blocks, head: a GPT of somebody's own, with its blocks in a list or in an `nn.Sequential`."""

    def __init__(self, container: str = "list", *, vocabulary: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary, bias=False)
        self.dropout = nn.Dropout(0.0)
        blocks = [Block() for _ in range(3)]
        self.blocks = nn.Sequential(*blocks) if container == "sequential" else nn.ModuleList(blocks)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _wrap(
    model: nn.Module, config: DistributedDataParallelConfig, small: int = 0, **options: object
) -> tuple[list[str], list[str]]:
    """Returns the names of units, and what was warned of, where models below `small` bytes are not."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found, patch("core.distributed.plan.units._SMALL_BYTES", small):
        warnings.simplefilter("always")
        wrapper = wrap_model(model, None, config, process_group=dist.group.WORLD, **options)
    wrapper(torch.arange(8).view(2, 4)).sum().backward()
    wrapper.finish_grad_sync()
    return [name for unit in wrapper.plan.units[:-1] for name in unit.names], [str(w.message) for w in found]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_items_of_outermost_lists_are_units_where_none_are_named(kind: str) -> None:
    assert _wrap(Gpt(), SHARDED[kind]()) == (BLOCKS, [])
    inner = nn.ModuleDict({"first": nn.ModuleList([Gpt()]), "second": Gpt()})
    assert default_units(inner) == (inner["first"], inner["second"].blocks)
    assert default_units(nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})) == ()


class _Heads(nn.Module):
    """Has no forward: its parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_items_without_a_forward_are_looked_into(kind: str) -> None:
    class Split(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([_Heads(), _Heads()])

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for heads in self.blocks:
                x = heads.down(heads.up(x))
            return self.head(x)

    parts = [f"blocks.{index}.{name}" for index in range(2) for name in ("up", "down")]
    assert _wrap(Split(), SHARDED[kind]())[0] == parts


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_a_large_root_is_warned_of_with_the_list_that_helps(kind: str) -> None:
    config = SHARDED[kind]()
    _, (message,) = _wrap(Gpt("sequential"), config)
    assert "of Gpt are in no unit, and stay gathered on every rank for the whole step" in message
    assert (
        "sub_modules_to_wrap=['Block', 'Embedding', 'Linear']. No" in message
    )  # without Dropout, which has no weight
    assert _wrap(Gpt("sequential"), config, small=2**20) == ([], [])
    assert _wrap(Gpt("sequential"), config, sub_modules_to_wrap=["Block"]) == (BLOCKS, [])
    _, (message,) = _wrap(Gpt(vocabulary=4096), config)  # whose blocks are the smaller part
    names = ["ModuleList", "Embedding", "Linear"]
    assert f"sub_modules_to_wrap={names}" in message
    units, none = _wrap(Gpt(vocabulary=4096), config, sub_modules_to_wrap=names)
    assert sorted(units) == sorted(["embedding", "head", *BLOCKS]) and none == []
    tied = [nn.ModuleList, nn.Embedding, nn.Linear]  # which become one unit
    assert len(_wrap(Gpt(vocabulary=4096, tied=True), config)[1]) == 1
    units, none = _wrap(Gpt(vocabulary=4096, tied=True), config, sub_modules_to_wrap=tied)
    assert sorted(units) == sorted(["embedding", "head", *BLOCKS]) and none == []
    _, (message,) = _wrap(Gpt(), config, sub_modules_to_wrap=[nn.Conv2d])
    assert "sub_modules_to_wrap=['Block', " in message


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_a_root_that_no_list_makes_smaller_is_not_warned_of(kind: str) -> None:
    class Own(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(16, 1024))  # a parameter of the root itself

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) @ self.table.sum(1).repeat(2)

    assert _wrap(Own(), SHARDED[kind]()) == (BLOCKS, [])
    assert _wrap(Gpt("sequential"), SHARDED[kind](), sub_modules_to_wrap=()) == ([], [])  # as was asked


@on_ranks(2)
def test_replicas_have_no_units_to_warn_of() -> None:
    for strategy in ("no_shard", "optim"):
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
        assert _wrap(Gpt("sequential"), config)[1] == []
    recomputed = DistributedDataParallelConfig(activation_checkpointing="full")
    assert _wrap(Gpt(), recomputed)[1] == []  # it has layers to recompute


@on_ranks(2)
def test_a_model_that_marks_its_units_keeps_megatrons() -> None:
    marked = Gpt()
    marked._fsdp_modules = [Block]
    assert default_units(marked) == ()
    plain = Gpt()
    assert default_units(plain) == (plain.blocks,)
