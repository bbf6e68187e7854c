"""Gradients are checked before they are reduced over ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from core.base.errors import ShardstackError
from core.distributed import gradient_state as gradient_checks
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import BUFFERED, batches, build, loss_of, toy


def _names_the_large_gradient(kind: str, factor: float) -> str:
    with mock.patch.object(gradient_checks, "OBSERVED_STEPS", 3):
        model = build(kind, toy(), check_for_large_grads=True)
        try:
            for step in range(5):
                model.zero_grad_buffer()
                loss = loss_of(model, batches(0)[0])
                (loss * (factor if step == 3 else 1.0)).backward()
                model.finish_grad_sync()
        except ShardstackError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("kind", [*BUFFERED, "fsdp2"])
def test_a_gradient_ten_times_the_largest_is_named(kind):
    assert run_distributed(_names_the_large_gradient, 2, kind, 9.0) == ["no error"] * 2
    for rank, message in enumerate(run_distributed(_names_the_large_gradient, 2, kind, 11.0)):
        assert message.startswith(f"rank {rank}, step 3: the gradient of ") and "10 times or more" in message


def test_nothing_is_read_unless_asked():
    checks = gradient_checks.GradientChecks(for_nan=False, for_large=False)
    checks.check(iter([("a", torch.tensor(float("nan")))]), 0)


def test_a_gradient_that_was_always_zero_is_not_large():
    checks = gradient_checks.GradientChecks(for_nan=False, for_large=True)
    for step in range(gradient_checks.OBSERVED_STEPS + 2):
        checks.check([("a", torch.zeros(3)), ("empty", torch.zeros(0))], step)


def test_all_gradients_of_a_call_are_read_at_once():
    checks = gradient_checks.GradientChecks(for_nan=True, for_large=True)
    named = [(str(i), torch.full((3,), float(i))) for i in range(5)] + [("double", torch.ones(2).double())]
    with mock.patch.object(gradient_checks, "HostRead", wraps=gradient_checks.HostRead) as read:
        checks.check(iter(named), 0)
        assert read.call_count == 1
        checks.check([("large", torch.full((2,), 1e300, dtype=torch.float64))], 0)  # finite, though its norm is not
        named[3][1][1] = torch.nan
        with (
            mock.patch.object(gradient_checks.dist, "get_rank", lambda: 0),
            pytest.raises(ShardstackError, match=r"gradient of 3 is not finite"),
        ):
            checks.check(iter(named), 1)
