"""Output and exit status of a failed program without a process group; with one, see tests/functional."""

from __future__ import annotations

import pytest

from core.base.errors import ConfigError, MemoryLimitError
from core.training.launch.entry import (
    check_launcher,
    environment_restart_count,
    environment_threads,
    one_line,
    run_command,
)


def outcome(capsys, error: BaseException | None) -> tuple[int, str]:
    def main(arguments):
        assert arguments == ["--flag"]
        if error is not None:
            raise error

    try:
        run_command(main, ["--flag"])
        status = 0
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().err


def test_each_kind_of_end_has_its_status_and_its_report(capsys, monkeypatch):
    assert outcome(capsys, None) == (0, "")
    assert outcome(capsys, ConfigError("lr is 0\nseed is -1")) == (2, "error: lr is 0; seed is -1\n")
    assert outcome(capsys, KeyboardInterrupt()) == (130, "interrupted\n")
    status, err = outcome(capsys, ZeroDivisionError("oh"))
    assert status == 1
    assert "rank 0 of 1:\nTraceback" in err and "ZeroDivisionError: oh" in err
    status, err = outcome(capsys, MemoryLimitError("a table\n  of lines"))
    assert status == 1 and "Traceback" in err and "MemoryLimitError: a table\n  of lines" in err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert outcome(capsys, ConfigError("lr is 0")) == (2, "")  # the first rank says it
    for rank in ("2", "x"):  # of such a place no first rank knows
        monkeypatch.setenv("RANK", rank)
        assert outcome(capsys, ConfigError("lr is 0")) == (2, "error: lr is 0\n")
    monkeypatch.setenv("RANK", "0")
    error = ConfigError("a full disk")
    error.ended_run = True
    assert outcome(capsys, error) == (3, "error: a full disk\n")


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "abc"}, "RANK is 'abc' in the environment"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x' in the environment"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_ADDR": ""}, "RANK is set and MASTER_ADDR not"),
        ({"MASTER_PORT": "p"}, "MASTER_PORT is 'p'"),
        ({"OMP_NUM_THREADS": "4,2"}, "OMP_NUM_THREADS is '4,2'"),
        ({"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS is ''"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS is '0'"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
    ],
)
def test_environments_that_no_launcher_makes_are_refused(monkeypatch, changed, said):
    for name, value in (ALONE | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        check_launcher(), environment_threads(), environment_restart_count()


@pytest.mark.parametrize(("text", "expected"), [("a\n  b\n\n", "a; b"), ("", "ValueError"), ("a", "a")])
def test_a_message_becomes_one_line(text, expected):
    assert one_line(ValueError(text)) == expected
