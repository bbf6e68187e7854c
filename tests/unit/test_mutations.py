"""The faults of `make mutation` still fit the code that they are planted in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.mutation.__main__ import PAGE, write_table
from tests.mutation.faults import AREAS, MUTATIONS
from tests.mutation.mutation import Mutation
from tests.mutation.plant import REPOSITORY, file_of, mutated, source_of


def test_there_are_as_many_of_different_names_as_the_readme_says():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    stated = re.search(r"\| more than (\d+) faults planted in `core`", (REPOSITORY / "README.md").read_text())
    assert stated is not None and int(stated[1]) < len(MUTATIONS) <= int(stated[1]) + 20


def test_a_fault_is_in_the_file_of_what_it_changes():
    wrong = [m.name for area, faults in AREAS.items() for m in faults if not m.function.startswith(f"core.{area}.")]
    assert wrong == []


def test_a_fault_is_a_change_of_core_with_tests_to_notice():
    for mutation in MUTATIONS:
        assert mutated(mutation)
        for test in mutation.tests:
            path, _, name = test.partition("::")
            text = (REPOSITORY / path).read_text()
            assert not name or f"def {name.partition('[')[0]}(" in text, mutation.name


def test_what_notices_a_fault_is_not_of_the_long_set(request: pytest.FixtureRequest):
    """Planted faults are looked for in the quick set alone."""
    tests = {test for mutation in MUTATIONS for test in mutation.tests}
    items = request.session.items
    is_slow = [any(item.get_closest_marker(name) for name in ("long", "gpu")) for item in items]
    not_here = _not_among([item.nodeid for item, slow in zip(items, is_slow, strict=True) if not slow], tests)
    if not_here:  # this file runs by itself, or something is wrong
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not long and not gpu", *not_here]
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert _not_among(ended.stdout.splitlines(), not_here) == [], ended.stdout[-2000:]


def _not_among(collected: list[str], tests: Iterable[str]) -> list[str]:
    return sorted(t for t in tests if not any(c == t or c.startswith((f"{t}[", f"{t}::", f"{t}/")) for c in collected))


_MODULE = '''
def above():  # stays as it is
    return  1


class Sums:
    @staticmethod
    def total(values):
        """Adds values."""
        return sum(  # of this rank
            values
        ) / 2
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "sums.py").write_text(_MODULE)
    return tmp_path


def test_a_pattern_ignores_comments_docstrings_and_line_breaks(root):
    assert source_of("core.sums.Sums.total", root) == "@staticmethod\ndef total(values):\n    return sum(values) / 2"


def test_only_the_function_of_a_fault_changes(root):
    fault = Mutation("a fault", "core.sums.Sums.total", r" / 2$", "", ())
    above, _, _ = _MODULE.partition("    @staticmethod")
    assert mutated(fault, root) == above + "    @staticmethod\n    def total(values):\n        return sum(values)\n"
    (root / "core" / "sums").mkdir()
    (root / "core" / "sums.py").rename(root / "core" / "sums" / "__init__.py")
    assert file_of(fault, root).name == "__init__.py"


@pytest.mark.parametrize(
    ("function", "pattern", "message"),
    [
        ("core.sums.Sums.total", "/ 2", "a fault: the replacement '/ (2)' changes nothing"),
        ("core.sums.Sums.total", "no such code", "a fault: 'no such code' matches 0 times in core.sums.Sums.total; "),
        ("core.sums.Sums.total", "values", "a fault: 'values' matches 2 times"),
        ("core.sums.Sums.mean", "", "core.sums.Sums.mean: 'mean' is defined 0 times in sums.py"),
        ("core.sums.Sums", "", "core.sums.Sums is not a function"),
        ("core.products.total", "", "core.products.total is in no module"),
    ],
)
def test_a_fault_that_no_longer_fits_is_named(root, function, pattern, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mutated(Mutation("a fault", function, pattern, "/ (2)", ()), root)


def test_the_page_has_every_fault_with_the_test_that_caught_it(tmp_path, monkeypatch):
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        [f"| {mutation.name}", f"`{mutation.function.removeprefix('core.')}`"] for mutation in MUTATIONS
    ]
    for row in rows[2:]:
        path, _, name = row.rsplit("`", 2)[1].partition("::")
        assert f"def {name}(" in (REPOSITORY / "tests" / path).read_text(), row
    monkeypatch.setattr("tests.mutation.__main__.PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("above\n\n| fault | old\n")
    write_table({MUTATIONS[0]: "tests/unit/test_mutations.py::test_x[a/b]"})
    written = (tmp_path / "page.md").read_text().splitlines()
    assert written[0] == "above" and written[-1].endswith("| `unit/test_mutations.py::test_x` |")
