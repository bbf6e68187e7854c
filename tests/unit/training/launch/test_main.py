"""The launcher with programs that need no torch; runs of ranks that talk are in tests/functional."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.training.launch.__main__ import main
from core.training.launch.generations import COPIES_FOLDER, copies_root, generations
from core.training.launch.link import LAUNCHER_FD
from core.training.launch.messages import Generation
from core.training.launch.processes import ECHO_S
from tests._forked import FORKED
from tests.unit._forked_launcher import ForkedLauncher

LIMIT_S = 300.0
"""Seconds in which what takes a moment happens on any machine."""

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


def test_a_launcher_in_a_rank_keeps_out_of_its_copies(program, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(COPIES_FOLDER, str(tmp_path))
    monkeypatch.setenv(LAUNCHER_FD, "0")
    text = f"open(sys.argv[1], 'w').write(os.environ[{COPIES_FOLDER!r}])"
    assert main([program(text), f"{tmp_path}/out"]) == 0
    folder = (tmp_path / "out").read_text()
    monkeypatch.setenv(COPIES_FOLDER, folder)
    with contextlib.ExitStack() as stack:  # of one generation, which is no launcher's
        assert [stack.enter_context(generation) for generation in generations()] == [Generation()]
    assert folder == "" and copies_root() is None


@pytest.mark.parametrize("number", [None, "", "x", "99999999999999999999", "0", "12345"])
def test_copies_without_a_launcher_are_refused(tmp_path, monkeypatch, number):
    monkeypatch.setenv(COPIES_FOLDER, str(tmp_path))
    monkeypatch.delenv(LAUNCHER_FD, raising=False)
    if number is not None:
        monkeypatch.setenv(LAUNCHER_FD, number)
    with pytest.raises(ConfigError, match=f"{COPIES_FOLDER} is set and {LAUNCHER_FD} is no socket to this process"):
        next(generations())


def test_the_first_failing_rank_decides_status_and_ends_others(program, capsys, monkeypatch):
    monkeypatch.setattr("core.training.launch.__main__.GRACE_S", 0.2)
    assert main(["--nproc-per-node", "2", program("sys.exit(7) if rank == 1 else time.sleep(600)")]) == 7
    assert capsys.readouterr().err == ""
    assert main(["--nproc-per-node", "2", program("os.kill(os.getpid(), 9) if rank else time.sleep(600)")]) == 137
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
def test_ranks_restart_after_a_failure_but_not_after_a_mistake(
    program, tmp_path, capsys, monkeypatch, failing, status, starts, said
):
    monkeypatch.setattr("core.training.launch.__main__.GRACE_S", LIMIT_S)
    script = program(f"{COUNTS}{failing}\ncount < 2 and rank == 0 and time.sleep(0.2)")
    ended = main(["--nproc-per-node", "2", "--max-restarts", "2", script, str(tmp_path / "starts")])
    assert ended == status
    counts = sorted((tmp_path / "starts").read_text().split())
    assert counts == sorted(f"{rank}{count}" for count in range(starts) for rank in (0, 1))
    err = capsys.readouterr().err
    assert said in err and err.count("starting them again, to continue from the last good checkpoint") == starts - 1


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Launched:
    """A launcher in a process of its own, whose ranks write their process ids into a folder."""

    def __init__(self, script: str, folder: Path, ranks: int = 2) -> None:
        command = ["--nproc-per-node", str(ranks), script, str(folder)]
        self.folder, self.num_ranks, self.said = folder, ranks, folder.with_suffix(".txt")
        folder.mkdir()
        self.process = FORKED.Process(target=_launch, args=(command, self.said))
        self.process.start()

    def ranks(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir()]

    def wait_for_ranks(self) -> list[int]:
        wait_until(lambda: len(self.ranks()) == self.num_ranks or not self.process.is_alive())
        assert self.process.is_alive()
        return self.ranks()

    def wait_for_its_ranks_to_end(self) -> None:
        wait_until(lambda: not _processes_with(str(self.folder)))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        self.process.join(LIMIT_S)
        return self.process.exitcode


def _launch(command: list[str], output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(main(command))


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

    def start(text: str, ranks: int = 2, handlers: str = "") -> Launched:
        note = "open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        whole = f"import signal\n{handlers}{note}{text}"
        started.append(Launched(program(whole), tmp_path / f"ranks{len(started)}", ranks))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.join()


REPORTS = """
from core.training.launch.entry import run_command
from core.training.launch.generations import generations
def enter(_):
    for generation in generations():
        with generation:
            os._exit(0)
def fork(_):
    if os.fork():
        os.wait()
        os._exit(0)
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("policy", "text", "status", "said"),
    [
        (
            "restart",
            "run_command(lambda _: os._exit(0) if rank else time.sleep(600))",
            1,
            "rank 1 ended with status 0 ",
        ),
        ("restart", "run_command(lambda _: os._exit(0))", 1, "ended with status 0 before its program had"),
        ("replace", "run_command(enter)", 1, "ended with status 0 before its program had"),
        ("restart", "run_command(fork)", 1, "ended with status 0 before its program had"),  # its fork says nothing
        ("restart", "run_command(lambda _: sys.exit(0))", 0, ""),  # as --help does
        ("replace", "run_command(lambda _: sys.exit(0))", 0, ""),
        ("restart", "sys.exit(0)", 0, ""),  # a program that says nothing is believed
        ("restart", "rank and sys.exit(0); time.sleep(1); sys.exit(7)", 7, "; rank 1 had ended with status 0 before"),
    ],
)
def test_success_is_said_by_each_rank(program, tmp_path, policy, text, status, said):
    launcher = ForkedLauncher(["--nproc-per-node", "2", "--on-lost-rank", policy, program(REPORTS + text)], tmp_path)
    _, err = launcher.communicate(LIMIT_S)
    assert launcher.returncode == status
    assert said in err and (said or not err)


