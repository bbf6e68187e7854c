"""What is said where ranks begin without a copy in memory."""

from __future__ import annotations

import warnings

import pytest

from core.base.errors import CheckpointError
from core.training import recovery
from core.training.launch.generations import Generation


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"number": 4}, ["all ranks start again: no complete copy is left in memory"]),
        ({"number": 1, "lost": "rank 1 failed"}, ["rank 1 failed: no complete copy is left in memory"]),
        ({"number": 1, "rank": 1}, []),
        ({}, []),
    ],
    ids=["started again", "a lost rank", "another rank", "the first start"],
)
def test_ranks_that_find_no_copy_say_so_once(monkeypatch, tmp_path, place, said):
    monkeypatch.setattr(recovery, "copies_root", lambda: tmp_path)
    monkeypatch.setattr(recovery, "current_generation", lambda: Generation(**place))
    monkeypatch.setattr(recovery, "fetch_newest", lambda *_: (None, []))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert recovery.load_newest({}) is None
    assert [str(warning.message).partition(";")[0] for warning in warned] == said


def test_a_run_goes_on_without_copies_that_do_not_fit(monkeypatch, tmp_path):
    def copies(*_):
        raise CheckpointError("no memory for 8 bytes of copies")

    place = {"number": 0}
    monkeypatch.setattr(recovery, "copies_root", lambda: tmp_path)
    monkeypatch.setattr(recovery, "current_generation", lambda: Generation(**place))
    monkeypatch.setattr(recovery, "HostCopies", copies)
    with pytest.raises(CheckpointError, match="no memory for 8 bytes"):  # before the first step nothing is lost
        recovery.StepCopies(lambda: ({}, {}), 0)
    place["number"] = 1
    with (
        pytest.warns(UserWarning, match="no memory for 8 bytes of copies; the run goes on without new copies"),
        recovery.StepCopies(lambda: ({}, {}), 0) as kept,
    ):
        assert not kept.is_due(1)
        kept.start(1)
        kept.wait()
    place["rank"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recovery.StepCopies(lambda: ({}, {}), 0)
