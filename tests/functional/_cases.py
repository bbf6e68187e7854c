"""Case files: what a case of `tests/functional/cases` says, read strictly and checked.

`docs/functional-cases.md` explains the format. Nothing here starts a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).with_name("cases")
KINDS = ("regular", "resume", "reshard", "equality")


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
    """What is different where there is a GPU."""

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