def test_a_rank_that_starts_itself_again_speaks_on(program):
    again = "os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, 'AGAIN': '1'})"
    text = f"{REPORTS}run_command(lambda _: 'AGAIN' in os.environ or {again})"
    assert main([program(text)]) == 0


def test_a_rank_that_hangs_in_its_exit_is_named_and_ended(program, capfd, monkeypatch):
    monkeypatch.setattr("core.training.launch.supervisor._LEAVE_S", 0.3)
    script = program(f"{REPORTS}import atexit\nrank and atexit.register(time.sleep, 600)\nrun_command(lambda _: None)")
    assert main(["--nproc-per-node", "2", "--lost-rank-timeout", "2", script]) == 0
    err = capfd.readouterr().err
    assert (
        "rank 1 has not ended 0.3 s after rank 0 had" in err and "rank 1 hung in its exit for 2 s and was kill" in err
    )


def test_statuses_are_seen_where_a_parent_ignores_them(program):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert main([program("sys.exit(7)")]) == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


SPEAKS = """
from core.training.launch.entry import run_command
def speak(_):
    for stream in (sys.stdout, sys.stderr):
        print("x" * 100_000, file=stream, flush=True)
run_command(speak)
"""


@linux
@pytest.mark.parametrize(
    "to",
    [
        "2>&1 | exec true",
        ">&- 2>&- <&-",
        *(pytest.param(to, marks=pytest.mark.long) for to in ("2>&-", ">&-", "2>/dev/full", ">/dev/full")),
    ],
)
def test_output_that_is_gone_stops_nothing(program, tmp_path, to):
    command = f"{sys.executable} -m core.training.launch --nproc-per-node 2 {program(SPEAKS)}"
    shell = f"({command}; echo $? > {tmp_path}/status) {to}"
    subprocess.run(["bash", "-c", shell], cwd=Path(__file__).parents[4], timeout=LIMIT_S)
    assert (tmp_path / "status").read_text() == "0\n"


DEAF = "for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, lambda *_: open(sys.argv[1] + '.heard', 'w'))\n"
STAYS = "time.sleep(600)"


@linux
@pytest.mark.parametrize("handlers", ["", DEAF], ids=["plain", "deaf"])
def test_no_rank_outlives_a_launcher_that_is_killed(launched: Callable[..., Launched], handlers: str):
    run = launched(STAYS, handlers=handlers)
    stopped = run.wait_for_ranks()[0]
    os.kill(stopped, signal.SIGSTOP)
    run.process.kill()
    run.wait_for_its_ranks_to_end()


@linux
def test_no_rank_outlives_a_launcher_that_ends_while_starting(launched: Callable[..., Launched]):
    draw = random.Random(1)
    for number in (signal.SIGKILL, signal.SIGTERM) * 2:
        run = launched(STAYS, ranks=8)
        wait_until(lambda run=run: _processes_with(str(run.folder)))
        time.sleep(draw.uniform(0.0, 0.05))
        run.send_signal(number)
        assert run.wait() in (-number, 128 + number)
        run.wait_for_its_ranks_to_end()


@linux
def test_a_first_signal_is_waited_for(launched: Callable[..., Launched]):
    run = launched(STAYS, handlers="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(0)))\n")
    run.wait_for_ranks()
    run.send_signal(signal.SIGHUP)
    assert run.wait() == 0


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_ranks_that_do_not_answer(launched: Callable[..., Launched], number: signal.Signals):
    run = launched(STAYS, handlers=DEAF)
    os.kill(min(run.wait_for_ranks()), signal.SIGSTOP)
    run.send_signal(number)
    wait_until(run.folder.with_suffix(".heard").exists)  # by the other rank, and so by the launcher before
    time.sleep(2 * ECHO_S)
    assert run.process.is_alive()  # it waits for what may be a save
    run.send_signal(number)
    assert run.wait() == 128 + number
    assert f"ended at once by a second {number.name}, without saving" in run.said.read_text()
    run.wait_for_its_ranks_to_end()


@pytest.mark.long  # every module is compiled again
def test_the_launcher_runs_without_its_docstrings(program):
    command = [sys.executable, "-OO", "-m", "core.training.launch", program("sys.exit(0)")]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 0


def test_a_name_of_a_run_is_a_line(capsys):
    assert main(["--run-id", "a\nb", "x.py"]) == 2
    assert "--run-id is 'a\\nb'; give a short text of one line" in capsys.readouterr().err


def test_wrong_arguments_are_one_line(capsys):
    for arguments in (["--nproc-per-node", "0", "x.py"], [], ["--max-restarts", "-1", "x.py"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    said = capsys.readouterr().err
    assert "error: --nproc-per-node is 0; it takes 1 to 1024\n" in said and said.count("\n") == 3
