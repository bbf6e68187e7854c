"""Ranks that are lost in the midst of a run: the others keep their processes, and no bit and no step is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional._forked_launcher import ForkedLauncher
from tests.functional._program import LIMIT_S, PROGRAMS, REPOSITORY, TINY, program_environment, run_program

PROGRAM = REPOSITORY / "tests" / "functional" / "_lost_rank.py"
ITERATIONS = 5
FLAGS = (
    *TINY[:-2],
    *("--eval-iters", "0", "--train-iters", str(ITERATIONS), "--global-batch-size", "8", "--hidden-dropout", "0.1"),
    *("--reproducible-across-ranks", "--log-weights-hash", "1"),
)
ZERO1, ZERO3 = ("--use-distributed-optimizer",), ("--data-parallel-sharding-strategy", "optim_grads_params")
FSDP2 = ("--use-torch-fsdp2",)


def _run(
    folder: Path,
    corpus: Path,
    ranks: int,
    policy: str,
    lose: str,
    *flags: str,
    limit_s: float = 600.0,
    is_forked: bool = False,
):
    """Runs the example under the launcher. Returns its hashes of weights by iteration, its log and what it wrote."""
    once = folder.with_suffix(".once")
    once.mkdir()
    command = ["--nproc-per-node", str(ranks), "--on-lost-rank", policy, "--lost-rank-timeout", str(limit_s)]
    command += [str(PROGRAM), *FLAGS, *flags, "--data-path", str(corpus), "--save", str(folder)]
    status, written = _launch(command, once.parent, is_forked, LOSE=lose, LOSE_ONCE=str(once))
    assert status == 0, written[-4000:]
    assert len(list(once.iterdir())) == len(lose.split(","))
    return _hashes(folder), [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], written


def _launch(command: list[str], folder: Path, is_forked: bool, **environment: str) -> tuple[int | None, str]:
    """Returns the launcher's exit status and what it and its ranks wrote to stderr."""
    if is_forked:
        launcher = ForkedLauncher(command, folder, **environment)
        _, written = launcher.communicate(LIMIT_S)
        return launcher.returncode, written
    ended = subprocess.run(
        [sys.executable, "-m", "core.training.launch", *command],
        env=program_environment(**environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return ended.returncode, ended.stderr


def _hashes(folder: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    hashes = {line["step"]: line["weights_hash"] for line in lines if "weights_hash" in line}
    assert list(hashes) == list(range(1, ITERATIONS + 1))
    return hashes


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("whole")
    ended = run_program("pretrain_gpt", *FLAGS, "--data-path", corpus, "--save", folder / "run", folder=folder)
    assert ended.status == 0, ended.err
    return _hashes(folder / "run")


CASES = {
    "ZeRO-1, killed in backward, 4 to 2 ranks": (4, "shrink", "2:3:backward:kill", ZERO1, "rank 2 was ended by SIG"),
    "FSDP2, rank 0 killed in forward, replaced": (2, "replace", "0:3:forward:kill", FSDP2, "rank 0 was ended by SIG"),
}
MORE_CASES = {
    "DDP, killed in a reduction": (2, "replace", "1:2:reduction:kill", (), "rank 1 was ended by SIGKILL"),
    "ZeRO-3, killed in the update": (4, "shrink", "3:4:update:kill", ZERO3, "going on with 2 of 3 ranks"),
    "ZeRO-3, killed while it copies": (2, "replace", "1:3:copy:kill", ZERO3, "rank 1 was ended by SIGKILL"),
    "FSDP2, 4 to 2 ranks": (4, "shrink", "0:3:forward:kill", FSDP2, "going on with 2 of 3 ranks"),
    "two at once": (4, "replace", "1:4:backward:kill,3:4:backward:kill", ZERO1, "takes its place"),
    "in a save": (2, "replace", "0:4:save:kill", (*ZERO1, "--save-interval", "2"), "rank 0 was ended by SIGKILL"),
    "in a recovery": (2, "replace", "1:3:backward:kill,0:3:recovery:kill", ZERO1, "rank 0 was ended by SIGKILL"),
}


@pytest.mark.parametrize(("ranks", "policy", "lose", "flags", "said"), CASES.values(), ids=CASES)
def test_a_lost_rank_changes_no_bit(undisturbed, corpus, tmp_path, ranks, policy, lose, flags, said):
    hashes, lines, written = _run(tmp_path / "run", corpus, ranks, policy, lose, *flags, is_forked=True)
    assert hashes == undisturbed
    assert said in written
    recovered = [line for line in lines if "lost" in line]
    assert recovered and all(line["recovery_s"] > 0 for line in recovered)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "policy", "lose", "flags", "said"), MORE_CASES.values(), ids=MORE_CASES)
def test_ranks_lost_at_any_moment_change_no_bit(undisturbed, corpus, tmp_path, ranks, policy, lose, flags, said):
    hashes, _, written = _run(tmp_path / "run", corpus, ranks, policy, lose, *flags)
    assert hashes == undisturbed
    assert said in written


STILL = {
    "hangs": (2, "replace", "1:3:forward:hang", ZERO1, "rank 1 held up the others"),
    "is stopped": (4, "shrink", "2:3:backward:stop", ZERO3, "rank 2 did not answer"),
}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "policy", "lose", "flags", "said"), STILL.values(), ids=STILL)
def test_a_rank_that_does_not_go_on_is_killed(undisturbed, corpus, tmp_path, ranks, policy, lose, flags, said):
    hashes, _, written = _run(tmp_path / "run", corpus, ranks, policy, lose, *flags, limit_s=20.0)
    assert hashes == undisturbed
    assert said in written


def test_shrinking_below_what_settings_allow_is_one_line(corpus, tmp_path):
    command = ["--nproc-per-node", "2", "--on-lost-rank", "shrink", str(PROGRAMS["pretrain_gpt"]), *FLAGS[:-3]]
    command += ["--data-path", str(corpus), "--save", str(tmp_path / "run"), "--tensor-model-parallel-size", "2"]
    status, written = _launch(command, tmp_path, is_forked=True)
    assert status == 2
    assert written.startswith("error: --on-lost-rank is shrink, and these settings run on no fewer than 2 ranks")
    assert written.count("\n") == 1
