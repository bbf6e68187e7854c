"""Each mapping's forward and backward on two ranks against what the ranks hold together, and a backward's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from core.base.errors import ParallelConfigError
from core.tensor_parallel import ColumnParallelLinear, mappings
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.tensor_parallel._layers import OUT, B, H, S, all_gather, everyones, integer_tensor, own, pair

SHAPE = (4, 3, 6)


# What a value becomes, from what each rank holds: the table of the mappings, written out once more.
_MEANING = {
    "identity": lambda x: x,
    "all-reduce": lambda x: sum(everyones(x)),
    "own last": lambda x: own(x, -1),
    "own first": lambda x: own(x, 0),
    "gather last": lambda x: all_gather(x, -1),
    "gather first": lambda x: all_gather(x, 0),
    "reduce-scatter": lambda x: own(sum(everyones(x)), 0),
}

_PAIRS = {
    "copy_to_tensor_model_parallel_region": ("identity", "all-reduce"),
    "reduce_from_tensor_model_parallel_region": ("all-reduce", "identity"),
    "scatter_to_tensor_model_parallel_region": ("own last", "gather last"),
    "gather_from_tensor_model_parallel_region": ("gather last", "own last"),
    "scatter_to_sequence_parallel_region": ("own first", "gather first"),
    "gather_from_sequence_parallel_region": ("gather first", "reduce-scatter"),
    "reduce_scatter_to_sequence_parallel_region": ("reduce-scatter", "gather first"),
}


def _check_pair(name: str, forward: str, backward: str, arguments: dict[str, bool]) -> None:
    # A transposed view: the collectives must not take its memory order for its values.
    given = torch.randn(SHAPE[::-1]).permute(2, 1, 0) + dist.get_rank()
    saved = given.clone()
    leaf = given.requires_grad_()
    output = getattr(mappings, name)(leaf, group=dist.group.WORLD, **arguments)
    assert torch.equal(output, _MEANING[forward](saved))
    upstream = torch.randn(output.shape[::-1]).permute(2, 1, 0) + 10 * dist.get_rank()
    kept_upstream = upstream.clone()
    (gradient,) = torch.autograd.grad(output, leaf, upstream)
    assert torch.equal(gradient, _MEANING[backward](kept_upstream))
    assert torch.equal(leaf, saved), "the mapping wrote into its input"
    assert torch.equal(upstream, kept_upstream), "the mapping wrote into the gradient it was given"


def _uneven(name: str) -> str:
    with pytest.raises(ParallelConfigError) as caught:
        getattr(mappings, name)(torch.zeros(5, 1, 7), group=dist.group.WORLD)
    return str(caught.value)


@on_ranks(2)
def test_forward_and_backward_pairs():
    for name, directions in _PAIRS.items():
        _check_pair(name, *directions, {})
    _check_pair(
        "gather_from_sequence_parallel_region", "gather first", "own first", {"tensor_parallel_output_grad": False}
    )


@on_ranks(2)
def test_double_backward():
    x = torch.full((2, 2), 3.0 + dist.get_rank(), requires_grad=True)
    squared = mappings.copy_to_tensor_model_parallel_region(x, dist.group.WORLD) ** 2
    y = mappings.reduce_from_tensor_model_parallel_region(squared, dist.group.WORLD).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = sum(everyones(2 * x.detach()))
    assert torch.equal(first, total)
    assert torch.equal(second, torch.full_like(x, 4.0))  # each rank's sum of `first` depends on every rank's x


@pytest.mark.parametrize("name", ["scatter_to_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"])
def test_indivisible_sequence_names_both_sizes(name: str):
    for message in run_distributed(_uneven, 2, name):
        assert "sequence of 5" in message
        assert "2 tensor-parallel ranks" in message
        assert "pad the sequence to a multiple of 2" in message


def test_indivisible_features_name_both_sizes():
    assert "last dim of 7" in run_distributed(_uneven, 2, "scatter_to_tensor_model_parallel_region")[0]


@pytest.mark.parametrize("name", _PAIRS)
def test_mappings_without_group_are_identities(name: str):
    x = torch.randn(5, 1, 7)
    assert getattr(mappings, name)(x) is x


class _Order(TorchDispatchMode):
    """The matrix products of a backward, in one list with the collectives' starts and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append("product")
        return func(*args, **(kwargs or {}))

    def watch(self, collective: Any, name: str) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(f"start {name}")
            result = collective(*args, **kwargs)
            work = result[1] if isinstance(result, tuple) else result

            class _Waited:
                def wait(_self) -> None:
                    self.seen.append(f"wait {name}")
                    work.wait()

            return (result[0], _Waited()) if isinstance(result, tuple) else _Waited()

        return watched


def _backward_order(sequence_parallel: bool, frozen: bool, with_input_grad: bool) -> list[str]:
    _, layer = pair(ColumnParallelLinear, H, OUT, sequence_parallel=sequence_parallel)
    layer.weight.requires_grad_(not frozen)
    x = integer_tensor(S // 2 if sequence_parallel else S, B, H).requires_grad_(with_input_grad)
    loss = layer(x)[0].sum()
    with pytest.MonkeyPatch.context() as patch, _Order() as order:
        patch.setattr(dist, "all_reduce", order.watch(dist.all_reduce, "all-reduce"))
        for name in ("gather_first_dim", "reduce_scatter_first_dim"):
            patch.setattr(mappings, name, order.watch(getattr(mappings, name), name.split("_first")[0]))
        loss.backward()
    assert (layer.weight.grad is None) == frozen
    assert layer.bias.grad is not None
    return order.seen


def test_column_backward_reduces_inputs_during_weight_gradients():
    assert run_distributed(_backward_order, 2, False, False, True)[0] == [
        "product",
        "start all-reduce",
        "product",
        "wait all-reduce",
    ]
    assert run_distributed(_backward_order, 2, True, False, True)[0] == [
        "start gather",
        "product",
        "start reduce_scatter",
        "wait gather",
        "product",
        "wait reduce_scatter",
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_frozen_weight_costs_no_product(sequence_parallel: bool):
    name = "reduce_scatter" if sequence_parallel else "all-reduce"
    frozen = run_distributed(_backward_order, 2, sequence_parallel, True, True)[0]
    assert frozen == ["product", f"start {name}", f"wait {name}"]
    no_input = run_distributed(_backward_order, 2, sequence_parallel, False, False)[0]
    assert no_input == (["start gather", "wait gather", "product"] if sequence_parallel else ["product"])
