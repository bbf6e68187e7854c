"""The site of `make docs`: it builds without a warning, and has a docstring for every public name."""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import core
from core.base.errors import MissingExtraError
from core.distributed.fully_sharded_data_parallel_config import FSDP2
from core.training.config import section_types
from tests.functional._browser import browser, problems_of
from tests.public_names import names_of, public_modules
from tests.unit._program import LIMIT_S, REPOSITORY, run_program

TABS = ("Get started", "How-to", "Concepts", "Reference", "Testing")


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def _is_documented(name: str, value: Any) -> bool:
    if inspect.isclass(value) or inspect.isroutine(value):  # the text that a dataclass gives itself is no docstring
        return bool(value.__doc__) and not value.__doc__.startswith(f"{value.__name__}(")
    if isinstance(value, types.ModuleType):
        return bool(value.__doc__)
    origins = [m for m in list(sys.modules.values()) if m.__name__.startswith("shardstack.") and name in vars(m)]
    return any(name in _documented_constants(inspect.getsource(module)) for module in origins)


def _documented_constants(source: str) -> set[str]:
    """Returns the names that a module assigns, with a docstring right below."""
    found = set()
    for statement, below in itertools.pairwise(ast.parse(source).body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_a_constants_docstring_is_the_one_right_below_it() -> None:
    assert _documented_constants('A = 1\nB: int = 2\n"""Of B."""\nC = 3\n') == {"B"}


@pytest.mark.parametrize("package", public_modules())
def test_every_public_name_has_a_docstring(package: str) -> None:
    module = _module(package)
    names = names_of(module)
    assert (names or hasattr(module, "__path__")) and module.__doc__  # a package may have its names in its modules
    assert [name for name in names if not _is_documented(name, getattr(module, name))] == []


def test_every_package_with_public_names_has_a_page() -> None:
    """But for those that only the library itself imports."""
    internal = {"shardstack.distributed.guards", "shardstack.distributed.plan", "shardstack.distributed.report"}
    internal |= {"shardstack.models.common.embeddings"}
    internal |= {"shardstack.training.config"}
    packages = {
        ".".join(("shardstack", *path.parent.relative_to(REPOSITORY / "core").parts))
        for path in (REPOSITORY / "core").rglob("__init__.py")
        if "__all__" in path.read_text()
    }
    assert packages - internal - set(public_modules()) == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, which builds without a warning."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "cyclopts"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("built") / "site"
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout + ended.stderr == ""
    return folder


class _Page(HTMLParser):
    """What a page of the site links to, and what it can be asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = [""]
        self.open: list[str] = []
        self.loose = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors += filter(None, [given.get("id"), given.get("name") if tag == "a" else None])
        self.links += filter(None, [given.get("href"), given.get("src")])
        if tag == "div":
            self.open.append(given.get("class") or "")
        self.loose += tag == "pre" and not any("highlight" in kind.split() for kind in self.open)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self.open.pop()


def test_every_page_of_docs_is_on_the_site(site: Path) -> None:
    pages = {path.parent.name for path in site.rglob("index.html")}
    assert pages >= {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {"README"}
    assert {"flags", "gpt", "CONTRIBUTING", *public_modules()} <= pages
    first = (site / "index.html").read_text()
    assert all(f">\n  {tab}\n" in re.sub(r" +\n", "\n", re.sub(r"\n\s+", "\n  ", first)) for tab in TABS)
    assert f"shardstack {core.__version__}" in first and "what-a-rank-holds.svg" in first


def test_each_benchmark_of_the_history_is_drawn(site: Path) -> None:
    page = (site / "benchmarks-over-time" / "index.html").read_text()
    lines = (REPOSITORY / "benchmarks" / "results" / "history.jsonl").read_text().splitlines()
    names = {json.loads(line)["benchmark"] for line in lines}
    assert names and all((site / "history" / f"{name}.svg").stat().st_size > 1000 for name in names)
    assert all(f'id="{name}"' in page and f"history/{name}.svg" in page for name in names)


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    pages = {path: _Page(path) for path in site.rglob("index.html")}
    assert len(pages) > 80
    for path, page in pages.items():
        for link in page.links:
            place, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", place):
                continue
            target = (path.parent / place).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(site)} links to {link}"
            assert target not in pages or anchor in pages[target].anchors, f"{path.relative_to(site)} links to {link}"
        assert not page.loose, f"{path.relative_to(site)} has a block of code that does not scroll"


def test_a_long_signature_has_one_argument_a_line(site: Path) -> None:
    shown = (site / "packages" / "shardstack.distributed" / "index.html").read_text()
    assert 'id="shardstack.distributed.wrap_model"' in shown
    signatures = re.findall(r'class="doc-signature.*?<code>(.*?)</pre>', shown, re.DOTALL)
    lines = [html.unescape(re.sub("<[^>]+>", "", text)).splitlines() for text in signatures]
    assert len(lines) > 20 and max(len(line) for text in lines for line in text) <= 110
    assert any("    module: Module," in text for text in lines)
    several = [line for text in lines for line in text[1:] if re.search(r", \w+: ", line)]
    assert all(len(line) <= 60 for line in several) and len(several) < len(lines) / 10


def test_private_types_are_not_in_the_reference(site: Path) -> None:
    """But for the base of wrappers, which is shown and has Megatron-LM's name, and what torch's method returns."""
    for page in (site / "packages").rglob("index.html"):
        text = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
        shown = re.findall(r"(?<![\w.])_[A-Z][a-z]\w+", html.unescape(re.sub("<[^>]+>", "", text)))
        assert set(shown) <= {"_BaseDataParallel", "_IncompatibleKeys"}, (
            f"{page.parent.name} shows {sorted(set(shown))}"
        )


def test_every_flag_is_on_the_page_of_flags(site: Path) -> None:
    shown = _Page(site / "flags" / "index.html").anchors
    fields = {field.name for kind in section_types(FSDP2).values() for field in dataclasses.fields(kind)}
    flags = run_program("pretrain_gpt", "--help", folder=site, COLUMNS="240").out
    first = set(re.findall(r"^│ (?:\* +)?--([\w-]+)", flags, re.MULTILINE)) - {"help"}
    assert len(first) > 150 and len(fields) > 150
    assert first - set(shown) == set()
    launcher = json.loads((REPOSITORY / "core/training/launch/flags.json").read_text())
    assert {f"shardstack.training.launch-{name.replace('_', '-')}" for name in launcher} <= set(shown)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("of_packages", [False, pytest.param(True, marks=pytest.mark.long)], ids=["pages", "packages"])
def test_a_browser_finds_neither_overflow_nor_broken_words(site: Path, of_packages: bool) -> None:
    """On a phone and on a desktop."""
    pages = [f"/{path.parent.relative_to(site)}/".replace("/./", "/") for path in site.rglob("index.html")]
    pages = [page for page in pages if page.startswith("/packages/") == of_packages]
    assert len(pages) > 30 and problems_of(site, pages, widths=(1280, 400), limit_s=LIMIT_S) == []
