"""The launcher with programs that need no torch; runs of ranks that talk are in tests/functional."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.training.launch.__main__ import main

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux to end ranks with their launcher")


@pytest.fixture
def program(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
        return str(tmp_path / "program.py")

    return write


def test_ranks_get_what_torchrun_gives_and_their_arguments(program, tmp_path: Path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    text = (
        f"open(sys.argv[1] + str(rank), 'w').write(' '.join(os.environ[n] for n in {names}) + ' '.join(sys.argv[2:]))"
    )
    assert main(["--nproc-per-node", "3", program(text), f"{tmp_path}/out", "--flag", "-x"]) == 0
    threads = os.environ["OMP_NUM_THREADS"]
    for rank in range(3):
        assert (tmp_path / f"out{rank}").read_text() == f"{rank} {rank} 3 3 127.0.0.1 {threads}--flag -x"


def test_the_first_rank_to_fail_decides_the_status_and_the_others_are_ended(program, capsys, monkeypatch):
    monkeypatch.setattr("core.training.launch.ranks.GRACE_S", 0.2)
    assert main(["--nproc-per-node", "2", program("sys.exit(7) if rank == 1 else time.sleep(60)")]) == 7
    assert capsys.readouterr().err == ""
    assert main(["--nproc-per-node", "2", program("os.kill(os.getpid(), 9) if rank else time.sleep(60)")]) == 137
    assert "rank 1 was ended by SIGKILL" in capsys.readouterr().err


COUNTS = "count = int(os.environ['TORCHELASTIC_RESTART_COUNT']); open(sys.argv[1], 'a').write(f'{rank}{count} ')\n"


@pytest.mark.parametrize(
    ("failing", "status", "starts", "said"),
    [
        ("rank == 1 and count < 2 and os.kill(os.getpid(), 9)", 0, 3, "rank 1 was ended by SIGKILL (by the system"),
        ("sys.exit(3 if count < 1 else 0)", 0, 2, "(restart 1 of 2)"),
        ("sys.exit(1)", 1, 3, "(restart 2 of 2)"),
        ("sys.exit(2)", 2, 1, ""),
    ],
    ids=["killed twice", "an error in a run", "fails always", "a mistake"],
)
def test_ranks_are_started_again_after_a_failure_but_not_after_a_mistake(
    program, tmp_path, capsys, monkeypatch, failing, status, starts, said
):
    monkeypatch.setattr("core.training.launch.ranks.GRACE_S", 20.0)
    script = program(f"{COUNTS}{failing}\ncount < 2 and rank == 0 and time.sleep(0.2)")
    ended = main(["--nproc-per-node", "2", "--max-restarts", "2", script, str(tmp_path / "starts")])
    assert ended == status
    counts = sorted((tmp_path / "starts").read_text().split())
    assert counts == sorted(f"{rank}{count}" for count in range(starts) for rank in (0, 1))
    err = capsys.readouterr().err
    assert said in err and err.count("starting them again, to continue from the last good checkpoint") == starts - 1


class Launched:
    """A launcher of its own process, whose ranks write their process ids into a folder."""

    def __init__(self, script: str, folder: Path, ranks: int = 2) -> None:
        command = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", str(ranks), script, str(folder)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.folder, self.num_ranks = folder, ranks
        folder.mkdir()

    def ranks(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir()]

    def wait_for_ranks(self) -> list[int]:
        deadline = time.monotonic() + 60
        while len(self.ranks()) < self.num_ranks:
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)
        return self.ranks()

    def orphans(self) -> list[int]:
        """Processes that still run the script, long after they were to end."""
        deadline = time.monotonic() + 20
        while (left := _processes_with(str(self.folder))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def _processes_with(argument: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def launched(program, tmp_path):
    started: list[Launched] = []

    def start(text: str, ranks: int = 2) -> Launched:
        note = "import signal\nopen(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        started.append(Launched(program(note + text), tmp_path / f"ranks{len(started)}", ranks))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


DEAF = "for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, lambda *_: open(sys.argv[1] + '/0', 'w'))\n"


@linux
@pytest.mark.parametrize("text", ["time.sleep(600)", f"{DEAF}while True: time.sleep(1)"], ids=["plain", "deaf"])
def test_no_rank_outlives_a_launcher_that_is_killed(launched: Callable[..., Launched], text: str):
    run = launched(text)
    stopped = run.wait_for_ranks()[0]
    os.kill(stopped, signal.SIGSTOP)
    run.process.kill()
    assert run.orphans() == []


@linux
def test_no_rank_outlives_a_launcher_that_is_killed_or_ended_while_it_starts_them(launched: Callable[..., Launched]):
    draw = random.Random(1)
    for number in (signal.SIGKILL, signal.SIGTERM) * 3:
        run = launched("time.sleep(600)", ranks=8)
        deadline = time.monotonic() + 60
        while len(_processes_with(str(run.folder))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # the launcher alone
        time.sleep(draw.uniform(0.0, 0.05))
        run.process.send_signal(number)
        assert run.process.wait(30) in (-number, 128 + number)
        assert run.orphans() == []


@linux
def test_a_first_signal_is_waited_for(launched: Callable[..., Launched]):
    saves = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))\ntime.sleep(600)"
    run = launched(saves)
    run.wait_for_ranks()
    time.sleep(0.3)
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(30) == 0


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_ranks_that_do_not_answer_and_a_third_needs_no_waiting(
    launched: Callable[..., Launched], number: signal.Signals
):
    run = launched(f"{DEAF}while True: time.sleep(1)")
    os.kill(min(run.wait_for_ranks()), signal.SIGSTOP)
    time.sleep(0.3)
    run.process.send_signal(number)
    time.sleep(0.7)
    assert run.process.poll() is None  # it waits for what may be a save
    run.process.send_signal(number)
    assert run.process.wait(30) == 128 + number
    assert f"ended at once by a second {number.name}, without saving" in run.process.stderr.read()
    assert run.orphans() == []


def test_the_launcher_runs_without_its_docstrings(program):
    command = [sys.executable, "-OO", "-m", "core.training.launch", program("sys.exit(0)")]
    assert subprocess.run(command, timeout=100).returncode == 0


def test_wrong_arguments_are_one_line_more_than_the_usage(capsys):
    for arguments in (["--nproc-per-node", "0", "x.py"], [], ["--max-restarts", "-1", "x.py"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "it takes a positive number" in capsys.readouterr().err
