"""Which modules become units: a plan is read off a module tree, so no ranks are needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.base.errors import WrapError
from core.distributed.model.initial_values import parameter_attributes_kept
from core.distributed.plan.units import find_units


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
