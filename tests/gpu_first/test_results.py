"""`make gpu-results`: archives of runs come home to the checkout of the same commit, and to no other."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.functional._golden import METRICS, Golden, write_golden
from tests.gpu_first import results, take_in
from tests.gpu_first.checkout import Checkout, leave_note, this_checkout
from tests.gpu_first.commands import Outcome
from tests.gpu_first.results import Machine, Results
from tests.gpu_first.take_in import read_archive
from tests.gpu_machine import CARRIED


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
    day = json.loads(read_archive(archive)["results.json"])["date"][:10]
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
    contents = read_archive(archive)
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
            new[name] = json.dumps(_merged(json.loads(read_archive(archive)[name]), content)).encode()
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
