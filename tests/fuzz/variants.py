"""Hostile variants of an honest file, drawn by hypothesis: of its bytes, and of the values of its JSON."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

from hypothesis import strategies as st

_NUMBERS = [0, 1, -1, 2, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64]
_VALUES: list[Any] = [
    *_NUMBERS,
    *(None, True, False, "", "x", "../x", "/etc/passwd", "\u0000", "\ud800", 1.5, -0.0, 1e308, float("inf")),
    *([], {}, [[]], {"a": {}}, [0] * 100, "9" * 40, 10**30),
]
_WORDS = [b"\0", b"\xff" * 8, b"[" * 200, b'{"a":' * 200, b"\x85" * 200, b"r\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8]
_WORDS += [struct.pack("<Q", number) for number in _NUMBERS if 0 <= number < 2**64]
_WORDS += [b"cbuiltins\neval\n", b"cos\nsystem\n(S'true'\ntR.", b"cposix\nsystem\n"]


@st.composite
def variants(draw: st.DrawFn, honest: bytes) -> bytes:
    """Returns a hostile variant of a file."""
    if _is_json(honest) and draw(st.booleans()):
        return _of_json(draw, json.loads(honest))
    changed = bytearray(honest)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(changed) - 1, 0)))
        kind = draw(st.sampled_from(["bit", "byte", "word", "insert", "cut", "drop", "copy"]))
        if kind == "bit" and changed:
            changed[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and changed:
            changed[place] = draw(st.integers(0, 255))
        elif kind == "word":
            word = draw(st.sampled_from(_WORDS))
            changed[place : place + len(word)] = word
        elif kind == "insert":
            changed[place:place] = draw(st.sampled_from(_WORDS))
        elif kind == "cut":
            del changed[place:]
        elif kind == "drop":
            del changed[place : place + draw(st.integers(1, 64))]
        else:
            other = draw(st.integers(0, max(len(changed) - 1, 0)))
            length = draw(st.integers(1, 64))
            changed[place : place + length] = changed[other : other + length]
    return bytes(changed)


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), (dict, list))
    except ValueError:
        return False


def _of_json(draw: st.DrawFn, document: Any) -> bytes:
    """Replaces, removes or doubles one to three values, wherever they are nested."""
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["value", "value", "remove", "move"]))
        if kind == "value":
            holder[key] = copy.deepcopy(draw(st.sampled_from(_VALUES)))
        elif kind == "remove":
            del holder[key]
        else:
            other, name = places[draw(st.integers(0, len(places) - 1))]
            holder[key] = json.loads(json.dumps(other[name]))
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
