"""How exactly a composition has to equal its twin under DDP, and one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.compositions.composition import Composition
from tests.compositions.data import SEQUENCE, STEPS
from tests.compositions.serial import Serial
from tests.unit._runs import Curve

MUON_SLOPE = 3.4445**2
"""By so much Muon's iterations make the noise in a gradient larger, at most: the slope at zero of two of them."""

LONGEST_SUM_OF_MODEL = 400
"""Addends that a gradient has gone through in addition to the tokens of a step: the vocabulary, and the widths of
layers."""


def adds_in_one_order(composition: Composition) -> bool:
    """Whether the design promises the bits of the twin under DDP.

    Two ranks have one order to add in. Beyond, our own collectives add in rank order, while those of torch and sums of
    sums (hybrids) do not. Micro-batches that are reduced one by one are added after ranks, else ranks after them.
    """
    count = composition.shape.dp * composition.number  # of micro-batches of all replicas
    return all(_part_adds_in_one_order(part, count // part.shape.dp) for part in composition.parts)


def _part_adds_in_one_order(part: Composition, micro_batches: int) -> bool:
    if part.reduces == "each micro-batch" and micro_batches > 1:
        return False
    if part.steps_by_torch and part.clip == "yes":
        return False  # torch adds the squares of whole gradients, or of those of each rank
    if part.is_fsdp2 and part.replicated == "norms":
        return False  # torch enters a norm that is a unit through an operation, and autograd adds in another order
    if part.is_fsdp2 and part.zeroes == "never":
        return False  # it reduces what a step adds alone, and DDP the whole gradient again
    if part.compiled == "units":
        return False  # fused operations round less often
    if part.runs_units_twice:
        return False
    if part.is_fsdp2 and part.precision != "fp32":
        # FSDP2 adds micro-batches in fp32, and what a program writes into its fp32 shards is not rounded.
        return part.policy in ("reduce in fp32", "by dtypes") and part.writes == "nothing"
    replicas = part.shape.dp * part.shape.cp
    return replicas <= 2 or not (part.collectives == "torch" or part.is_hybrid)


def tolerance(composition: Composition) -> float:
    """Returns how far the serial run may be, relative to how far the weights have moved.

    An addition is off by at most half a unit in the last place in each of two orders: together by as many times the
    dtype's epsilon as there are addends, and in each step again.
    """
    if composition.precision != "fp32":
        return 32 * _eps(composition)
    tokens = 2 * SEQUENCE * composition.shape.dp * composition.number
    slope = MUON_SLOPE if composition.optimizer == "muon" else 1.0
    return STEPS * (tokens + LONGEST_SUM_OF_MODEL) * _eps(composition) * slope


def _eps(composition: Composition) -> float:
    return torch.finfo(
        {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[composition.precision]
    ).eps


def assert_same(composition: Composition, ours: Sequence[Curve], twin: Sequence[Curve] | None, serial: Serial) -> None:
    """Raises AssertionError at the first difference: bitwise from the twin, by the tolerance from the serial run."""
    if twin is not None:
        for part, (found, of_twin) in enumerate(zip(ours, twin, strict=True)):
            _assert_bitwise(found, of_twin, f"part {part}: ")
    _assert_close(composition, _joined(ours), serial)


def _joined(curves: Sequence[Curve]) -> Curve:
    return Curve(
        losses=[loss for curve in curves for loss in curve.losses],
        grad_norms=[norm for curve in curves for norm in curve.grad_norms],
        skipped=[step for curve in curves for step in curve.skipped],
        scales=[scale for curve in curves for scale in curve.scales],
        masters=curves[-1].masters,
        gradients=curves[-1].gradients,
        buffers=curves[-1].buffers,
    )


def _assert_bitwise(found: Curve, expected: Curve, where: str) -> None:
    for what in ("losses", "grad_norms", "skipped"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        assert ours == theirs or _all_nan(ours, theirs), f"{where}{what} are {ours}, and {theirs} under DDP"
    wrong = [name for name, value in expected.masters.items() if not torch.equal(found.masters[name], value)]
    assert found.masters.keys() == expected.masters.keys() and not wrong, f"{where}not DDP's bits: {wrong}"
    wrong = [name for name, value in expected.buffers.items() if not torch.equal(found.buffers[name], value)]
    assert found.buffers.keys() == expected.buffers.keys() and not wrong, f"{where}not DDP's buffers: {wrong}"


def _all_nan(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(a == b or (a != a and b != b) for a, b in zip(ours, theirs, strict=True))


def _assert_close(composition: Composition, found: Curve, serial: Serial) -> None:
    expected, limit, what = serial.curve, tolerance(composition), "the serial run"
    assert found.skipped == expected.skipped, f"skipped {found.skipped}, and {expected.skipped} in {what}"
    assert found.scales == expected.scales, f"loss scales {found.scales}, and {expected.scales} in {what}"
    for name in ("losses", "grad_norms"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs), f"{name} are {ours}, and {theirs} in {what}"
        for a, b in zip(ours, theirs, strict=True):
            assert abs(a - b) <= limit * abs(b) or (a != a and b != b), f"{name} are {ours}, and {theirs} in {what}"
    assert found.masters.keys() == expected.masters.keys(), f"other parameters than in {what}"
    moved = {name: (value - serial.start[name]).double().norm().item() for name, value in expected.masters.items()}
    largest = max(moved.values())
    share = 0.25 if limit > 0.01 else 0.03  # a small tensor's rounding is that of all gradients
    for name, value in expected.masters.items():
        off = (found.masters[name] - value).double().norm().item()
        bound = limit * max(moved[name], share * largest)
        if composition.precision != "fp32":  # what is written into low precision is rounded by itself
            bound += STEPS * _eps(composition) * value.double().norm().item()
        assert off <= bound, f"{name} is off by {off:.1e} from {what}, where it has moved by {moved[name]:.1e}"
    _assert_close_tensors(limit, share, found.buffers, expected.buffers, "the buffer")
    assert not found.gradients or found.gradients.keys() == expected.gradients.keys(), f"other gradients than {what}"
    wanted = {name: expected.gradients[name] for name in found.gradients}
    _assert_close_tensors(limit, share, found.gradients, wanted, "the whole gradient of")


def _assert_close_tensors(
    limit: float, share: float, found: dict[str, Tensor], expected: dict[str, Tensor], kind: str
) -> None:
    assert found.keys() == expected.keys(), f"{kind}s are {sorted(found)}, and {sorted(expected)} in the serial run"
    largest = max((value.double().norm().item() for value in expected.values()), default=0.0)
    for name, value in expected.items():
        off = (found[name].double() - value.double()).norm().item()
        bound = limit * max(value.double().norm().item(), share * largest)
        assert off <= bound, f"{kind} {name} is off by {off:.1e} from the serial run; the bound is {bound:.1e}"
