"""`make gpu-first`: its stages, limits, folder and archive, and the way back, with a GPU that is pretended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests._bare_python import bare_python, wheels_of
from tests.functional._golden import METRICS, Golden, write_golden
from tests.gpu_first import __main__ as program
from tests.gpu_first import assumptions, results, take_in, wheels
from tests.gpu_first import commands as running
from tests.gpu_first.checkout import FILES, FOLDERS, NOTE, Checkout, hash_of_sources, leave_note, this_checkout
from tests.gpu_first.commands import Outcome, living_members, reason_for_no_test, run_command
from tests.gpu_first.results import Machine, Results, golden_arguments
from tests.gpu_first.stages import MOST_MINUTES, NEW_CASES, Command, Stage, stages
from tests.gpu_machine import CARRIED, PURE, ROOT, UNPACKED, gpu_files
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


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(program, "reason_against", lambda: None)
    monkeypatch.setattr(program, "unpack_missing", list)
    monkeypatch.setattr(program, "this_machine", lambda environment: Machine(GPU, {"torch": "2.11", "driver": "580"}))
    yield monkeypatch
    signal.signal(signal.SIGTERM, handler)


def _packed(folder: Path) -> dict[str, bytes]:
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def test_a_command_that_fails_or_hangs_does_not_end_the_others(
    pretended: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended.setattr(program, "stages", lambda: [Stage("one", "", (FAILS, HANGS)), Stage("two", "", (PASSES,))])
    assert program.main(["--results", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("==== one, fails (failed); one, hangs (timed out)\n")
    packed = _packed(tmp_path / "new")
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
        "import sys; from tests.unit import test_gpu_first as t; from tests.gpu_first import __main__ as program\n"
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
    of_one = json.loads(_packed(tmp_path / "new")["results.json"])["stages"]["one"]
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


# ---- packages that travel


def _wheel(folder: Path, name: str, content: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\n")


def test_carried_wheels_fill_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "carried_and_missing", "VALUE = 3")
    _wheel(tmp_path / CARRIED, "numpy", "raise AssertionError")
    assert wheels.unpack_missing(tmp_path) == ["carried_and_missing-1.0"]
    assert [path.name for path in (tmp_path / UNPACKED).iterdir() if "dist-info" not in path.name] == [
        "carried_and_missing"
    ]
    assert __import__("carried_and_missing").VALUE == 3
    assert wheels.unpack_missing(tmp_path) == []


def test_a_damaged_wheel_is_named_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "carried_and_damaged", "VALUE = 3")
    _wheel(tmp_path / CARRIED, "carried_and_whole", "VALUE = 4")
    (damaged,) = (tmp_path / CARRIED).glob("*damaged*")
    damaged.write_bytes(damaged.read_bytes()[:60])
    assert wheels.unpack_missing(tmp_path) == ["carried_and_whole-1.0"]
    ended = capsys.readouterr()
    assert ended.err.startswith(f"warning: {damaged} cannot be unpacked: ") and ended.err.count("\n") == 1


def test_a_failed_download_leaves_the_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "old", "")
    monkeypatch.setattr(wheels, "PURE", ("--no-such-option",))
    with pytest.raises(SystemExit, match=r"error: pip ended with status 2; \.gpu-wheels is as it was"):
        wheels.main(str(ROOT / "constraints.txt"))
    assert [path.name for path in (tmp_path / CARRIED).iterdir()] == ["old-1.0-py3-none-any.whl"]


# ---- the way back


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with one case, and one commit."""
    root = tmp_path / "checkout"
    for name, text in {
        "core/a.py": "A = 1\n",
        "tests/functional/cases/ddp/config.yaml": "kind: regular\n",
        "benchmarks/results/old.txt": "old\n",
        ".gitignore": f"{CARRIED}/\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _git(root, "init", "-q")
    _commit(root)
    return root


def _git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def _commit(root: Path, message: str = "a commit") -> None:
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "--allow-empty", "-m", message)


def _golden(device: str, loss: float = 1.0) -> Golden:
    return Golden(device, "2.11", 1, 1, 2, 1, {metric: [loss, 0.5] for metric in METRICS})


REPORT = {"device": "NVIDIA H200", "rows": []}


