"""Trains random compositions until the time is used up, or one does not train as one process does.

    python -m tests.compositions --minutes 10 --seed 1
    python -m tests.compositions --write-sample         chooses a new fixed sample for `make test`

A failure is shrunk by hypothesis and printed as a test to paste.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.compositions.check import as_test, check_all
from tests.compositions.composition import Composition
from tests.compositions.cover import write_sample
from tests.compositions.refusals import refusal_of
from tests.compositions.strategies import families

_SETTINGS = settings(
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)
SHRINKING_S = 300.0
"""How long a failure is made smaller, after the time that was asked for too."""


class Differs(AssertionError):
    """A composition that does not train as one process does."""


class Fuzz:
    """A search for a composition that fails: how many were drawn, and the smallest failure.

    Args:
        most_ranks: of a layout that is drawn.
        log: gets a line for each composition; None keeps none.
    """

    def __init__(self, most_ranks: int, log: Path | None) -> None:
        self.most_ranks, self.log = most_ranks, log
        self.drawn = self.refused = 0
        # Set by a failure, and again by each smaller one that hypothesis then finds.
        self.smallest: tuple[Composition, str] | None = None
        self._until = 0.0  # no composition is trained after it

    def run(self, seconds: float, number: int) -> None:
        """Draws until the time is over or a failure has been made small."""
        self._until = time.monotonic() + seconds
        while time.monotonic() < self._until and self.smallest is None:
            number += 1
            with contextlib.suppress(Differs, Flaky):  # flaky: time ended while a failure was made smaller
                seed(number)(_SETTINGS(given(families(self.most_ranks))(self._attempt)))()

    def _attempt(self, family: tuple[Composition, ...]) -> None:
        if time.monotonic() > self._until:
            return
        problems = check_all(family)
        if self.smallest is None:
            self.drawn += len(family)
            self.refused += sum(refusal_of(composition) is not None for composition in family)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as lines:
                lines.writelines(f"{'FAILED' if c in problems else 'equal'} {c!r}\n" for c in family)
        if not problems:
            return
        if self.smallest is None:
            self._until = time.monotonic() + SHRINKING_S
        known = [] if self.smallest is None else [self.smallest]
        self.smallest = min([*known, *problems.items()], key=lambda pair: len(repr(pair[0])))
        raise Differs


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compositions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=_positive, default=10.0, help="how long to draw")
    parser.add_argument("--seed", type=_seed, default=None, help="where to begin; by default the time of day")
    parser.add_argument("--log", type=Path, default=None, help="a file to which each composition is added")
    parser.add_argument("--write-sample", action="store_true", help="choose a new fixed sample")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.write_sample:
        print(f"{write_sample()} compositions")
        return 0
    cores = len(os.sched_getaffinity(0))
    most_ranks = 4 if cores > 1 else 2
    number = int(time.time()) if options.seed is None else options.seed
    fewer = "" if cores > 1 else " (one core: layouts of 3 and 4 ranks are left out)"
    print(f"compositions on up to {most_ranks} ranks{fewer}; seed {number}", flush=True)
    fuzz = Fuzz(most_ranks, options.log)
    fuzz.run(60 * options.minutes, number)
    print(f"{fuzz.drawn} compositions, {fuzz.refused} of them refused for a reason on the list", flush=True)
    if fuzz.smallest is None:
        return 0
    composition, problem = fuzz.smallest
    print(f"\n{problem}\n\n{as_test(composition)}")
    return 1


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes; give one above 0, as 10 or 0.5")
    return value


def _seed(text: str) -> int | None:
    if text == "":  # make fuzz without SEED
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number from 0, or none")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
