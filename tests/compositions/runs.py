"""Trains compositions on ranks, as many as possible in one job of the same processes."""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.base.errors import ShardstackError
from tests.compositions.between import train
from tests.compositions.composition import Composition
from tests.compositions.data import CUT, STEPS
from tests.compositions.staged import Staged
from tests.compositions.wrapped import Wrapped, parallel_groups
from tests.unit._runs import Curve
from tests.unit._spawn import RankFailure, run_distributed


@dataclass(frozen=True)
class Refused:
    """The message of an error of `core.base.errors`."""

    message: str


@dataclass(frozen=True)
class Broken:
    """The traceback of any other error."""

    message: str


@dataclass(frozen=True)
class Run:
    """A composition in parts, each continuing the one before."""

    composition: Composition
    parts: tuple[Composition, ...]


Outcome = list[Curve] | Refused | Broken
"""What each part did, or how it ended."""


def train_all(runs: Sequence[Run], folder: Path) -> dict[Run, Outcome]:
    """Trains all runs; returns what the first rank saw of each."""
    found: dict[Run, Outcome] = {run: [] for run in runs}
    for number in range(2):
        open_runs = [run for run in runs if number < len(run.parts) and isinstance(found[run], list)]
        for ranks in sorted({run.parts[number].shape.ranks for run in open_runs}):
            waiting = [run for run in open_runs if run.parts[number].shape.ranks == ranks]
            waiting.sort(key=lambda run: _groups_of(run.parts[number]))
            while waiting:
                ended = _job(waiting, number, ranks, folder, runs)
                for run, outcome in zip(waiting, ended, strict=False):
                    before = found[run]
                    assert isinstance(before, list)
                    found[run] = [*before, outcome] if isinstance(outcome, Curve) else outcome
                waiting = waiting[len(ended) :]
    return found


def _job(
    runs: Sequence[Run], number: int, ranks: int, folder: Path, all_runs: Sequence[Run]
) -> list[Curve | Refused | Broken]:
    """Trains a part of runs up to the first that broke; only the first run, if they took the ranks with them."""
    folders = [folder / str(all_runs.index(run)) for run in runs]
    try:
        of_ranks = run_distributed(_train_parts, ranks, runs, number, folders)
    except RankFailure as failure:
        if len(runs) == 1:
            return [Broken(str(failure))]
        return _job(runs[:1], number, ranks, folder, all_runs)
    shortest: list[Curve | Refused | Broken] = min(of_ranks, key=len)
    return shortest


def _train_parts(runs: Sequence[Run], number: int, folders: Sequence[Path]) -> list[Curve | Refused | Broken]:
    warnings.simplefilter("ignore")
    found: list[Curve | Refused | Broken] = []
    both = zip(runs, folders, strict=True)
    for _, of_layout in itertools.groupby(both, key=lambda pair: _groups_of(pair[0].parts[number])):
        group = list(of_layout)
        with parallel_groups(group[0][0].parts[number]):
            for run, folder in group:
                try:
                    found.append(_train_part(run, number, folder))
                except ShardstackError as error:
                    found.append(Refused(f"{type(error).__name__}: {error}"))
                except Exception:
                    return [*found, Broken(traceback.format_exc())]
    return found


def _groups_of(part: Composition) -> tuple[str, int, int, bool]:
    """Returns what decides the groups of ranks."""
    return part.layout, part.shape.pp, part.virtual_stages or 1, part.experts == "over ranks"


def _train_part(run: Run, number: int, folder: Path) -> Curve:
    """Trains from the start, or from what the part before has saved."""
    first = CUT if number else 0
    part = run.parts[number]
    training = (Wrapped if part.pipeline == "none" else Staged)(run.composition, part, first)
    is_last = number == len(run.parts) - 1
    if number > 0:
        training.load(folder)
    train(training, first, STEPS if is_last else CUT)
    if not is_last:
        training.save(folder)
    return training.finish()
