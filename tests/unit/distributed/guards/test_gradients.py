"""Gradients are checked before they are reduced over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from core.base.errors import ShardstackError
from core.distributed.guards import gradients
from core.distributed.step import Step


def _guard(is_on: bool) -> gradients.FiniteGradients:
    guard, plan = gradients.FiniteGradients(), SimpleNamespace(settings=SimpleNamespace(check_for_nan_in_grad=is_on))
    with_settings: Any = plan
    guard.at_plan(with_settings, Step())
    return guard


def test_nothing_is_read_unless_asked():
    _guard(False).on_gradients(iter([("a", torch.tensor(float("nan")))]), False)


def test_all_gradients_of_a_call_are_read_at_once():
    checks = _guard(True)
    named = [(str(i), torch.full((3,), float(i))) for i in range(5)] + [("double", torch.ones(2).double())]
    with mock.patch.object(gradients, "HostRead", wraps=gradients.HostRead) as read:
        checks.on_gradients(iter(named), False)
        assert read.call_count == 1
        checks.on_gradients([("large", torch.full((2,), 1e300, dtype=torch.float64))], False)  # its norm is not finite
        named[3][1][1] = torch.nan
        with (
            mock.patch.object(gradients.dist, "get_rank", lambda: 0),
            pytest.raises(ShardstackError, match=r"gradient of 3 is not finite"),
        ):
            checks.on_gradients(iter(named), False)
