"""Ranks that are lost in the midst of a run: the others keep their processes, and no bit and no step is lost."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from core.training.launch import lines
from core.training.launch.nodes import MACHINE
from tests.unit._forked_launcher import ForkedLauncher
from tests.unit._program import LIMIT_S, PROGRAMS, REPOSITORY, TINY, log, programs_in, run_program

PROGRAM = REPOSITORY / "tests" / "functional" / "_lost_rank.py"
ITERATIONS = 5
FLAGS = (
    *TINY[:-2],
    *("--eval-iters", "0", "--train-iters", str(ITERATIONS), "--global-batch-size", "8", "--hidden-dropout", "0.1"),
    *("--reproducible-across-ranks", "--log-weights-hash", "1"),
)
ZERO1, ZERO3 = ("--use-distributed-optimizer",), ("--data-parallel-sharding-strategy", "optim_grads_params")
FSDP2, ZERO2 = ("--use-torch-fsdp2",), ("--data-parallel-sharding-strategy", "optim_grads")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2")
HYBRID, SAVES = ("--num-distributed-optimizer-instances", "2"), ("--save-interval", "2")
THIRDS = ("--copy-interval", "3")


def _run(
    folder: Path,
    corpus: Path,
    ranks: int,
    policy: str,
    lose: str,
    *flags: str,
    limit_s: float = 600.0,
    machines: int = 1,
    step_s: float = 0.0,
):
    """Runs the example under one launcher, or two that stand for two machines. Returns its hashes of weights by
    iteration, its log and what it wrote."""
    once = folder.with_suffix(".once")
    once.mkdir()
    command = [
        "--nproc-per-node",
        str(ranks // machines),
        "--on-lost-rank",
        policy,
        "--lost-rank-timeout",
        str(limit_s),
    ]
    program = [str(PROGRAM), *FLAGS, *flags, "--data-path", str(corpus), "--save", str(folder)]
    variables = {"LOSE": lose, "LOSE_ONCE": str(once), "STEP_S": str(step_s)}
    if machines == 1:
        status, written = _launch([*command, *program], once.parent, **variables)
    else:
        status, written = _launch_on_two(command, program, once.parent, variables)
    assert status == 0, written[-4000:]
    assert {entry.replace(":", "-") for entry in lose.split(",") if entry} <= {path.name for path in once.iterdir()}
    return _hashes(folder), log(folder), written


def _launch(command: list[str], folder: Path, **environment: str) -> tuple[int | None, str]:
    """Returns the launcher's exit status and what it and its ranks wrote to stderr."""
    launcher = ForkedLauncher(command, folder, **environment)
    _, written = launcher.communicate(LIMIT_S)
    return launcher.returncode, written


