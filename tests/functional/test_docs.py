"""The pages of `docs`: their programs run, their links lead somewhere, their names exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.unit._program import REPOSITORY, programs_in, run_scripts

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
DECISIONS = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))


def _is_whole(program: str) -> bool:
    return program.lstrip().startswith("import ")


def test_the_programs_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    whole = [program for page in PAGES for program in programs_in(page) if _is_whole(program)]
    without = {"README", "functional-cases", "mutations", "coming-from-megatron-lm"}  # whose script needs a model
    without |= {"megatron-signatures", "megatron-pretrain-script", "runs", "contract", "silent-errors", "compositions"}
    without |= {"wrappers", "what-it-costs", "fully-sharded", "reproducible", "torchtitan", "gpu-first"}
    assert len(whole) == len([page for page in PAGES if page.stem not in without]) + 1  # checkpoints.md has two
    ended = run_scripts(whole, tmp_path)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("page", PAGES + DECISIONS, ids=lambda page: page.stem)
def test_code_compiles_and_links_lead_somewhere(page: Path) -> None:
    for program in programs_in(page):
        ast.parse(program)
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert not anchor or anchor in [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings]


def test_every_page_is_in_the_order_of_reading() -> None:
    linked = set(re.findall(r"\]\(([a-z-]+\.md)\)", (REPOSITORY / "docs" / "README.md").read_text()))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def test_the_table_of_decisions_has_each_record() -> None:
    linked = re.findall(r"\]\(([^)]+\.md)\)", DECISIONS[-1].read_text())
    assert DECISIONS[-1].name == "README.md" and linked == [page.name for page in DECISIONS[:-1]]
    parts = ["**Why it came up.**", "**Decision.**", "**What it costs.**", "**What would change it.**"]
    assert all(re.findall(r"^\*\*[^*]+\*\*", page.read_text(), re.MULTILINE) == parts for page in DECISIONS[:-1])


def test_links_of_the_first_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", (REPOSITORY / "README.md").read_text())
    assert len(links) >= 10 and all((REPOSITORY / link).exists() for link in links)


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
