"""Case files and golden values: what a case of `tests/functional/cases` says, read strictly and checked.

`docs/functional-cases.md` explains both formats. Nothing here starts a run.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).with_name("cases")
KINDS = ("regular", "resume", "reshard", "equality")
SCHEMA = 1

METRICS = {"loss": 5, "grad_norm": 5, "num_zeros": 0, "loss_scale": 0, "skipped": 0, "peak_memory_mib": 1}
"""What a golden file has for every step, and to how many decimals."""

ABSENT_WHEN_SKIPPED = ("grad_norm", "num_zeros")
"""A step that was skipped for an overflow has neither; everything else is a number in every step."""


class CaseError(ValueError):
    """A case file or a golden file that cannot be used; one line that names it."""


@dataclass(frozen=True)
class Leg:
    """A part of a run, started by a command line of its own."""

    flags: tuple[str, ...] = ()
    ranks: int = 2
    until: int | None = None
    """The step after which the next leg takes over; None for the last."""


@dataclass(frozen=True)
class OnGpu:
    """What is different where a GPU is at hand."""

    flags: tuple[str, ...] = ()
    """Added to those of every leg."""
    min_ranks: int = 1
    """GPUs without which there is nothing to run; more are used in multiples of it."""
    equal_to: str | None = None
    tolerance: float = 0.0
    is_needed: bool = False
    """The case is too large for a CPU, and does not run there."""


@dataclass(frozen=True)
class Case:
    """A run with its golden values."""

    name: str
    kind: str
    legs: tuple[Leg, ...]
    is_quick: bool = False
    """Runs with every commit, and not in the long set alone."""
    equal_to: str | None = None
    """The case whose losses and norms this one has."""
    tolerance: float = 0.0
    """Of that equality, and of that of legs with the run that went on undisturbed; relative. 0 is bit by bit."""
    gpu: OnGpu = field(default_factory=OnGpu)

    @property
    def folder(self) -> Path:
        return CASES / self.name

    def __str__(self) -> str:
        return self.name


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


# ---- case files


def read_cases(folder: Path = CASES, *, others: Sequence[Case] = ()) -> list[Case]:
    """Returns the cases of a folder and those that are made elsewhere, by name.

    Raises:
        CaseError: a case file that does not say what it should, or an `equal_to` that leads nowhere.
    """
    cases = [read_case(path.parent) for path in folder.glob("*/config.yaml")]
    cases = sorted([*cases, *others], key=str)
    names = {case.name for case in cases}
    for case in cases:
        for other in (case.equal_to, case.gpu.equal_to):
            if other is not None and (other not in names or other == case.name):
                raise CaseError(f"{case.name}/config.yaml: equal_to is {other!r}, which is no other case; name one")
    return cases


def read_case(folder: Path) -> Case:
    """Returns the case of a folder.

    Raises:
        CaseError: a key that is unknown, missing, or of the wrong type.
    """
    path = folder / "config.yaml"
    where = f"{folder.name}/config.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CaseError(f"{where}: cannot be read ({' '.join(str(error).split())})") from None
    content = _Section(document, where)
    kind = content.take("kind", str)
    if kind not in KINDS:
        raise CaseError(f"{where}: kind is {kind!r}; it takes one of {', '.join(KINDS)}")
    common = Leg(_flags(content.take("flags", str, "")), content.take("ranks", int, 2))
    legs = _legs(kind, common, content, where)
    gpu = _Section(content.take("gpu", dict, {}), f"{where}: gpu")
    case = Case(
        name=folder.name,
        kind=kind,
        legs=legs,
        is_quick=content.take("quick", bool, False),
        equal_to=content.take("equal_to", str, None),
        tolerance=float(content.take("tolerance", (int, float), 0.0)),
        gpu=OnGpu(
            flags=_flags(gpu.take("flags", str, "")),
            min_ranks=gpu.take("min_ranks", int, 1),
            equal_to=gpu.take("equal_to", str, None),
            tolerance=float(gpu.take("tolerance", (int, float), 0.0)),
            is_needed=gpu.take("needed", bool, False),
        ),
    )
    gpu.end()
    content.end()
    if kind == "equality" and case.equal_to is None and case.gpu.equal_to is None:
        raise CaseError(f"{where}: kind is equality and there is no equal_to; name the case that it equals")
    return case


def _legs(kind: str, common: Leg, content: _Section, where: str) -> tuple[Leg, ...]:
    if kind == "resume":
        return (Leg(common.flags, common.ranks, content.take("resume_at", int)), common)
    if kind != "reshard":
        return (common,)
    entries = content.take("legs", list)
    legs = []
    for number, entry in enumerate(entries):
        section = _Section(entry, f"{where}: leg {number + 1}")
        flags = merged_flags(common.flags, _flags(section.take("flags", str, "")))
        is_last = number == len(entries) - 1
        until = None if is_last else section.take("until", int)
        legs.append(Leg(flags, section.take("ranks", int, common.ranks), until))
        section.end()
    ends = [leg.until for leg in legs[:-1] if leg.until is not None]
    if len(legs) < 2 or ends != sorted(set(ends)):
        raise CaseError(f"{where}: legs are {len(legs)}, until {ends}; give at least two that follow each other")
    return tuple(legs)


_REQUIRED = object()


class _Section:
    """A mapping whose keys are taken one by one; what is left over is unknown."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise CaseError(f"{where}: holds {type(content).__name__}; write keys with their values")
        self._left, self._where, self._known = dict(content), where, list[str]()

    def take(self, key: str, kind: Any, default: Any = _REQUIRED) -> Any:
        self._known.append(key)
        if key not in self._left:
            if default is _REQUIRED:
                raise CaseError(f"{self._where}: {key} is missing; give it a value")
            return default
        value = self._left.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CaseError(f"{self._where}: {key} is {value!r}, of type {type(value).__name__}; see the other cases")
        return value

    def end(self) -> None:
        if self._left:
            unknown = ", ".join(map(str, self._left))
            raise CaseError(f"{self._where}: unknown key {unknown}; known are {', '.join(self._known)}")


