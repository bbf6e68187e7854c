"""One test over all adapters: the same units, losses, gradients and weights as the serial run for every request."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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


def _cases() -> list[tuple[str, str, str]]:
    found = []
    for adapter in ADAPTERS:
        for strategy in STRATEGIES:
            for variant in VARIANTS:
                if (variant == "bf16" and (adapter in WITHOUT_BF16 or strategy == "replicated")) or (
                    variant == "offload" and (adapter in WITHOUT_OFFLOAD or strategy == "replicated")
                ):
                    continue
                if variant == "bf16" and (adapter, strategy) == ("nvfsdp", "grad_op"):
                    continue
                found.append((adapter, strategy, variant))
    return found


def _marked(case: tuple[str, str, str]) -> object:
    _, strategy, variant = case
    is_quick = variant == ("accumulation" if strategy == "full" else "plain")
    return case if is_quick else pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(("adapter", "strategy", "variant"), [_marked(case) for case in _cases()])
def test_every_adapter_does_what_one_process_does(adapter, strategy, variant):
    run_distributed(_as_serial, 2, adapter, strategy, variant)


@pytest.mark.long
@pytest.mark.parametrize(("adapter", "strategy", "variant"), _cases())
def test_every_adapter_does_so_on_four_ranks(adapter, strategy, variant):
    run_distributed(_as_serial, 4, adapter, strategy, variant)
