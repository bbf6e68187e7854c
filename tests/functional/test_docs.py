"""The pages of `docs`: their programs run, their links lead somewhere, their names exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional._links import anchors_of
from tests.unit._program import REPOSITORY, Ended, program_environment, programs_in, run_program

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
FRAGMENT = "# Fragment: "
"""How a block begins that does not run alone; test_docs_fragments.py runs those."""
PRELUDES = {"torchtitan": "from tests.unit.adapters._titan import import_models\n\nimport_models()\n"}
"""What lets a package be imported that needs more than the tests install."""
DECISIONS = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))


def _blocks() -> list[Any]:
    """Returns every Python block that says nothing of being a fragment, by its page and number."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "examples" / "gpt" / "README.md", *PAGES]
    numbered = [(page, *block) for page in pages for block in enumerate(programs_in(page))]
    return [
        pytest.param(program, id=f"{page.relative_to(REPOSITORY).with_suffix('')}-{number}")
        for page, number, program in numbered
        if not program.startswith(FRAGMENT)
    ]


@pytest.mark.parametrize("is_new", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "new"])
@pytest.mark.parametrize("program", _blocks())
def test_a_block_runs_as_printed(program: str, is_new: bool, tmp_path: Path) -> None:
    """In a process and an empty folder of its own, and says that it did.

    A forked process has modules of `core` already that a block could have forgotten to import; a new one has not.
    """
    packages = sorted(set(re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE)))
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    script, folder = tmp_path / "block.py", tmp_path / "empty"
    script.write_text("".join(PRELUDES.get(package, "") for package in packages) + program)
    folder.mkdir()
    if is_new:
        command = [sys.executable, script]
        result = subprocess.run(command, cwd=folder, env=program_environment(), capture_output=True, text=True)
        ended = Ended(result.returncode, result.stdout, result.stderr)
    else:
        ended = run_program(script, folder=folder)
    assert ended.status == 0, ended.err
    assert ended.out.strip(), "it prints nothing, so that nobody sees whether it worked"


@pytest.mark.parametrize("page", PAGES + DECISIONS, ids=lambda page: page.stem)
def test_code_compiles_and_links_lead_somewhere(page: Path) -> None:
    for program in programs_in(page):
        ast.parse(program)
    for link in re.findall(r"\]\((?!https:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target)


def test_the_overview_has_each_page_once() -> None:
    """The site's navigation is made of it."""
    found = re.findall(r"\[([^]]+)\]\(([a-z-]+\.md)\)", (REPOSITORY / "docs" / "README.md").read_text())
    assert max(len(title) for title, _ in found) <= 26
    linked = sorted(name for _, name in found)
    assert linked == [page.name for page in PAGES if page.name != "README.md"]


def test_the_table_of_decisions_has_each_record() -> None:
    linked = re.findall(r"\]\(([^)]+\.md)\)", DECISIONS[-1].read_text())
    assert DECISIONS[-1].name == "README.md" and linked == [page.name for page in DECISIONS[:-1]]
    parts = ["**Why it came up.**", "**Decision.**", "**What it costs.**", "**What would change it.**"]
    assert all(re.findall(r"^\*\*[^*]+\*\*", page.read_text(), re.MULTILINE) == parts for page in DECISIONS[:-1])


def test_every_import_of_this_package_that_a_page_shows_exists() -> None:
    shown = [line for page in PAGES for line in page.read_text().splitlines() if re.match(r"\+?from core", line)]
    assert len(shown) >= 10
    for line in shown:
        module, names = re.match(r"\+?from (\S+) import (.*)", line).groups()  # type: ignore[union-attr]
        for name in names.split(", "):
            found = importlib.import_module(module)
            assert hasattr(found, name.split(" as ")[0]) or importlib.import_module(f"{module}.{name}"), line


def test_megatrons_script_is_the_one_that_is_run() -> None:
    """Statement by statement, but for what is particular to a model or a machine without a GPU."""
    page = (REPOSITORY / "docs" / "coming-from-megatron-lm.md").read_text()
    tested = (REPOSITORY / "tests" / "functional" / "test_megatron_script.py").read_text()
    for call in ("zero_grad_buffer()", "optimizer.zero_grad()", "finalize_model_grads(model)", "broadcast_params()"):
        assert call in page and call in tested
    assert "torch.cuda.stream(" in page and "torch.cuda.stream(" in tested
