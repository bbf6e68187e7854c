"""A rank that crashes ends the run at once, and only its report is shown; a signal ends the run after saving."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from core.training.launch.processes import ECHO_S
from tests.unit._forked_launcher import ForkedLauncher
from tests.unit._program import PROGRAMS, REPOSITORY, TINY, program_environment, run_program

LAUNCH = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", "2"]
FORKED = ["forked", *LAUNCH[3:]]
"""The same launcher in a forked process, which forks the ranks."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FAILING = REPOSITORY / "tests" / "functional" / "_failing_rank.py"
LIMIT_S = 400.0
"""Seconds for what takes ten; less than the ten minutes of a collective, which nothing here may wait for."""
ENDLESS = (*TINY, "--train-iters", "1000000", "--eval-interval", "1000000")
FSDP2 = (*ENDLESS, "--use-torch-fsdp2", "--num-workers", "1")


def _run_to_its_end(launcher: list[str] | None, flags: list[Any], folder: Path, **environment: str) -> tuple[int, str]:
    """Returns the exit status and stderr of two ranks of `FAILING`, under a launcher or forked from this process."""
    if launcher is None:
        forked = run_program(FAILING, *flags, folder=folder, ranks=2, **environment)
        return forked.status, forked.err
    ended = subprocess.run(
        [*launcher, FAILING, *flags],
        cwd=folder,
        env=program_environment(**environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        pytest.param(None, 0, id="forked-0"),  # a rank that fails: `launch/test_main`
        pytest.param(LAUNCH, 0, id="launch-0", marks=pytest.mark.long),
        pytest.param(LAUNCH, 1, id="launch-1", marks=pytest.mark.long),
        pytest.param(TORCHRUN, 0, id="torchrun-0", marks=pytest.mark.long),
        pytest.param(TORCHRUN, 1, id="torchrun-1", marks=pytest.mark.long),
    ],
)
def test_a_crash_on_one_rank_ends_all_with_its_traceback_first(
    corpus: Path, tmp_path: Path, launcher: list[str] | None, rank: int
) -> None:
    flags = [*ENDLESS, "--data-path", corpus, "--save", tmp_path / "run"]
    status, err = _run_to_its_end(launcher, flags, tmp_path, CRASH_RANK=str(rank))
    assert status == 1
    before, traceback = err.split(f"rank {rank} of 2:\n", 1)
    assert "Traceback" not in before and f"rank {1 - rank}" not in before
    assert "ZeroDivisionError: a planted crash" in traceback.partition(f"rank {1 - rank} of 2")[0]
    assert f"rank {1 - rank} of 2:\nTraceback" not in traceback


@pytest.mark.long
def test_a_rank_that_is_killed_ends_all(corpus: Path, tmp_path: Path) -> None:
    flags = [*ENDLESS, "--data-path", corpus, "--save", tmp_path / "run"]
    status, err = _run_to_its_end(LAUNCH, flags, tmp_path, CRASH_RANK="1", CRASH_SIGNAL=str(int(signal.SIGKILL)))
    assert status == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in err


Launcher = subprocess.Popen[str] | ForkedLauncher
Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the example under a launcher, in a process group that ends with the test."""
    started: list[Launcher] = []

    def start(launcher: list[str], *arguments: str | Path) -> Launcher:
        if launcher[0] == FORKED[0]:
            started.append(ForkedLauncher([*launcher[1:], PROGRAMS["pretrain_gpt"], *arguments], tmp_path))
            return started[-1]
        process = subprocess.Popen(
            [*launcher, PROGRAMS["pretrain_gpt"], *arguments],
            cwd=tmp_path,
            env=program_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(reached: Callable[[], bool], process: Launcher) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.05)


def lines_of(run: Path) -> int:
    """Returns how many lines the log has."""
    return (run / "log.jsonl").read_text().count("\n") if (run / "log.jsonl").exists() else 0


def wait_for_steps(run: Path, process: Launcher) -> None:
    wait_until(lambda: lines_of(run) >= 2, process)


def ranks_of(process: Launcher) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _listening(pid: int) -> set[str]:
    """Returns the addresses, in the kernel's hexadecimal, at which a process waits for connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def assert_listens_on_loopback_alone(process: Launcher) -> None:
    """Asserts that neither the launcher of this machine's ranks nor they can be reached from another."""
    ranks = ranks_of(process)
    addresses = {address for pid in (process.pid, *ranks) for address in _listening(pid)}
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert len(ranks) == 2 and addresses and addresses <= loopback, addresses


