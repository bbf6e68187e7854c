"""Every public name shared with Megatron-LM takes what the table in the docs says."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.unit._signatures import PAGE, Row, difference, ours, parse, rows

ROWS = list(rows())
WITH_ABSENT_NAMES = (
    *("core.parallel_state", "core.tensor_parallel", "core.distributed", "core.optimizer", "core.utils"),
    *("core.models.gpt.gpt_layer_specs", "core.pipeline_parallel.schedules", "core.transformer"),
    "core.dist_checkpointing.mapping",
)


def test_the_table_is_read():
    assert len(ROWS) > 130 and len({row.name for row in ROWS}) == len(ROWS)
    assert sum(row.difference == "same" for row in ROWS) > 100


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_arguments_are_those_of_the_table(row: Row):
    assert difference(parse(row.theirs), ours(row.name)) == row.difference
    assert (row.difference == "same") != bool(row.reason), "what differs has a reason, and only that"


def test_differences_are_seen():
    theirs = parse("a, b=1, *, c=None")
    assert difference(theirs, parse("a, b=1, *, c=None")) == "same"
    assert difference(theirs, parse("b=1, a=0, *, c=2, d")) == "`+d`, `a=0`, `c=2`, `order`"
    assert difference(theirs, parse("a, *, b=1")) == "`-c`, `*b`"
    assert difference(theirs, parse("a, b, *, c=None")) == "`b required`"


def test_an_absent_name_says_what_the_page_says():
    shown = dict(re.findall(r"^\| `(core\.\S+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    found = {
        f"{module}.{name}": remedy
        for module in WITH_ABSENT_NAMES
        for name, remedy in importlib.import_module(module).__getattr__.remedies.items()
    }
    assert shown == found
    for path, remedy in found.items():
        module, _, name = path.rpartition(".")
        with pytest.raises(ImportError, match=re.escape(remedy)):
            getattr(importlib.import_module(module), name)
