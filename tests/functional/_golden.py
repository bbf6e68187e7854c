"""Golden values: the curve of a case's run as it is stored, compared, and written again.

`docs/functional-cases.md` explains the format. Nothing here starts a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.functional._cases import Case, CaseError

SCHEMA = 1

METRICS = {"loss": 5, "grad_norm": 5, "num_zeros": 0, "loss_scale": 0, "skipped": 0, "peak_memory_mib": 1}
"""What a golden file has for every step, and to how many decimals."""

ABSENT_WHEN_SKIPPED = ("grad_norm", "num_zeros")
"""A step that was skipped for an overflow has neither; everything else is a number in every step."""


@dataclass(frozen=True)
class Golden:
    """The curve of a run: every metric of every step from `start` to `end`."""

    device: str
    torch: str
    ranks: int
    start: int
    end: int
    interval: int
    values: Mapping[str, Sequence[float | None]]

    @property
    def steps(self) -> list[int]:
        return list(range(self.start, self.end + 1, self.interval))


def golden_path(case: Case, device: str) -> Path:
    return case.folder / f"golden_values_{device}.json"


def read_golden(path: Path) -> Golden:
    """Returns the golden values of a file.

    Raises:
        CaseError: it is not there, or of another schema, or has not every metric for every step.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise CaseError(f"{where}: there are no golden values; make them with --update-golden") from None
    return parse_golden(text, where)


def parse_golden(text: str, where: str) -> Golden:
    """Returns the golden values that a file's text has. `where` names the file in errors.

    Raises:
        CaseError: it is of another schema, or has not every metric for every step.
    """
    again = "write it again with --update-golden"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{where}: is no JSON ({error}); {again}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise CaseError(f"{where}: schema is {found!r} and this suite reads {SCHEMA}; {again}")
    del content["schema"]
    try:
        golden = Golden(**content)
        names, lengths = golden.values.keys(), {len(values) for values in golden.values.values()}
        numbers = [number for values in golden.values.values() for number in values if number is not None]
        num_steps = len(range(golden.start, golden.end + 1, golden.interval))
        is_finite = all(map(math.isfinite, numbers))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CaseError(f"{where}: is not of schema {SCHEMA} ({error}); {again}") from None
    if names != METRICS.keys() or lengths != {num_steps} or not is_finite:
        raise CaseError(
            f"{where}: has {', '.join(names)} for {sorted(lengths)} steps, and the schema wants finite numbers of "
            f"{', '.join(METRICS)} for {num_steps}; {again}"
        )
    return golden


def write_golden(golden: Golden, path: Path) -> None:
    """Writes golden values, a metric a line."""
    head = {
        "schema": SCHEMA,
        **{name: getattr(golden, name) for name in ("device", "torch", "ranks", "start", "end", "interval")},
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    values = [f"  {json.dumps(name)}: {json.dumps(list(golden.values[name]))}" for name in METRICS]
    text = "\n".join(["{", *lines, ' "values": {', ",\n".join(values), " }", "}", ""])
    path.write_text(text, encoding="utf-8")


def rounded(metric: str, value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    decimals = METRICS[metric]
    return round(value, decimals) if decimals else round(value)


# ---- comparison

TOLERANCES = {
    "fp32": {"loss": 1e-3, "grad_norm": 1e-2, "num_zeros": 5, "peak_memory_mib": 0.3},
    "low": {"loss": 1e-2, "grad_norm": 1e-1, "num_zeros": 20, "peak_memory_mib": 0.3},
}
"""How far from its golden value a metric may be: in fp32, and in bf16 and fp16. Others are exact.

Relative to the value, but for those of `COUNTS`. What no token reaches is zero on every processor. Beyond that single
elements are zero because what they add cancels when rounded: few in fp32, up to 13 a step with the 8 bits of bf16.
Two processors round differently, and two counts of rare events with a mean of 13 are sqrt(2 * 13) = 5 apart: four
times that is allowed."""

COUNTS = ("num_zeros",)
"""Metrics whose tolerance is a number of elements."""


def precision(flags: Sequence[str]) -> str:
    """Whose tolerances hold for a run."""
    return "low" if {"--bf16", "--fp16"} & set(flags) else "fp32"


def differences(found: Golden, expected: Golden, tolerances: Mapping[str, float]) -> list[str]:
    """Returns every way in which a curve is not the expected one; none if it is.

    A step or a metric that only one side has is a difference, and so is what is no number on either side.
    """
    if (found.start, found.end, found.interval) != (expected.start, expected.end, expected.interval):
        return [
            f"steps {found.start} to {found.end} by {found.interval} instead of "
            f"{expected.start} to {expected.end} by {expected.interval}"
        ]
    wrong = [f"{metric} is on one side only" for metric in sorted(found.values.keys() ^ expected.values.keys())]
    for metric in METRICS.keys() & found.values.keys() & expected.values.keys():
        ours, theirs = found.values[metric], expected.values[metric]
        if not len(ours) == len(theirs) == len(expected.steps):
            wrong.append(f"{metric} has {len(ours)} of {len(expected.steps)} steps, and {len(theirs)} are expected")
            continue
        for index, step in enumerate(expected.steps):
            allowed = tolerances.get(metric, 0.0)
            limit = allowed if metric in COUNTS else allowed * abs(theirs[index] or 0.0)
            may_be_absent = metric in ABSENT_WHEN_SKIPPED and _skipped(found, index) and _skipped(expected, index)
            if not _agree(ours[index], theirs[index], limit, may_be_absent):
                wrong.append(f"{metric} of step {step} is {ours[index]}, not {theirs[index]} (within {allowed:g})")
    return wrong


def _skipped(golden: Golden, index: int) -> bool:
    values = golden.values.get("skipped", ())
    return index < len(values) and bool(values[index])


def _agree(found: float | None, expected: float | None, limit: float, may_be_absent: bool) -> bool:
    if found is None or expected is None:
        return found is None and expected is None and may_be_absent
    if not (math.isfinite(found) and math.isfinite(expected)):
        return False
    return abs(found - expected) <= limit


def explain_update(before: Golden | None, after: Golden) -> list[str]:
    """Describes the changes of new golden values, a line for each metric."""
    if before is None:
        return ["new"]
    lines = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in ("device", "torch", "ranks", "start", "end", "interval")
        if getattr(before, name) != getattr(after, name)
    ]
    for metric in METRICS:
        pairs = list(zip(before.steps, before.values[metric], after.values[metric], strict=False))
        changed = [(step, old, new) for step, old, new in pairs if old != new]
        if changed:
            step, old, new = max(changed, key=lambda change: abs((change[1] or 0.0) - (change[2] or 0.0)))
            lines.append(f"{metric}: {len(changed)} of {len(pairs)} steps, most at step {step}: {old} -> {new}")
    return lines or ["unchanged"]
