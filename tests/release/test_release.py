"""A wheel made of a source distribution is that of the checkout, and works alone, next to another project's `core`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import core
from tests._bare_python import bare_python
from tests.release.__main__ import check_ready
from tests.release.distributions import (
    REPOSITORY,
    ReleaseError,
    build,
    check_files,
    copy_tracked,
    files_of,
    metadata_of,
    run,
    version_of,
)
from tests.release.installed import check_installed

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".git").exists() or find_spec("build") is None or find_spec("twine") is None,
    reason="needs git, and the extra release",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The copy of the tracked files, the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("release")
    root = copy_tracked(folder / "checkout")
    return root, *build(root, folder / "dist", "--no-isolation")


def test_the_wheel_is_that_of_the_checkout(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    root, _, wheel = built
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(root)])
    assert files_of(tmp_path / wheel.name) == files_of(wheel)


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    root, _, wheel = built
    check_files(wheel, root)
    names = files_of(wheel).keys()
    assert {"core.py", "shardstack/py.typed", "shardstack/examples/gpt/pretrain_gpt.py"} <= names
    assert {"LICENSE", "NOTICE"} == {Path(name).name for name in names if "/licenses/" in name}
    changed = shutil.copytree(root / "core", tmp_path / "core") / "new_table.json"
    changed.write_text("{}")
    shutil.copytree(root / "examples", tmp_path / "examples")
    with pytest.raises(ReleaseError, match=r"shardstack/new_table\.json"):
        check_files(wheel, tmp_path)


def test_the_metadata_is_complete(built: tuple[Path, Path, Path]) -> None:
    _, source, wheel = built
    metadata = metadata_of(wheel)
    assert metadata["Version"] == core.__version__ == version_of()
    assert metadata["Author"] == "the shardstack authors" and metadata["License-Expression"] == "Apache-2.0"
    links = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert links.keys() == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert "Typing :: Typed" in metadata.get_all("Classifier") and set(metadata.get_all("Provides-Extra")) >= {"train"}
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text(encoding="utf-8")
    run([sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)])


def test_the_wheel_works_next_to_another_core(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    wheel = built[2]
    python = bare_python(tmp_path / "environment", ("torch", "numpy", "filelock", "jinja2"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*install, str(wheel)])
    (tmp_path / "folder").mkdir()
    lines = check_installed(python, tmp_path / "folder", has_extras=False).splitlines()
    assert len(lines) == 5


def test_wrappers_that_disagree_stop_a_release(tmp_path: Path) -> None:
    command, folder = tmp_path / "shardstack", tmp_path / "folder"
    command.write_text("#!/bin/sh\nfor name in DDP ZeRO-1 ZeRO-2 ZeRO-3 FSDP2; do echo $name: norm of $name; done\n")
    command.chmod(0o755)
    folder.mkdir()
    with pytest.raises(ReleaseError, match="the wrappers do not agree"):
        check_installed(tmp_path / "python", folder, has_extras=False)


def _git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_release_is_refused_until_all_is_ready(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    _git(tmp_path, "init")
    changelog.write_text("## 0.2.0 - not released yet\n")
    with pytest.raises(ReleaseError, match=r"no heading `## 0\.2\.0 - YEAR"):
        check_ready("0.2.0", tmp_path)
    changelog.write_text("## 0.2.0 - 2027-01-31\n")
    with pytest.raises(ReleaseError, match=r"not committed:\n.*CHANGELOG"):
        check_ready("0.2.0", tmp_path)
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "release")
    check_ready("0.2.0", tmp_path)
    _git(tmp_path, "tag", "v0.2.0")
    with pytest.raises(ReleaseError, match="tagged already"):
        check_ready("0.2.0", tmp_path)


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased" and headings[1].startswith(f"{core.__version__} - ")


def test_addresses_of_the_project_are_those_of_its_metadata() -> None:
    home, site = PROJECT["urls"]["Repository"], PROJECT["urls"]["Documentation"]
    owner = home.removeprefix("https://github.com/")
    assert all(url.startswith((home, site)) for url in PROJECT["urls"].values())
    names = ("CITATION.cff", "CODE_OF_CONDUCT.md", "README.md", "SECURITY.md", "mkdocs.yml")
    files = [*(REPOSITORY / name for name in names), *(REPOSITORY / ".github").rglob("*.yml")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    address = re.compile(r"https://[\w.]*github[\w.]*/[\w./-]*shardstack[^\s)]*")
    found = {name: address.findall(text) for name, text in texts.items()}
    raw = f"https://raw.githubusercontent.com/{owner}"
    assert sum(map(len, found.values())) > 30
    assert [url for urls in found.values() for url in urls if not url.startswith((home, site, raw))] == []
    citation = yaml.safe_load(texts["CITATION.cff"])
    assert (citation["repository-code"], citation["url"], citation["license"]) == (home, site, PROJECT["license"])


def test_forms_and_workflows_name_what_exists() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("[bfq]*.yml")]
    assert len(forms) == 3
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in form["body"])
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    flows = [yaml.safe_load(path.read_text()) for path in (REPOSITORY / ".github/workflows").glob("*.yml")]
    steps = [step["run"] for flow in flows for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {".ci/run", "make docs", "make release TAG=no"} == set(steps)
    assert {"docs", "release"} <= targets
    (check,) = (flow for flow in flows if flow["name"] == "check")
    pythons = check["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert all(f"Programming Language :: Python :: {version}" in PROJECT["classifiers"] for version in pythons)


def test_hooks_run_the_programs_of_make_check() -> None:
    (repo,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert repo["repo"] == "local" and [entry.split(" --")[0] for entry in entries] == [
        ".venv/bin/ruff format",
        ".venv/bin/ruff check",
    ]
