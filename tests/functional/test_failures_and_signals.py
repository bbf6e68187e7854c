"""A rank that crashes ends the run at once and is the one that is heard; a signal ends it after saving."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.functional._program import PROGRAMS, REPOSITORY, TINY, program_environment

LAUNCH = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FAILING = REPOSITORY / "tests" / "functional" / "_failing_rank.py"
ENDLESS = (*TINY, "--train-iters", "1000000", "--eval-interval", "1000000")


@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN], ids=["launch", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_on_one_rank_ends_all_with_its_traceback_first(
    corpus: Path, tmp_path: Path, launcher: list[str], rank: int
) -> None:
    ended = subprocess.run(
        [*launcher, FAILING, *ENDLESS, "--data-path", corpus, "--save", tmp_path / "run"],
        cwd=tmp_path,
        env=program_environment(CRASH_RANK=str(rank)),
        capture_output=True,
        text=True,
        timeout=240,  # nothing waits for a collective, whose time limit is ten minutes
    )
    assert ended.returncode == 1
    before, traceback = ended.stderr.split(f"rank {rank} of 2:\n", 1)
    assert "Traceback" not in before and f"rank {1 - rank}" not in before
    assert "ZeroDivisionError: a planted crash" in traceback.partition(f"rank {1 - rank} of 2")[0]
    assert f"rank {1 - rank} of 2:\nTraceback" not in traceback


def test_a_rank_that_is_killed_ends_all(corpus: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*LAUNCH, FAILING, *ENDLESS, "--data-path", corpus, "--save", tmp_path / "run"],
        cwd=tmp_path,
        env=program_environment(CRASH_RANK="1", CRASH_SIGNAL=str(int(signal.SIGKILL))),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in ended.stderr


def start(launcher: list[str], *arguments: str | Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launcher, PROGRAMS["pretrain_gpt"], *arguments],
        cwd=folder,
        env=program_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(run: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (run / "log.jsonl").exists() or (run / "log.jsonl").read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was logged"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    flags = [*ENDLESS, "--data-path", corpus, "--use-torch-fsdp2", "--num-workers", "1"]
    flags += ["--async-save", "--save-interval", "1"] if number == signal.SIGTERM else []
    process = start(LAUNCH, *flags, "--save", run, folder=tmp_path)
    wait_for_steps(run, process)
    if number == signal.SIGINT:  # as a terminal does on Ctrl-C: to launcher, ranks and readers of data alike
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    saved = json.loads((run / "log.jsonl").read_text().splitlines()[-1])["step"]
    assert (run / "latest").read_text().strip() == f"iter_{saved:07d}"
    assert f"stopped by {number.name} after iteration {saved}" in out
    assert f"--load {run}" in out
    assert (run / "loss.png").exists()


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(TORCHRUN, *ENDLESS, "--data-path", corpus, "--save", run, folder=tmp_path)
    wait_for_steps(run, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert "stopped by SIGTERM" in out
    assert (run / "latest").exists()


@pytest.mark.long
def test_the_slurm_script_starts_ranks_that_find_each_other(corpus: Path, tmp_path: Path) -> None:
    """Two tasks under a stand-in for srun."""
    tools = tmp_path / "tools"
    tools.mkdir()
    task = 'SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NTASKS=2 "$@" & pids+=($!)'
    wait = "for p in ${pids[@]}; do wait $p || exit; done"
    srun = f"#!/bin/bash\nshift; pids=()\nfor r in 0 1; do {task}; done\n{wait}\n"
    for name, text in (("srun", srun), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = program_environment(PYTHON=sys.executable, SLURM_JOB_NODELIST="x", SLURM_JOB_ID=str(os.getpid()))
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    ended = subprocess.run(
        [REPOSITORY / "examples/gpt/slurm.sh", *TINY, "--train-iters", "2", "--data-path", corpus]
        + ["--save", tmp_path / "a run"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "a run" / "iter_0000002").glob("rank_*.bin"))) == 2
