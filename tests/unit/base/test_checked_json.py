"""What of JSON is taken for a value of a type, and what a message says of the rest."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from core.base.checked_json import as_json, checked, decode
from core.base.files import BoundsError


@dataclass(frozen=True)
class Inner:
    at: tuple[int, bool]


@dataclass(frozen=True)
class Other:
    text: str
    kind = "another"


@dataclass(frozen=True)
class Whole:
    count: Annotated[int, range(4)]
    share: Annotated[float, lambda share: share < 1, "below 1"]
    names: list[Annotated[str, {"a", "b"}]]
    inner: Inner | Other
    table: dict[str, int]
    rest: Any = None


WHOLE = Whole(3, 0.5, ["a", "b"], Inner((1, True)), {"x": 1}, [None, {}])


def _line(message: Any) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("message", [WHOLE, Other("x")])
def test_what_is_written_is_read(message: Any):
    assert decode(_line(as_json(message)), Whole | Other) == message


def test_a_type_alone_needs_no_kind():
    assert checked({"text": "x"}, Other) == Other("x")
    assert checked([1, True], Annotated[list[int | bool], lambda found: len(found) == 2]) == [1, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 4}, r"has 4 for Whole\.count, which takes int in range\(0, 4\)"),
        ({"count": True}, r"has True for Whole\.count"),
        ({"count": 1.0}, r"has 1\.0 for Whole\.count"),
        ({"share": 1}, r"has 1 for Whole\.share, which takes float below 1|has 1\.0 for Whole\.share, .* below 1"),
        ({"share": math.inf}, r"has inf for Whole\.share"),
        ({"names": ["c"]}, r"has 'c' for Whole\.names, which takes str in "),
        ({"names": "a"}, r"has 'a' for Whole\.names"),
        ({"inner": {"kind": "Inner", "at": [1]}}, r"has \[1\] for Inner\.at"),
        ({"inner": {"at": [1, True]}}, "is none of Inner, Other"),
        ({"inner": {"kind": "Other", "text": "x"}}, "is none of Inner, Other"),
        ({"inner": {"kind": "another", "text": "\x1b[2J"}}, r"for Other\.text"),
        ({"inner": {"kind": "another", "text": "x" * 5000}}, r"for Other\.text"),
        ({"table": {"x": "1"}}, r"has '1' for Whole\.table"),
        ({"table": {"\n": 1}}, r"for Whole\.table"),
        ({"more": 1}, r"has other fields than a Whole \(count, share, names, inner, table, rest\)"),
        ({"kind": 7}, "is none of Whole, Other"),
    ],
)
def test_anything_else_is_refused_by_its_field(change: dict[str, Any], message: str):
    with pytest.raises(BoundsError, match=message) as caught:
        decode(_line(as_json(WHOLE) | change), Whole | Other)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("line", [b"", b"\xff", b"{", b"[" * 5000, b"9" * 5000, b"1e999"])
def test_what_is_no_json_is_no_message(line: bytes):
    with pytest.raises(BoundsError, match=r"is no message|is none of"):
        decode(line, Whole | Other)


def test_a_kind_that_is_not_its_own_is_refused():
    with pytest.raises(BoundsError, match="other fields than a Other"):
        checked({"kind": "Whole", "text": "x"}, Other)
