"""Output and exit status of a failed program without a process group; with one, see tests/functional."""

from __future__ import annotations

import pytest

from core.base.errors import ConfigError, MemoryLimitError
from core.training.launch.entry import environment_restart_count, environment_threads, one_line, run_command


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


def test_each_kind_of_end_has_its_status_and_its_report(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert outcome(capsys, None) == (0, "")
    assert outcome(capsys, ConfigError("lr is 0\nseed is -1")) == (2, "error: lr is 0; seed is -1\n")
    assert outcome(capsys, KeyboardInterrupt()) == (130, "interrupted\n")
    status, err = outcome(capsys, ZeroDivisionError("oh"))
    assert status == 1
    assert "rank 0 of 1:\nTraceback" in err and err.endswith("ZeroDivisionError: oh\n")
    (whole,) = tmp_path.iterdir()  # under a launcher that names no file
    assert f"... 1 frame in shardstack: see {whole}\n" in err and "entry.py" in whole.read_text()
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


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [("TORCHELASTIC_RESTART_COUNT", "x", environment_restart_count), ("OMP_NUM_THREADS", "4,2", environment_threads)],
)
def test_variables_of_a_run_are_numbers(monkeypatch, name, value, read):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        read()


@pytest.mark.parametrize(("text", "expected"), [("a\n  b\n\n", "a; b"), ("", "ValueError"), ("a", "a")])
def test_a_message_becomes_one_line(text, expected):
    assert one_line(ValueError(text)) == expected
