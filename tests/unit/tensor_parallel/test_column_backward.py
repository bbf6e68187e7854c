"""The order of products and collectives in the backward of a column-parallel layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from core.tensor_parallel import ColumnParallelLinear, column_linear
from tests.unit._spawn import run_distributed
from tests.unit.tensor_parallel._layers import OUT, B, H, S, integer_tensor, pair


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
            patch.setattr(column_linear, name, order.watch(getattr(column_linear, name), name.split("_first")[0]))
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
