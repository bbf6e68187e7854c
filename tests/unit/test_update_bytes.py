"""The count of bytes that an update reads and writes: of operators, of compiled graphs, and of whole updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.unit._benchmark_modules import load
from tests.unit._spawn import on_ranks


def _tensors() -> dict[str, torch.Tensor]:
    """Returns tensors whose bytes the cases know: 160 in fp32 and 80 in bf16 for matrices of 10 x 4."""
    return {
        "x": torch.ones(10, 4),
        "y": torch.ones(10, 4),
        "half": torch.ones(10, 4, dtype=torch.bfloat16),
        "row": torch.ones(4),
        "one": torch.ones(()),
    }


def _fused_adamw(x: torch.Tensor, grad_scale: torch.Tensor | None = None) -> None:
    state = [[torch.ones(10, 4)] for _ in range(3)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_(
        [x], *state, [], [torch.ones(())], amsgrad=False, maximize=False, grad_scale=grad_scale, **options
    )


ONES = 3 * 160 + 4
"""Bytes that `_fused_adamw` writes before the operator: gradient, moments and step."""

CASES: dict[str, tuple[Callable[..., object], int, int]] = {
    "a sum": (lambda x, y, **_: x + y, 320, 160),
    "a sum with itself": (lambda x, **_: x + x, 160, 160),
    "a sum with an expanded row": (lambda x, row, **_: x + row.expand(10, 4), 176, 160),
    "a reduction": (lambda x, **_: x.sum(), 160, 4),
    "a cast": (lambda x, **_: x.bfloat16(), 160, 80),
    "a cast to the same dtype": (lambda x, **_: x.float(), 0, 0),
    "views": (lambda x, **_: (x.view(-1), x.t(), x[1:], x.split(5), x.detach(), x.expand(2, 10, 4)), 0, 0),
    "a view without an alias in its schema": (lambda x, **_: torch.ops.aten._unsafe_view(x, [40]), 0, 0),
    "a part of a matrix": (lambda x, **_: x[:5].neg(), 80, 80),
    "a sum in place": (lambda x, y, **_: x.add_(y), 320, 160),
    "a sum in place, of a view": (lambda x, row, **_: x[0].add_(row), 32, 16),
    "a copy": (lambda x, half, **_: x.copy_(half), 80, 160),
    "a fill": (lambda x, **_: x.fill_(2.0), 0, 160),
    "zeros in place": (lambda x, **_: x.zero_(), 0, 160),
    "an output that is given": (lambda x, y, **_: torch.mul(x, x, out=y), 160, 160),
    "an allocation": (lambda x, **_: (torch.empty_like(x), x.new_empty(9)), 0, 0),
    "zeros of a shape": (lambda x, **_: torch.zeros_like(x), 0, 160),
    "lists multiplied in place": (lambda x, y, one, **_: torch._foreach_mul_([x, y], one), 324, 320),
    "lists copied": (lambda x, y, half, **_: torch._foreach_copy_([x, y], [half, half.clone()]), 80 + 160, 320 + 80),
    "norms of a list": (lambda x, half, **_: torch._foreach_norm([x, half]), 240, 4 + 2),
    "AdamW": (lambda x, **_: _fused_adamw(x), 4 * 160 + 4, 3 * 160 + ONES),
    "AdamW of scaled gradients": (lambda x, one, **_: _fused_adamw(x, one), 4 * 160 + 4 + 4, 4 * 160 + ONES),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_operators(case: str) -> None:
    operation, read, written = CASES[case]
    tensors = _tensors()
    with load("_passes").CountedBytes() as counted:
        operation(**tensors)
    assert (counted.read.total(), counted.written.total()) == (read, written), counted.by_operator()
    assert counted.total == read + written == sum(counted.by_operator().values())


@on_ranks(2)
def test_of_a_dtensor_the_local_part_counts() -> None:
    matrix = distribute_tensor(torch.ones(10, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with load("_passes").CountedBytes() as counted:
        matrix.add_(1.0)
    assert (counted.read, counted.written) == ({"add_": 80}, {"add_": 80})


def test_nothing_is_counted_outside() -> None:
    before, tensors = CompiledFxGraph.__call__, _tensors()
    with load("_passes").CountedBytes() as counted:
        pass
    tensors["x"] + tensors["y"]
    assert counted.total == 0 and CompiledFxGraph.__call__ is before


def test_a_compiled_graph_counts_as_its_inputs_and_outputs() -> None:
    tensors = _tensors()
    graph = object.__new__(CompiledFxGraph)
    graph.mutated_input_idxs, graph.compiled_fn_runner = {0}, None

    def run(graph: CompiledFxGraph, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, half = inputs
        inputs.clear()  # as torch does, which frees them early
        x.add_((half * 2).float())  # kernels of the graph, which are not operators of their own
        return x.view(-1), half + 1

    with mock.patch.object(CompiledFxGraph, "__call__", run), load("_passes").CountedBytes() as counted:
        graph([tensors["x"], tensors["half"]])
    assert counted.read == {"compiled": 160 + 80}  # x and half
    assert counted.written == {"compiled": 160 + 80}  # x in place, and a new tensor; a view of x is none
    assert float(tensors["x"][0, 0]) == 3.0


@pytest.mark.long
def test_a_compiled_update_stays_compiled_while_it_is_counted() -> None:
    def update(x: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).add_(half.float(), alpha=0.1)
        return (x * 2).bfloat16()

    compiled, tensors = torch.compile(update), _tensors()
    x, half = tensors["x"], tensors["half"]
    compiled(x, half)
    with load("_passes").CountedBytes() as counted:
        compiled(x, half)
    assert counted.read == {"compiled": 160 + 80} and counted.written == {"compiled": 160 + 80}
    with mock.patch.object(CompiledFxGraph, "__call__", autospec=True, return_value=(half,)) as graphs:
        compiled(x, half)
    assert graphs.call_count == 1


def _parameters(columns: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((8, columns), (16, columns), (columns,))]


def _adamw_bytes(columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of the second update of a few parameters, and how many elements these have."""
    parameters = _parameters(columns, dtype)
    optimizer = load("_llama_training").TorchAdamW(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with load("_passes").CountedBytes() as counted:
            optimizer.start_step()
    return counted.total, sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize(("dtype", "bytes_per_parameter"), [(torch.bfloat16, 52), (torch.float32, 40)])
def test_bytes_of_torchs_adamw(dtype: torch.dtype, bytes_per_parameter: int) -> None:
    """A parameter in bf16 takes 52 bytes:

    ======================================  =======================================================  ==
    cast of the gradient to fp32            reads bf16, writes fp32                                   6
    norm                                    reads fp32                                                4
    clipping                                reads and writes fp32                                     8
    AdamW                                   reads gradient, master and two moments, writes all but
                                            the gradient: 7 x 4                                      28
    refresh of the parameter                reads fp32, writes bf16                                   6
    ======================================  =======================================================  ==

    One in fp32 has neither a cast nor a refresh: 40. What is left are scalars, step counts and norms, as many for any
    size of the parameters: 100 columns more add the bytes of their elements alone.
    """
    (small, few), (large, many) = (_adamw_bytes(columns, dtype) for columns in (64, 164))
    assert large - small == bytes_per_parameter * (many - few) and many - few == 25 * 100
    assert 0 < small - bytes_per_parameter * few < 200


@on_ranks(1)
def test_an_update_is_counted_from_backward_to_forward() -> None:
    llama_training, passes = load("_llama_training"), load("_passes")
    preset = replace(load("_llama").PRESETS["small"], micro_batches=2)
    for wrapper, least in (("bare", 52), ("fully_shard", 40), ("ddp", 52), ("zero3", 28), ("fsdp2", 28)):
        training = llama_training.Training(preset, {}, {}, wrapper)
        training.step()
        calls, hooks = [], len(training.model._forward_pre_hooks)
        with mock.patch.object(training.model, "forward", _noting(training.model.forward, calls)):
            counted = passes.count_update(training)
        assert len(calls) == 4 and not any(calls), "the mode was entered in a forward"
        update = counted.by_operator()
        assert update["_fused_adamw_"] == pytest.approx(28 * training.parameters, rel=1e-3), wrapper
        # Of the model, whose products are in forward and backward, there is nothing.
        assert not {"mm", "addmm", "bmm", "embedding", "embedding_dense_backward"} & update.keys(), wrapper
        assert least * training.parameters <= counted.total < 85 * training.parameters, wrapper
        assert len(training.model._forward_pre_hooks) == hooks
        training.step()
        assert training.loss() > 0


def _noting(forward: Callable[..., torch.Tensor], calls: list[bool]) -> Callable[..., torch.Tensor]:
    """Returns a forward that appends whether a dispatch mode is entered when it is called."""

    def noting(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(torch._C._len_torch_dispatch_stack() > 0)
        return forward(*args, **kwargs)

    return noting


def test_an_update_says_how_long_its_bytes_take() -> None:
    update = load("_passes").Update(52.0, 64.4, 15.0, {})
    assert str(update) == "update: 52.0 bytes a parameter, 64.4 GB, which take 15 ms at the rate of the copy"