@pytest.mark.long  # a signal that saves and ends is in the test of killed runs, a terminal's in `launch/test_main`
def test_an_interrupt_from_a_terminal_saves_and_ends(start: Start, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(LAUNCH, *FSDP2, "--data-path", corpus, "--save", run)
    wait_for_steps(run, process)
    if sys.platform.startswith("linux"):  # which has the tables to read
        assert_listens_on_loopback_alone(process)
    os.killpg(process.pid, signal.SIGINT)  # as on Ctrl-C: to launcher, ranks and data workers
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert_saved_at_the_end(run, out, signal.SIGINT)


def assert_saved_at_the_end(run: Path, out: str, number: signal.Signals) -> None:
    saved = json.loads((run / "log.jsonl").read_text().splitlines()[-1])["step"]
    assert (run / "latest").read_text().strip() == f"iter_{saved:07d}"
    assert f"stopped by {number.name} after iteration {saved}" in out
    assert f"--load {run}" in out
    assert (run / "loss.png").exists()


def _is_pending(number: signal.Signals, pid: int) -> bool:
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.long  # `launch/test_main` has it of ranks that do nothing else
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's table of processes")
def test_a_second_signal_ends_a_run_in_which_one_rank_hangs(start: Start, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(LAUNCH, *ENDLESS, "--data-path", corpus, "--save", run)
    wait_for_steps(run, process)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: _is_pending(signal.SIGTERM, ranks[1]), process)  # which the launcher has passed on
    time.sleep(2 * ECHO_S)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended at once by a second SIGTERM, without saving" in err and "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize(
    "launcher", [FORKED, pytest.param(LAUNCH, marks=pytest.mark.long)], ids=["forked", "started as users do"]
)
def test_a_killed_run_restarts_and_a_signal_saves_and_ends_it(
    start: Start, corpus: Path, tmp_path: Path, launcher: list[str]
) -> None:
    run = tmp_path / "run"
    options = ["--max-restarts", "2"]
    flags = [*FSDP2, "--async-save", "--save-interval", "1", "--keep-last", "2", "--data-path", corpus, "--save", run]
    process = start([*launcher, *options], *flags)
    wait_for_steps(run, process)
    if sys.platform.startswith("linux"):
        assert_listens_on_loopback_alone(process)
    wait_until((run / "latest").exists, process)  # a checkpoint that is still being written would not be loaded
    ranks = ranks_of(process)
    os.kill(ranks[0], signal.SIGKILL)
    before = lines_of(run)
    wait_until(lambda: lines_of(run) > before + 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "rank 0 was ended by SIGKILL" in err and "(restart 1 of 2)" in err
    assert "Traceback" not in err.partition("(restart 1 of 2)")[2]
    assert_saved_at_the_end(run, out, signal.SIGTERM)
    assert "verified" in out and "by their hashes" in out
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


@pytest.mark.long  # the ranks' part is that of our own launcher, above
def test_torchrun_passes_a_signal_on_and_the_run_is_saved(start: Start, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(TORCHRUN, *ENDLESS, "--data-path", corpus, "--save", run)
    wait_for_steps(run, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert "stopped by SIGTERM" in out
    assert (run / "latest").exists()


@pytest.mark.long
def test_the_slurm_script_starts_ranks_that_find_each_other(corpus: Path, tmp_path: Path) -> None:
    """Two tasks under a stand-in for srun, with Slurm's variables alone."""
    tools = tmp_path / "tools"
    tools.mkdir()
    task = 'SLURM_STEP_ID=0 SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NTASKS=2 "$@" & pids+=($!)'
    wait = "for p in ${pids[@]}; do wait $p || exit; done"
    srun = f"#!/bin/bash\nshift; pids=()\nfor r in 0 1; do {task}; done\n{wait}\n"
    (tools / "srun").write_text(srun)
    (tools / "srun").chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    environment = program_environment(PYTHON=sys.executable, **slurm)
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    ended = subprocess.run(
        [REPOSITORY / "examples/gpt/slurm.sh", *TINY, "--train-iters", "2", "--data-path", corpus]
        + ["--save", tmp_path / "a run"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "a run" / "iter_0000002").glob("rank_*.bin"))) == 2
