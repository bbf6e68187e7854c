"""Gradients are checked before they are reduced over ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from core.base.errors import ShardstackError
from core.distributed import gradient_state


def test_nothing_is_read_unless_asked():
    checks = gradient_state.GradientChecks(for_nan=False)
    checks.check(iter([("a", torch.tensor(float("nan")))]), 0)


def test_all_gradients_of_a_call_are_read_at_once():
    checks = gradient_state.GradientChecks(for_nan=True)
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