def _run_of(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the archive of a run in a checkout, which wrote golden values and a report of throughput."""
    monkeypatch.setattr(results, "CASES", root / "tests" / "functional" / "cases")
    run = Results(folder, this_checkout(root), Machine("NVIDIA H200", {"driver": "580"}))
    run.write("a line\n")
    golden = results.CASES / "ddp" / "golden_values_nvidia-h200.json"
    write_golden(_golden("nvidia-h200"), golden)
    (run.parts / "gpt_throughput-cuda-1b-ddp-2026-11-26.json").write_text(json.dumps(REPORT | {"folder": folder.name}))
    (run.parts / "profile").mkdir()
    (run.parts / "profile" / "trace.json.gz").write_bytes(b"a trace")
    run.add("speed", "rows", Outcome("passed", 1.0))
    golden.unlink()
    return run.archive


def test_results_come_home(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _run_of(repository, tmp_path / "run", monkeypatch)
    lines = take_in.take_in(archive, repository)
    golden = repository / "tests/functional/cases/ddp/golden_values_nvidia-h200.json"
    assert json.loads(golden.read_text())["values"]["loss"] == [1.0, 0.5]
    written = {path.name for path in (repository / "benchmarks" / "results").iterdir()} - {"old.txt"}
    day = json.loads(_packed(tmp_path / "run")["results.json"])["date"][:10]
    summary = f"gpu_first-nvidia-h200-{day}"
    assert written == {f"{summary}.json", f"{summary}.txt", "gpt_throughput-cuda-1b-ddp-2026-11-26.json"}
    assert len(lines) == 4 and any(line.endswith("golden_values_nvidia-h200.json: new") for line in lines)
    assert take_in.take_in(archive, repository) and len(list((repository / "benchmarks" / "results").iterdir())) == 4
    # A second archive of the same code is taken in after a commit of these results; nothing is overwritten.
    _commit(repository)
    second = _run_of(repository, tmp_path / "again", monkeypatch)
    take_in.take_in(second, repository)
    assert (repository / "benchmarks" / "results" / f"{summary}-2.json").exists()
    take_in.take_in(archive, repository)
    reports = (repository / "benchmarks" / "results").glob("gpt_throughput-*.json")
    assert sorted(json.loads(path.read_text())["folder"] for path in reports) == ["again", "run"]


def test_reports_of_one_name_are_all_kept(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpt_throughput-cuda-1b-ddp-2026-11-26"
    folder = repository / "benchmarks" / "results"
    (folder / f"{name}.json").write_text("{}")
    archive = _run_of(repository, tmp_path / "run", monkeypatch)
    second = {f"parts/{name}-2.json": json.dumps(REPORT | {"folder": "second"}).encode()}
    take_in.take_in(_repacked(archive, second), repository)
    texts = [path.read_text() for path in folder.glob(f"{name}*")]
    assert sorted(json.loads(text).get("folder", "") for text in texts) == ["", "run", "second"]


def test_a_noted_commit_may_have_later_ones_of_other_files(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy without a repository has the note of an earlier commit with the same sources."""
    leave_note(repository)
    (repository / "README.md").write_text("words\n")
    _commit(repository)
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
    archive = _run_of(copy, tmp_path / "run", monkeypatch)
    take_in.take_in(archive, repository)
    (repository / "core" / "a.py").write_text("A = 2\n")
    with pytest.raises(take_in.ArchiveError, match="files differ"):
        take_in.take_in(archive, repository)


@pytest.mark.parametrize("what", ["code", "code, committed", "words", "another history"])
def test_results_of_another_commit_are_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    archive = _run_of(repository, tmp_path / "run", monkeypatch)
    (repository / ("README.md" if what == "words" else "core/a.py")).write_text("A = 2\n")
    if what != "code":
        _commit(repository)
    if what == "another history":
        (repository / "core/a.py").write_text("A = 1\n")
        shutil.rmtree(repository / ".git")
        _git(repository, "init", "-q")
        _commit(repository, "of another history")
    with pytest.raises(take_in.ArchiveError, match=r"these results are of commit .*, and this checkout is .*commit"):
        take_in.take_in(archive, repository)
    assert [path.name for path in (repository / "benchmarks" / "results").iterdir()] == ["old.txt"]


def test_a_copy_without_git_knows_its_commit(repository: Path, tmp_path: Path) -> None:
    leave_note(repository)
    here, copy = this_checkout(repository), tmp_path / "copy"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
    assert here.commit and this_checkout(copy) == replace(here, is_noted=True)
    (copy / "core" / "a.py").write_text("A = 2\n")
    assert this_checkout(copy).commit is None and this_checkout(copy).sources != here.sources
    (repository / "core" / "a.py").write_text("A = 2\n")
    assert this_checkout(repository) == Checkout(f"{here.commit}+", this_checkout(copy).sources)


def _repacked(archive: Path, change: dict[str, bytes | None]) -> Path:
    """Returns a copy of an archive with other contents of some files."""
    with tarfile.open(archive) as opened:
        contents = {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]
    folder = archive.parent / "repacked"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in (contents | change).items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    changed = archive.with_name("changed.tar.gz")
    with tarfile.open(changed, "w:gz") as new:
        for path in folder.rglob("*"):
            if path.is_file():
                new.add(path, path.relative_to(folder).as_posix())
    return changed


def _merged(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _merged(value, change[name]) if isinstance(change.get(name), dict) else change.get(name, value)
        for name, value in document.items()
    }


def _other_golden(tmp_path: Path, device: str) -> bytes:
    write_golden(_golden(device), tmp_path / "golden.json")
    return (tmp_path / "golden.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results.json": None}, "has no results.json"),
        ({"log.txt": None}, "has no log.txt"),
        ({"results.json": b"{"}, "results.json is no JSON"),
        ({"results.json": b"[" * 100_000}, "results.json is no JSON"),
        ({"results.json": b"{}"}, "results.json is not as this command writes it"),
        ({"results.json": {"commit": "--output=/tmp/written"}}, "is not as this command writes it"),
        ({"results.json": {"commit": "HEAD"}}, "is not as this command writes it"),
        ({"results.json": {"date": "2026-11-26/../../x"}}, "is not as this command writes it"),
        ({"results.json": {"device": "../"}}, "is not as this command writes it"),
        ({"results.json": {"device": "x" * 300}}, "is not as this command writes it"),
        ({"results.json": {"device": "NVIDIA H100"}}, "is of device "),
        ({"golden/ddp/golden_values_nvidia-h200.json": b"{}"}, "schema is None and this suite reads 1"),
        (
            {"golden/ddp/golden_values_nvidia-h200.json": "nvidia-h100"},
            "is of device 'nvidia-h100', and the run was on nvidia-h200",
        ),
        (
            {"golden/ddp/golden_values_nvidia-h100.json": "nvidia-h100"},
            "is of device 'nvidia-h100', and the run was on nvidia-h200",
        ),
        ({"golden/new/golden_values_nvidia-h200.json": "nvidia-h200"}, "there is no case new here"),
        ({"golden/ddp/golden_values_nvidia-h200.json": {"values": {"loss": [1.0, float("nan")]}}}, "finite numbers"),
        ({"golden/ddp/golden_values_nvidia-h200.json": {"values": {"loss": ["1", "2"]}}}, "is not of schema 1"),
        ({"golden/ddp/golden_values_nvidia-h200.json": {"end": 10**30}}, "is not of schema 1"),
        ({"parts/gpt_throughput-x.json": b"[]"}, "has a list in the place of an object"),
        ({"parts/gpt_throughput-x.json": b'{"device": "CPU"}'}, "is of device 'CPU', and the run was on"),
    ],
)
def test_a_damaged_archive_is_refused_whole(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    archive = _run_of(repository, tmp_path / "run", monkeypatch)
    new: dict[str, bytes | None] = {}
    for name, content in change.items():
        if isinstance(content, str):
            new[name] = _other_golden(tmp_path, content)
        elif isinstance(content, dict):  # changes of a document
            new[name] = json.dumps(_merged(json.loads(_packed(tmp_path / "run")[name]), content)).encode()
        else:
            new[name] = content
    with pytest.raises(take_in.ArchiveError, match=message) as caught:
        take_in.take_in(_repacked(archive, new), repository)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (repository / "benchmarks" / "results").iterdir()] == ["old.txt"]


