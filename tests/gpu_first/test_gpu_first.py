"""`make gpu-first`: its stages, and how it runs them: limits, interrupts, the folder and the archive, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu_first import __main__ as program
from tests.gpu_first import assumptions, results
from tests.gpu_first import commands as running
from tests.gpu_first.checkout import hash_of_sources
from tests.gpu_first.commands import living_members, reason_for_no_test, run_command
from tests.gpu_first.results import Machine, golden_arguments
from tests.gpu_first.stages import MOST_MINUTES, NEW_CASES, Command, Stage, stages
from tests.gpu_first.take_in import read_archive
from tests.gpu_machine import ROOT, gpu_files
from tests.unit._benchmark_modules import load

GPU = "Pretended GPU"


# ---- the stages


def test_stages_are_short_and_the_first_has_the_first_number() -> None:
    all_of_them = stages()
    assert [stage.name for stage in all_of_them] == ["speed", "kernels", "comparison", "golden", "new", "large"]
    assert all(0 < stage.minutes <= MOST_MINUTES for stage in all_of_them)
    assumed, rows = all_of_them[0].commands
    assert assumed.minutes <= 1 and {"plain", "loss in parts"} <= set(rows.arguments)
    names = [command.name for stage in all_of_them for command in stage.commands]
    assert len(names) == len(set(names))


def test_the_page_has_the_limits_of_stages() -> None:
    page = (ROOT / "docs" / "gpu-first.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) min \|", page, re.MULTILINE)
    assert [(name, float(minutes)) for name, minutes in rows] == [(stage.name, stage.minutes) for stage in stages()]
    assert f"at most {sum(stage.minutes for stage in stages()):g} minutes" in page
    patience = sum(seconds for _, seconds in running.SIGNALS)
    assert f"at most {patience:g} seconds later" in page.replace("\n", " ")


def test_every_gpu_test_is_in_one_command() -> None:
    found: dict[str, list[str]] = {}
    for command in (command for stage in stages() for command in stage.commands if "pytest" in command.arguments):
        arguments = command.arguments
        which = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
        files = [part for part in arguments if part.startswith("tests/")]
        assert files, command
        for file in files:
            found.setdefault(file, []).append(which)
    assert found.keys() == set(gpu_files())
    for file, which in found.items():
        left_out = [one.removeprefix("not (").removesuffix(")") for one in which if one.startswith("not (")]
        selected = [one for one in which if not one.startswith("not (")]
        is_split = file.endswith(("test_cases.py", "test_expert_kernels.py"))  # others have no test that is left out
        assert selected == (left_out if is_split else [""] if not left_out else []), file
    assert all((results.CASES / case / "config.yaml").is_file() for case in NEW_CASES)


def test_golden_values_are_compared_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "CASES", tmp_path)
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "golden_values_cpu.json").touch()
    assert golden_arguments("nvidia-h200", update=False) == ("--write-missing-golden",)
    (tmp_path / "case" / "golden_values_nvidia-h200.json").touch()
    assert golden_arguments("nvidia-h200", update=False) == ("--write-missing-golden",)
    with pytest.raises(ValueError, match="golden values are of nvidia-h200, and this GPU is nvidia-h100;"):
        golden_arguments("nvidia-h100", update=False)
    assert golden_arguments("nvidia-h100", update=True) == ("--update-golden",)


def test_the_launch_that_waits_is_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.1, 1.0, 1.1, 2.0, 9.0])
    monkeypatch.setattr(assumptions.time, "monotonic", lambda: next(times))
    assert assumptions.first_launch_that_waits(lambda: None, 3) == 2


def test_the_benchmark_takes_the_arguments_of_stages() -> None:
    throughput = load("gpt_throughput")
    commands = [command.arguments[1:] for stage in stages() for command in stage.commands if _is_speed(command)]
    asked = [throughput.parse(list(arguments)) for arguments in commands]
    assert len(asked) == 6 and all(one.results for one in asked)
    assert {one.preset for one in asked if one.micro_batches == 8} == {"1b", "3b", "4b"}
    (compared,) = [one for one in asked if one.against]
    assert (compared.wrapper, compared.against) in throughput.LIMITS


def _is_speed(command: Command) -> bool:
    return command.arguments[0] == "benchmarks/gpt_throughput.py"


# ---- running them


def _python(code: str) -> tuple[str, ...]:
    return ("-c", code)


FORKS = (
    "import os, sys, time\n"
    "print('group', os.getpgrp(), flush=True)\n"
    "child = os.fork()\n"
    "print('parent' if child else 'child', flush=True)\n"
    "try: time.sleep(600)\n"
    "except KeyboardInterrupt: print('heard', flush=True); raise\n"
)
"""Prints its process group, and sleeps with a child."""
PASSES = Command("passes", 1, _python("print('a line')"))
FAILS = Command("fails", 1, _python("import sys; print('to stderr', file=sys.stderr); sys.exit(3)"))
HANGS = Command("hangs", 0.2, _python(FORKS))


def _archive_of(folder: Path) -> Path:
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(program, "reason_against", lambda: None)
    monkeypatch.setattr(program, "unpack_missing", list)
    monkeypatch.setattr(program, "this_machine", lambda environment: Machine(GPU, {"torch": "2.11", "driver": "580"}))
    yield monkeypatch
    signal.signal(signal.SIGTERM, handler)


def test_a_command_that_fails_or_hangs_does_not_end_the_others(
    pretended: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended.setattr(program, "stages", lambda: [Stage("one", "", (FAILS, HANGS)), Stage("two", "", (PASSES,))])
    assert program.main(["--results", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("==== one, fails (failed); one, hangs (timed out)\n")
    packed = read_archive(_archive_of(tmp_path / "new"))
    summary = json.loads(packed["results.json"])
    assert (summary["device"], summary["driver"], summary["sources"]) == (GPU, "580", hash_of_sources())
    of_one = summary["stages"]["one"]
    assert of_one["fails"]["status"] == "failed" and of_one["fails"]["why"] == "status 3"
    assert of_one["hangs"]["status"] == "timed out" and of_one["hangs"]["why"] == "its limit of 0.2 min is over"
    assert summary["stages"]["two"]["passes"]["status"] == "passed"
    log = (tmp_path / "new" / "log.txt").read_text()
    assert {"a line", "to stderr"} <= set(log.splitlines()) and log in printed
    assert log.count("heard") == 2  # the command and its child, whose lines may mix
    assert living_members(_group_of(log)) == []


def _group_of(log: str) -> int:
    (line,) = [line for line in log.splitlines() if line.startswith("group ")]
    return int(line.removeprefix("group "))


def test_only_stages_that_are_named_run(pretended: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = [Stage(name, "", (replace(PASSES, name=name),)) for name in ("one", "two", "three")]
    pretended.setattr(program, "stages", lambda: known)
    assert program.main(["--only", "3", "one", "--results", str(tmp_path / "new")]) == 0
    assert list(json.loads((tmp_path / "new" / "results.json").read_text())["stages"]) == ["one", "three"]


@pytest.mark.parametrize("ends_by", ["a signal", "a kill"])
def test_an_interrupted_run_has_its_archive(ends_by: str, tmp_path: Path) -> None:
    code = (
        "import sys; from tests.gpu_first import __main__ as program, test_gpu_first as t\n"
        "program.reason_against = lambda: None; program.unpack_missing = lambda: []\n"
        "program.this_machine = lambda environment: t.Machine(t.GPU, {})\n"
        "program.stages = lambda: [t.Stage('one', '', (t.PASSES, t.replace(t.HANGS, minutes=5)))]\n"
        "sys.exit(program.main(['--results', sys.argv[1]]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "new"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        printed = ""
        while not ("parent" in printed and "child" in printed):
            line = run.stdout.readline()
            assert line, printed
            printed += line
        assert len(living_members(_group_of(printed))) == 2
        run.send_signal(signal.SIGTERM if ends_by == "a signal" else signal.SIGKILL)
        run.stdout.read()
    if ends_by == "a signal":
        assert run.returncode == 130 and living_members(_group_of(printed)) == []
    else:  # the kernel ends the command, soon; its child hears nothing
        for _ in range(600):
            if len(living_members(_group_of(printed))) == 1:
                break
            time.sleep(0.1)
        else:
            pytest.fail("the command goes on")
        os.killpg(_group_of(printed), signal.SIGKILL)
    of_one = json.loads(read_archive(_archive_of(tmp_path / "new"))["results.json"])["stages"]["one"]
    assert of_one["passes"]["status"] == "passed"
    assert [one["status"] for one in of_one.values()] == ["passed"] + ["interrupted"] * (ends_by == "a signal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "{old}"], "error: the results folder {old} exists; give --results the name of a new one\n"),
        (
            ["--results", "{old}/file/new"],
            "the results folder {old}/file/new cannot be made: Not a directory; give --results another name\n",
        ),
        (["--only", "sped"], "there is no stage 'sped'; there are speed, kernels, comparison, golden, new, large\n"),
    ],
)
def test_bad_input_is_one_line(
    pretended: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "file").touch()
    try:
        status = program.main([part.format(old=tmp_path) for part in arguments])
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    ended = capsys.readouterr()
    assert status == 2 and ended.err.endswith(message.format(old=tmp_path)) and ended.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "reason_against", lambda: "there is no GPU here")
    assert program.main([]) == 2
    assert capsys.readouterr() == ("", "error: there is no GPU here\n")


def test_missing_packages_are_named_at_once(
    pretended: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = replace(PASSES, name="needs both", needs=("cyclopts", "no_such_module", "xdist"))
    pretended.setattr(program, "stages", lambda: [Stage("bare", "", (PASSES,)), Stage("rich", "", (needs,))])
    pretended.setattr(
        program,
        "missing_packages",
        lambda modules: [name for name in modules if name in ("cyclopts", "no_such_module")],
    )
    line = "this Python lacks cyclopts, no_such_module, which needs both needs; docs/functional-cases.md"
    assert program.main(["--only", "rich", "--results", str(tmp_path / "a")]) == 2
    ended = capsys.readouterr()
    assert ended.err.startswith(f"error: {line}") and ended.err.endswith("stages that run without: bare\n")
    assert program.main(["--results", str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err.startswith(f"warning: {line}")
    of_rich = json.loads((tmp_path / "b" / "results.json").read_text())["stages"]["rich"]["needs both"]
    assert of_rich["status"] == "not run" and of_rich["why"] == "this Python lacks cyclopts, no_such_module"


def test_golden_values_of_another_gpu_are_one_line(
    pretended: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cases" / "case").mkdir(parents=True)
    (tmp_path / "cases" / "case" / "golden_values_nvidia-h200.json").touch()
    pretended.setattr(results, "CASES", tmp_path / "cases")
    golden = replace(PASSES, name="cases", is_golden=True)
    pretended.setattr(program, "stages", lambda: [Stage("golden", "", (golden, PASSES))])
    assert program.main(["--results", str(tmp_path / "a")]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "nvidia-h200" in line]
    assert lines == [
        "---- golden, cases: not run, golden values are of nvidia-h200, and this GPU is pretended-gpu; "
        "--update-golden writes its own next to them (0 s)"
    ]
    assert program.main(["--results", str(tmp_path / "b"), "--update-golden"]) == 0


@pytest.mark.parametrize(
    ("tests", "skipped", "why"),
    [(3, 2, ""), (2, 2, "no test ran: 2 of 2 were skipped"), (0, 0, "no test ran: 0 of 0")],
)
def test_a_report_of_skipped_tests_alone_shows_nothing(tmp_path: Path, tests: int, skipped: int, why: str) -> None:
    report = tmp_path / "report.xml"
    assert reason_for_no_test(report) == "it left no report of its tests"
    report.write_text(f'<testsuites><testsuite tests="{tests}" skipped="{skipped}"/></testsuites>')
    assert reason_for_no_test(report).startswith(why) and bool(reason_for_no_test(report)) is bool(why)


def test_a_process_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SIGNALS", [(number, 0.5) for number, _ in running.SIGNALS])
    code = (
        "import signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "print('deaf', flush=True); time.sleep(99)"
    )
    lines: list[str] = []
    outcome = run_command(["-c", code], 3.0, os.environ, lines.append)
    assert outcome.status == "timed out" and lines == ["deaf\n"]


def test_zombies_are_not_waited_for() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], preexec_fn=os.setpgrp)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert living_members(zombie.pid) == [] and living_members(os.getpgrp())
    zombie.wait()
