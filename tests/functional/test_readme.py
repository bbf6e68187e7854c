"""The first page: its program trains as it is pasted, and its picture shows every wrapper."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.functional._links import anchors_of
from tests.unit._program import REPOSITORY, programs_in, run_program

EXAMPLE = REPOSITORY / "examples" / "minimal.py"
README = REPOSITORY / "README.md"
PASTE = """
import code

console = code.InteractiveConsole()
for line in {lines}:
    console.push(line)
"""


def _links() -> dict[str, str]:
    """Returns the addresses of links that leave the page, by their paths in the repository."""
    return dict(re.findall(r"^\[([^]]+)\]: (\S+)$", README.read_text(), re.MULTILINE))


def test_every_link_leads_to_a_file_of_the_repository() -> None:
    """By an absolute address, so that it does on the package index too, where the page is the description."""
    home = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    raw = home.replace("//github.com/", "//raw.githubusercontent.com/")
    text, links = README.read_text(), _links()
    shown = re.findall(r"(!?)\[[^]]+\]\[([^]]+)\]", text)
    assert len(shown) >= 30 and {path for _, path in shown} == links.keys()
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == [], "a relative link"
    for kind, link in shown:
        assert links[link] == (f"{raw}/main/{link}" if kind else f"{home}/blob/main/{link}")
        path, _, anchor = link.partition("#")
        assert (REPOSITORY / path).is_file(), link
        assert not anchor or anchor in anchors_of(REPOSITORY / path), link


@pytest.mark.parametrize("page", [README, REPOSITORY / "docs" / "reproducible.md"], ids=lambda page: page.stem)
def test_the_program_prints_the_same_on_any_ranks(page: Path, tmp_path: Path) -> None:
    (program,) = programs_in(page)
    (tmp_path / "train.py").write_text(program)
    alone, launched = (run_program(tmp_path / "train.py", folder=tmp_path, ranks=ranks) for ranks in (0, 2))
    assert (alone.status, launched.status) == (0, 0), alone.err + launched.err
    assert len(alone.out.splitlines()) >= 3 and alone.out == launched.out
    assert "arning" not in alone.err + launched.err


def test_the_program_can_be_pasted_into_python(tmp_path: Path) -> None:
    """Which takes a block of statements as ended by an empty line alone."""
    (program,) = programs_in(README)
    (tmp_path / "paste.py").write_text(PASTE.format(lines=[*program.splitlines(), ""]))
    ended = run_program(tmp_path / "paste.py", folder=tmp_path)
    assert "Error" not in ended.err and ended.out.splitlines()[-1].startswith("step 4: gradient norm "), ended


def test_the_first_link_is_to_your_own_script() -> None:
    first = re.search(r"(?<!!)\[[^]]*\]\[([^]]+)\]", README.read_text())
    assert first is not None and first[1] == "docs/own-script.md"


def test_the_picture_shows_every_wrapper_of_the_table() -> None:
    picture = re.search(r"!\[([^]]*)\]\[docs/what-a-rank-holds.svg\]", README.read_text())
    assert picture is not None
    shown = dict(re.findall(r"(DDP|ZeRO-\d|FSDP2) (\d+)", picture[1]))
    named = {"DDP", *re.findall(r"\((ZeRO-\d|FSDP2)\)", README.read_text().partition("## Which wrapper")[2])}
    assert shown.keys() == named and len(named) == 5
    bars = (REPOSITORY / "docs" / "what-a-rank-holds.svg").read_text().partition('id="text_')[2]
    assert all(f"<!-- {name} -->" in bars for name in named)


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    ended = run_program(EXAMPLE, folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.err
    assert [line.split(":")[0] for line in ended.out.splitlines()] == ["step 0", "step 1", "step 2"]
