"""Whether compositions train as one process does, and as the same under DDP does on the same ranks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.compositions.between import train
from tests.compositions.compare import adds_in_one_order, assert_same
from tests.compositions.composition import Composition
from tests.compositions.refusals import refusal_of
from tests.compositions.runs import Broken, Outcome, Refused, Run, train_all
from tests.compositions.serial import Serial


def check(*compositions: Composition) -> None:
    """Raises AssertionError, with a test to paste for each, unless all train as one process does."""
    problems = check_all(compositions)
    text = [f"{problem}\n\n{as_test(composition)}" for composition, problem in problems.items()]
    assert not problems, "\n\n".join(text)


def check_all(compositions: Sequence[Composition]) -> dict[Composition, str]:
    """Returns the problem of each composition that has one; those that share a reference share its run."""
    ours = {c: Run(c, c.parts) for c in compositions}
    twins = {c: Run(c.plain, c.plain_parts) for c in compositions if refusal_of(c) is None and adds_in_one_order(c)}
    # Serial runs take a core that ranks which wait for each other leave idle.
    with tempfile.TemporaryDirectory(prefix="compositions-") as folder, ThreadPoolExecutor(1) as another_thread:
        references = dict.fromkeys(c.serial for c in ours if refusal_of(c) is None)
        serial = {c: another_thread.submit(_train_serially, c) for c in references}
        trained = train_all(list(dict.fromkeys([*ours.values(), *twins.values()])), Path(folder))
    problems = {}
    for composition, run in ours.items():
        try:
            twin = trained[twins[composition]] if composition in twins else None
            _check(composition, trained[run], twin, serial)
        except AssertionError as error:
            problems[composition] = str(error)
    return problems


def _train_serially(composition: Composition) -> Serial:
    training = Serial(composition)
    train(training)
    training.finish()
    return training


def _check(
    composition: Composition, found: Outcome, twin: Outcome | None, serial: dict[Composition, Future[Serial]]
) -> None:
    refusal = refusal_of(composition)
    assert not isinstance(found, Broken), f"it broke: {found.message}"  # type: ignore[union-attr]
    if refusal is not None:
        assert isinstance(found, Refused), f"it trained, and is on the list of refusals: {refusal.reason}"
        says = re.search(refusal.pattern, found.message)
        assert says, f"it was refused, in other words than {refusal.pattern!r}: {found.message}"
        return
    assert not isinstance(found, Refused), f"it was refused, for no reason on the list: {found.message}"  # type: ignore
    assert twin is None or isinstance(twin, list), f"the same under DDP did not train: {twin}"
    assert_same(composition, found, twin, serial[composition.serial].result())


def as_test(composition: Composition) -> str:
    """Returns a test to paste into tests/functional/test_compositions.py."""
    return f"def test_what_the_fuzzer_found() -> None:\n    check({composition!r})"
