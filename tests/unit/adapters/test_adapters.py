"""One test over all adapters: the same units, losses, gradients and weights as the serial run for every request."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.adapters._adapters import (
    ADAPTERS,
    STRATEGIES,
    WITHOUT_BF16,
    WITHOUT_OFFLOAD,
    Net,
    enter,
    serial,
    train,
    units_of,
)

VARIANTS = ("plain", "accumulation", "offload", "bf16")


def _as_serial(adapter: str, strategy: str, variant: str) -> None:
    micro_batches = 3 if variant == "accumulation" else 1
    model = enter(adapter, Net(), strategy, bf16=variant == "bf16", offload=variant == "offload")
    is_buffered = (strategy == "replicated" and adapter != "fsdp2") or (adapter, strategy) == ("nvfsdp", "grad_op")
    if not is_buffered and not (adapter == "optimus" and strategy == "replicated"):
        assert sorted(set(units_of(model))) == ["", "layers.0", "layers.1"]
    losses, gradients, weights = train(model, adapter, micro_batches)
    expected = serial(dist.get_world_size(), micro_batches)
    if variant == "bf16":
        torch.testing.assert_close(losses, expected[0][dist.get_rank()], rtol=0.1, atol=0.05)
        assert losses != expected[0][dist.get_rank()], "nothing was computed in bf16"
        return
    # Two ranks add in one order only; more of them in another.
    exact = dist.get_world_size() == 2
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(losses, expected[0][dist.get_rank()], **tolerance)
    for found, wanted in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(found, wanted, **tolerance)
    torch.testing.assert_close(weights, expected[2], **tolerance)


def _can_be(case: tuple[str, str, str]) -> bool:
    """Returns whether an adapter has a setting for the request."""
    adapter, strategy, variant = case
    if variant == "bf16":
        return (
            adapter not in WITHOUT_BF16 and strategy != "replicated" and (adapter, strategy) != ("nvfsdp", "grad_op")
        )
    return variant != "offload" or (adapter not in WITHOUT_OFFLOAD and strategy != "replicated")


CASES = [case for case in itertools.product(ADAPTERS, STRATEGIES, VARIANTS) if _can_be(case)]


@pytest.mark.parametrize(
    ("adapter", "strategy", "variant"),
    quick(CASES, lambda case: case[2] == ("accumulation" if case[1] == "full" else "plain")),
)
def test_every_adapter_does_what_one_process_does(adapter, strategy, variant):
    run_distributed(_as_serial, 2, adapter, strategy, variant)


@pytest.mark.long
@pytest.mark.parametrize(("adapter", "strategy", "variant"), CASES)
def test_every_adapter_does_so_on_four_ranks(adapter, strategy, variant):
    run_distributed(_as_serial, 4, adapter, strategy, variant)
