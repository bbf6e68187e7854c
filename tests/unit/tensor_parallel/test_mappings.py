"""Each mapping's forward and backward on two ranks, compared with what the ranks hold together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ParallelConfigError
from core.tensor_parallel import mappings
from tests.unit._spawn import run_distributed
from tests.unit.tensor_parallel._layers import own

SHAPE = (4, 3, 6)


def _everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


# What a value becomes, from what each rank holds: the table of the mappings, written out once more.
_MEANING = {
    "identity": lambda x: x,
    "all-reduce": lambda x: sum(_everyones(x)),
    "own last": lambda x: own(x, -1),
    "own first": lambda x: own(x, 0),
    "gather last": lambda x: torch.cat(_everyones(x), -1),
    "gather first": lambda x: torch.cat(_everyones(x), 0),
    "reduce-scatter": lambda x: own(sum(_everyones(x)), 0),
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


def _check_pairs() -> None:
    for name, pair in _PAIRS.items():
        _check_pair(name, *pair, {})
    _check_pair(
        "gather_from_sequence_parallel_region", "gather first", "own first", {"tensor_parallel_output_grad": False}
    )


def _check_double_backward() -> None:
    # y = sum over ranks of x^2 elementwise, so d2y/dx2 is 2 on each rank's own x: through copy and reduce both.
    x = torch.full((2, 2), 3.0 + dist.get_rank(), requires_grad=True)
    squared = mappings.copy_to_tensor_model_parallel_region(x, dist.group.WORLD) ** 2
    y = mappings.reduce_from_tensor_model_parallel_region(squared, dist.group.WORLD).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = sum(_everyones(2 * x.detach()))
    assert torch.equal(first, total)
    assert torch.equal(second, torch.full_like(x, 4.0))  # each rank's sum of `first` depends on every rank's x


def _uneven(name: str) -> str:
    with pytest.raises(ParallelConfigError) as caught:
        getattr(mappings, name)(torch.zeros(5, 1, 7), group=dist.group.WORLD)
    return str(caught.value)


def test_forward_and_backward_pairs():
    run_distributed(_check_pairs, 2)


def test_double_backward():
    run_distributed(_check_double_backward, 2)


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