def _flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def merged_flags(*groups: Sequence[str]) -> tuple[str, ...]:
    """Returns every flag once: a flag in a later group replaces the earlier one, with its value."""
    merged: dict[str, list[str]] = {}
    for group in groups:
        given: dict[str, list[str]] = {}
        for part in group:
            if part.startswith("--"):
                given[part] = []
            else:
                given[list(given)[-1]].append(part)
        merged |= given
    return tuple(part for flag, values in merged.items() for part in (flag, *values))


# ---- golden values


def golden_path(case: Case, device: str) -> Path:
    return case.folder / f"golden_values_{device}.json"


def read_golden(path: Path) -> Golden:
    """Returns the golden values of a file.

    Raises:
        CaseError: it is not there, or of another schema, or has not every metric for every step.
    """
    where = f"{path.parent.name}/{path.name}"
    again = "write it again with --update-golden"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CaseError(f"{where}: there are no golden values; make them with --update-golden") from None
    except ValueError as error:
        raise CaseError(f"{where}: is no JSON ({error}); {again}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise CaseError(f"{where}: schema is {found!r} and this suite reads {SCHEMA}; {again}")
    del content["schema"]
    try:
        golden = Golden(**content)
        lengths = {len(values) for values in golden.values.values()}
        steps = golden.steps
    except (TypeError, ValueError, AttributeError) as error:
        raise CaseError(f"{where}: is not of schema {SCHEMA} ({error}); {again}") from None
    if golden.values.keys() != METRICS.keys() or lengths != {len(steps)}:
        raise CaseError(
            f"{where}: has {', '.join(golden.values)} for {sorted(lengths)} steps, and the schema wants "
            f"{', '.join(METRICS)} for {len(steps)}; {again}"
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
    """What new golden values change, a line a metric."""
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
