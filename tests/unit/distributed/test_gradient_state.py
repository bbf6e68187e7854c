"""Gradients are checked before they are reduced over ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ShardstackError
from core.distributed import gradient_state
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import batches, build, loss_of, toy


def _trains(kind: str, factor: float) -> None:
    """Trains five steps, the fourth of them with a loss that is this many times as large."""
    model = build(kind, toy(), check_for_large_grads=True)
    for step in range(5):
        model.zero_grad_buffer()
        (loss_of(model, batches(0)[0]) * (factor if step == 3 else 1.0)).backward()
        model.finish_grad_sync()


@pytest.mark.parametrize("kind", ["ddp", "zero1_overlap", "zero2", "fsdp2"])
@on_ranks(2)
def test_a_gradient_ten_times_the_largest_is_named(kind: str) -> None:
    with mock.patch.object(gradient_state, "OBSERVED_STEPS", 3):
        _trains(kind, 9.0)
        said = rf"^rank {dist.get_rank()}, step 3: the gradient of .*10 times or more"
        with pytest.raises(ShardstackError, match=said):
            _trains(kind, 11.0)


def test_nothing_is_read_unless_asked():
    checks = gradient_state.GradientChecks(for_nan=False, for_large=False)
    checks.check(iter([("a", torch.tensor(float("nan")))]), 0)


def test_a_gradient_that_was_always_zero_is_not_large():
    checks = gradient_state.GradientChecks(for_nan=False, for_large=True)
    for step in range(gradient_state.OBSERVED_STEPS + 2):
        checks.check([("a", torch.zeros(3)), ("empty", torch.zeros(0))], step)


def test_all_gradients_of_a_call_are_read_at_once():
    checks = gradient_state.GradientChecks(for_nan=True, for_large=True)
    named = [(str(i), torch.full((3,), float(i))) for i in range(5)] + [("double", torch.ones(2).double())]
    with mock.patch.object(gradient_state, "HostRead", wraps=gradient_state.HostRead) as read:
        checks.check(iter(named), 0)
        assert read.call_count == 1
        checks.check([("large", torch.full((2,), 1e300, dtype=torch.float64))], 0)  # finite, though its norm is not
        named[3][1][1] = torch.nan
        with (
            mock.patch.object(gradient_state.dist, "get_rank", lambda: 0),
            pytest.raises(ShardstackError, match=r"gradient of 3 is not finite"),
        ):
            checks.check(iter(named), 1)


def test_a_step_before_the_reduction_names_both_ways_to_reduce():
    state = gradient_state.GradientState()
    state.note_backward(lambda: True)
    with pytest.raises(ShardstackError, match=r"call core.distributed.finalize_model_grads.*finish_in_backward"):
        state.check_may_step("SGD")
