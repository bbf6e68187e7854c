"""The faults of `make mutation` still fit the code that they are planted in."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.__main__ import PAGE, REPOSITORY, mutated, write_table
from tests.mutation.faults import MUTATIONS, Mutation


def test_there_are_enough_of_different_names():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 25


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_is_a_change_of_core_with_tests_to_notice(mutation: Mutation):
    assert mutation.file.startswith("core/")
    sound = (REPOSITORY / mutation.file).read_text()
    wrong = mutated(mutation)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(sound))
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert (REPOSITORY / path).is_file()
        assert not name or f"def {name.partition('[')[0]}(" in (REPOSITORY / path).read_text()


def test_a_fault_that_no_longer_fits_is_named():
    stale = Mutation("a fault", "core/errors.py", "no such line", "another", ())
    with pytest.raises(ValueError, match=r"a fault: core/errors.py has 'no such line' 0 times"):
        mutated(stale)


def test_the_page_has_every_fault_with_the_test_that_caught_it(tmp_path, monkeypatch):
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == [mutation.name for mutation in MUTATIONS]
    for row in rows[2:]:
        path, _, name = row.rsplit("`", 2)[1].partition("::")
        assert f"def {name}(" in (REPOSITORY / "tests" / path).read_text(), row
    monkeypatch.setattr("tests.mutation.__main__.PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("above\n\n| fault | old\n")
    write_table({MUTATIONS[0]: "tests/unit/test_mutations.py::test_x[a/b]"})
    written = (tmp_path / "page.md").read_text().splitlines()
    assert written[0] == "above" and written[-1].endswith("| `unit/test_mutations.py::test_x` |")