def _launch_on_two(
    command: list[str], program: list[str], folder: Path, variables: dict[str, str]
) -> tuple[int | None, str]:
    """Runs two launchers as two machines, and starts one again that is killed, the second one not where ranks are to
    go on without it. Returns the exit status of the first, and what both wrote."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        command = [*command, "--nnodes", "2", "--master-port", str(free.getsockname()[1])]

    def start(node: int) -> ForkedLauncher:
        (folder / f"node{node}").mkdir(exist_ok=True)
        return ForkedLauncher(
            [*command, "--node-rank", str(node), *program],
            folder / f"node{node}",
            _hurry if "freeze" in variables["LOSE"] else None,
            **variables,
            **{MACHINE: "ab"[node]},
        )

    launchers = [start(0), start(1)]
    while all(launcher.poll() is None for launcher in launchers):
        time.sleep(0.05)
    if "freeze" in variables["LOSE"]:
        launchers[1].send_signal(signal.SIGKILL)  # it is still frozen, at the end of the first one
    for node, launcher in enumerate(launchers):
        if launcher.poll() == -signal.SIGKILL and (node == 0 or "shrink" not in command):
            launchers[node] = start(node)  # its output is appended
    written = [launcher.communicate(LIMIT_S)[1] for launcher in launchers]
    return launchers[0].returncode, "".join(written)


def _hurry() -> None:
    lines.SILENCE_S, lines._BEAT_S = 3.0, 0.5


def _hashes(folder: Path) -> dict[int, str]:
    hashes = {line["step"]: line["weights_hash"] for line in log(folder) if "weights_hash" in line}
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
    "ZeRO-3, killed in the update": (4, "shrink", "3:4:update:kill", ZERO3, "going on with 2 of 3 ranks"),
    "FSDP2, 4 to 2 ranks": (4, "shrink", "0:3:forward:kill", FSDP2, "going on with 2 of 3 ranks"),
    "hybrid ZeRO-3": (4, "shrink", "3:3:backward:kill", (*ZERO3, *HYBRID), "going on with 2 of 3 ranks"),
    "copies of each third step": (2, "replace", "1:5:update:kill", (*SAVES, *THIRDS), "takes its place"),
    "copies are lost with it": (2, "replace", "1:4:backward:copies", (*ZERO1, *SAVES), "no complete copy is left in"),
    "copies are damaged": (2, "replace", "1:4:backward:damage", (*ZERO3, *SAVES), "copies in memory are damaged"),
}
MACHINES = {
    "ZeRO-1, replaced": (4, "replace", "b1:3:backward:machine", ZERO1, "node 1 was lost with its ranks"),
    "FSDP2, 4 to 2 ranks": (4, "shrink", "b0:4:forward:machine", FSDP2, "going on with 2 of 2 ranks"),
    "ZeRO-3, frozen": (2, "shrink", "b0:3:forward:freeze", ZERO3, "its launcher did not answer for 3 s"),
    "ZeRO-3, 2 to 1": (2, "shrink", "b0:3:copy:machine", ZERO3, "going on with 1 of 1 ranks"),
    "DDP, a rank killed": (2, "replace", "b0:3:update:kill", (), "rank 1 was ended by SIGKILL"),
    "ZeRO-3, the first machine": (4, "replace", "a1:4:backward:machine", ZERO3, "was lost, and all ranks with it"),
}
STILL = {
    "hangs": (2, "replace", "1:3:forward:hang", ZERO1, "rank 1 held up the others"),
    "is stopped": (4, "shrink", "2:3:backward:stop", ZERO3, "rank 2 did not answer"),
}


def _table():
    """Returns the cases of each table, with how a run is started."""
    for table, settings in ((CASES, {}), (MORE_CASES, {}), (MACHINES, {"machines": 2}), (STILL, {"limit_s": 20.0})):
        for name, case in table.items():
            marks = () if table is CASES else pytest.mark.long
            yield pytest.param(*case, settings, id=name, marks=marks)


@pytest.mark.parametrize(("ranks", "policy", "lose", "flags", "said", "settings"), [*_table()])
def test_a_lost_rank_changes_no_bit(undisturbed, corpus, tmp_path, ranks, policy, lose, flags, said, settings):
    hashes, lines, written = _run(tmp_path / "run", corpus, ranks, policy, lose, *flags, **settings)
    assert hashes == undisturbed
    assert said in written
    assert "no complete copy" not in written or "cop" in said
    recovered = [line["recovery_s"] > 0 for line in lines if "lost" in line]
    assert all(recovered) and (recovered or not said.startswith(("rank", "going on")))


WRAPPERS = {
    "DDP": (),
    "ZeRO-1": ZERO1,
    "ZeRO-2": ZERO2,
    "ZeRO-3": ZERO3,
    "FSDP2": FSDP2,
    "hybrid ZeRO-1": (*ZERO1, *HYBRID),
    "hybrid ZeRO-3": (*ZERO3, *HYBRID),
    "hybrid FSDP2": (*FSDP2, *HYBRID),
}
EVERY_MOMENT = (
    "2:1:forward:kill,1:2:backward:kill,3:2:reduction:kill,0:3:update:kill,1:3:copy:kill,"
    "0:4:save:kill,2:4:recovery:kill,1:5:forward:kill,3:5:forward:kill"  # rank 0 twice, and two at once
)


@pytest.mark.long
@pytest.mark.parametrize("flags", WRAPPERS.values(), ids=WRAPPERS)
def test_losses_at_every_moment_of_a_run_change_no_bit(undisturbed, corpus, tmp_path, flags):
    hashes, _, written = _run(tmp_path / "run", corpus, 4, "replace", EVERY_MOMENT, *flags, *SAVES)
    assert hashes == undisturbed
    assert "no complete copy" not in written


PLAIN = "--no-reproducible-across-ranks"
LAYOUTS = {
    "tensor parallel": (4, "replace", "1:3:backward:kill", (PLAIN, "--tensor-model-parallel-size", "2", *ZERO1)),
    "pipeline stages": (2, "replace", "1:3:backward:kill", (PLAIN, "--pipeline-model-parallel-size", "2")),
    "experts over ranks": (2, "replace", "1:3:backward:kill", (PLAIN, *EXPERTS, *ZERO1)),
    "8 ranks": (8, "shrink", "5:2:backward:kill,2:4:forward:kill", (*ZERO3, "--global-batch-size", "16")),
}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "policy", "lose", "flags"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_lost_rank_of_any_layout_changes_no_bit(corpus, tmp_path, ranks, policy, lose, flags):
    expected = _run(tmp_path / "whole", corpus, ranks, policy, "", *flags)[0]
    assert _run(tmp_path / "run", corpus, ranks, policy, lose, *flags)[0] == expected


MINUTE = "1:2:backward:minute"


@pytest.mark.long
def test_a_rank_stopped_for_a_minute_does_not_come_back(undisturbed, corpus, tmp_path):
    # Steps are so long that the others are at work when it is continued.
    hashes, lines, written = _run(tmp_path / "run", corpus, 2, "replace", MINUTE, *ZERO3, limit_s=30.0, step_s=14.0)
    assert hashes == undisturbed
    assert "rank 1 did not answer" in written
    assert len([line for line in lines if "lost" in line]) == 1
    assert (tmp_path / "run.once" / f"{MINUTE.replace(':', '-')}.continued").exists()


def test_shrinking_below_what_settings_allow_is_one_line(corpus, tmp_path):
    command = ["--nproc-per-node", "2", "--on-lost-rank", "shrink", str(PROGRAMS["pretrain_gpt"]), *FLAGS[:-3]]
    command += ["--data-path", str(corpus), "--save", str(tmp_path / "run"), "--tensor-model-parallel-size", "2"]
    status, written = _launch(command, tmp_path)
    assert status == 2
    assert written.startswith("error: --on-lost-rank is shrink, and these settings run on no fewer than 2 ranks")
    assert written.count("\n") == 1


LOSING = """
import os, pathlib, signal
from core.training.launch import generations as launched

def losing(step, seconds, report=launched.report_step):
    report(step, seconds)
    once = pathlib.Path(os.environ["LOSE_ONCE"])
    if step == 3 and os.environ["RANK"] == "1" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)

launched.report_step = losing
"""


@pytest.mark.long
def test_the_loop_on_the_page_loses_a_rank_and_no_bit(tmp_path):
    (program,) = programs_in(REPOSITORY / "docs" / "lost-ranks.md")
    (tmp_path / "program.py").write_text(LOSING + program)
    written = []
    for once in (tmp_path, tmp_path / "once"):  # one is there
        command = ["--nproc-per-node", "2", "--on-lost-rank", "replace", str(tmp_path / "program.py")]
        folder = tmp_path / f"{len(written)}"
        folder.mkdir()
        status, said = _launch(command, folder, LOSE_ONCE=str(once))
        assert status == 0, said
        assert ("rank 1 was ended by SIGKILL" in said) == (len(written) == 1)
        written.append((folder / "launcher.out").read_text())
    assert written[0] == written[1] and written[0].startswith("step 5: ")
