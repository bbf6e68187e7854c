"""A fixed sample of compositions, in which every pair of values meets, trains as one process does.

`docs/compositions.md` says how the sample is chosen, and how to draw other compositions: `make fuzz`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence

import pytest

from tests.compositions.__main__ import main
from tests.compositions.check import as_test, check, check_all
from tests.compositions.compare import adds_in_one_order
from tests.compositions.composition import AXES, Composition
from tests.compositions.cover import LEFT_OUT, allowed_pairs, facts, is_sampled, pairs_of, sample, short_sample
from tests.compositions.refusals import REFUSALS, refusal_of
from tests.unit._program import REPOSITORY
from tests.unit._quick import quick

REFUSED = (
    Composition(layout="hybrid", wrapper="ddp"),
    Composition(layout="dp2", wrapper="fsdp2", kept="all", overrides="first kept"),
    Composition(layout="dp2", wrapper="zero3", replicated="an mlp", experts="over ranks"),
    Composition(layout="dp2", wrapper="fsdp2", replicated="norms", recompute="products of units"),
    Composition(layout="dp2", wrapper="zero3", whole_gradients="yes"),
    Composition(layout="dp2", wrapper="ddp", zeroes="never", loss="per token"),
    Composition(layout="dp1", pipeline="1F1B", optimizer="muon", trained="one norm"),
    Composition(layout="dp2", wrapper="fsdp2", memory="strided"),
    Composition(layout="dp2", wrapper="zero3", averaged="equally", evaluates="the average inside whole_parameters"),
)


def _by_layout(compositions: tuple[Composition, ...]) -> dict[str, list[Composition]]:
    found: dict[str, list[Composition]] = {}
    for composition in compositions:
        found.setdefault(composition.layout, []).append(composition)
    return found


SAMPLE = _by_layout(sample())


@functools.cache
def _problems(layout: str, is_short: bool) -> dict[Composition, str]:
    """Checks all compositions of a layout that run each time, or all that do not: they share their jobs."""
    return check_all([c for c in SAMPLE[layout] if (c in short_sample()) == is_short])


@pytest.mark.parametrize(
    "composition",
    [
        pytest.param(c, id=f"{c.layout}-{c.wrapper}", marks=() if c in short_sample() else pytest.mark.long)
        for c in itertools.chain(*SAMPLE.values())
    ],
)
def test_a_composition_trains_as_one_process_does(composition: Composition):
    problem = _problems(composition.layout, composition in short_sample()).get(composition)
    assert problem is None, f"{problem}\n\n{as_test(composition)}"


@pytest.mark.parametrize(
    ("layout", "wrapper"),
    quick(
        [
            ("tp2-cp2-sp", "zero2"),
            ("tp4-sp", "fsdp2"),
            ("dp4", "zero3"),
            ("hybrid-cp2", "fsdp2"),
            ("dp2-tp2", "zero1"),
        ],
        lambda case: case[0] == "tp2-cp2-sp",
    ),
)
def test_layouts_outside_the_sample_train_as_one_process(layout: str, wrapper: str):
    check(Composition(layout=layout, wrapper=wrapper, widths="odd", micro_batches="2", documents="packed", clip="yes"))


def test_every_refusal_is_met():
    assert [refusal_of(composition) for composition in REFUSED] == list(REFUSALS)
    assert not check_all(REFUSED)


def test_every_pair_of_values_meets_in_the_sample():
    met = set().union(*map(pairs_of, filter(is_sampled, sample())))
    missing = allowed_pairs().keys() - met
    assert not missing, f"{len(missing)} pairs, as {sorted(missing)[:3]}; python -m tests.compositions --write-sample"
    assert f"every pair in {len(set(sample()))} trainings" in (REPOSITORY / "README.md").read_text()
    possible, short = (set().union(*map(facts, found)) for found in (set(allowed_pairs().values()), short_sample()))
    assert possible == short, "python -m tests.compositions --write-sample"
    assert 4 * sum(map(adds_in_one_order, sample())) > len(sample())  # `docs/compositions.md`
    values = {(axis, value) for axis, values in AXES.items() for value in values}
    assert {side for pair in met for side in pair} == values - LEFT_OUT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "soon"], "'soon' is no number of minutes"),
        (["--minutes", "-1"], "'-1' is no number of minutes"),
        (["--minutes", "nan"], "'nan' is no number of minutes"),
        (["--seed", "first"], "'first' is no seed"),
        (["--seed", "-3"], "'-3' is no seed"),
    ],
)
def test_what_is_no_number_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def _fsdp2_clips_wrongly(family: Sequence[Composition]) -> dict[Composition, str]:
    return {c: "the norm is wrong" for c in family if c.wrapper == "fsdp2" and c.clip == "yes"}


def test_a_failure_is_shrunk_and_printed_as_a_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tests.compositions.__main__.check_all", _fsdp2_clips_wrongly)
    assert main(["--minutes", "1", "--seed", "3"]) == 1
    output = capsys.readouterr().out
    assert "the norm is wrong" in output
    assert output.endswith("    check(Composition(wrapper='fsdp2', clip='yes'))\n")


def test_one_core_draws_fewer_ranks_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    drawn: list[Composition] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("tests.compositions.__main__.check_all", lambda family: drawn.extend(family) or {})
    assert main(["--minutes", "0.02", "--seed", ""]) == 0
    assert capsys.readouterr().out.startswith(
        "compositions on up to 2 ranks (one core: layouts of 3 and 4 ranks are left"
    )
    assert drawn and max(composition.ranks for composition in drawn) == 2