def test_what_is_no_archive_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.tar.gz").write_text("text")
    for arguments in ([], [""], [str(tmp_path / "none.tar.gz")], [str(tmp_path / "text.tar.gz")]):
        assert take_in.main(arguments) == 2
        ended = capsys.readouterr()
        assert ended.out == "" and ended.err.startswith("error: ") and ended.err.count("\n") == 1


# ---- imitated with a pretended GPU, in a Python with the packages of a usual CUDA image, in a copy without git


@pytest.fixture(scope="module")
def lent_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a Python and a copy of the files, with what `make gpu-wheels` adds."""
    python = bare_python(tmp_path_factory.mktemp("bare"))
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    shutil.copy(Path(__file__).with_name("_pretended_gpu.py"), site / "sitecustomize.py")
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    for name in (*FILES, *FOLDERS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "golden_values_[!c]*"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    wheels_of(PURE, copy / CARRIED)
    note = Checkout("0" * 40, hash_of_sources(copy))
    (copy / CARRIED / NOTE).write_text(json.dumps(asdict(note)))
    return python, copy


def _imitate(
    machine: tuple[Path, Path], folder: Path, *only: str, **environment: str
) -> tuple[int, str, dict[str, dict[str, str]]]:
    """Runs stages; returns the status, the log, and the status of each command."""
    python, copy = machine
    ended = subprocess.run(
        [python, "-m", "tests.gpu_first", "--results", folder, "--only", *only],
        cwd=copy,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PRETENDED_GPU": GPU, **environment},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (folder / "results.json").exists(), ended.stderr
    summary = json.loads((folder / "results.json").read_text())
    assert (summary["device"], summary["commit"], summary["is_noted"]) == (GPU, "0" * 40, True)
    outcomes = {
        stage: {name: outcome["status"] for name, outcome in commands.items()}
        for stage, commands in summary["stages"].items()
    }
    return ended.returncode, (folder / "log.txt").read_text(), outcomes


def test_a_lent_machine_collects_tests_of_kernels(lent_machine: tuple[Path, Path], tmp_path: Path) -> None:
    status, log, outcomes = _imitate(lent_machine, tmp_path / "new", "kernels", PYTEST_ADDOPTS="--collect-only")
    assert outcomes == {"kernels": {"kernels": "failed", "lanes": "failed"}} and status == 1  # no test ran
    assert log.count("tests collected") == 2 and log.count("no test ran: 0 of 0 were skipped") == 2, log
    assert "error" not in log.lower() and "unpacked " in log and "cyclopts" in log, log


@pytest.mark.long
def test_stages_pass_on_a_lent_machine(lent_machine: tuple[Path, Path], tmp_path: Path) -> None:
    """All but `large`, whose models no CPU trains in minutes. Tests that use CUDA are left out."""
    few = {"FEW": "on_gpus[ddp-tied-fp32],on_gpus[moe]", "PYTEST_ADDOPTS": "-p sitecustomize"}
    stages = ("speed", "comparison", "golden", "new")
    _, log, outcomes = _imitate(lent_machine, tmp_path / "new", *stages, **few)
    assert outcomes["speed"] == {"assumptions": "passed", "first rows": "passed"}, log
    assert (
        outcomes["comparison"].keys() == {"against", "other rows"} and outcomes["comparison"]["other rows"] == "passed"
    )
    assert outcomes["golden"] == {"golden values": "passed"}, log
    assert outcomes["new"] == {"new code": "failed", "new cases": "passed", "no rows": "failed"}, log
    assert log.count("failed, status 5") == 2  # pytest's, where no test is left
    packed = _packed(tmp_path / "new")
    reports = [json.loads(content) for name, content in packed.items() if "/gpt_throughput" in name]
    assert all(report["finished"] and report["versions"]["commit"] == "0" * 40 for report in reports)
    assert sorted(len(report["rows"]) for report in reports) == [0, 2, 4]
    (compared,) = [report["ratios"] for report in reports if report["ratios"]]
    assert compared[0]["limit"] == 1.01  # which tiny layers on a CPU exceed
    cases = {name.split("/")[1] for name in packed if name.startswith("golden/")}
    assert cases == {"ddp-tied-fp32", "moe"}
