"""Rank arithmetic on documented examples; `test_getters.py` compares it with an oracle for every order."""

import pytest

from core.base.errors import ParallelConfigError
from core.process_groups.make_groups import parse_order, rank_groups


def _groups(kinds: str, order: str, **sizes: int) -> list[list[int]]:
    whole = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": 1} | sizes
    return rank_groups({token: whole[token] for token in parse_order(order, whole)}, kinds.split("-"))


def test_the_sequence_of_groups_and_of_ranks_is_megatrons() -> None:
    dp_groups = _groups("dp", "tp-dp-pp", tp=2, dp=3, pp=4)
    assert (dp_groups[0], dp_groups[1], dp_groups[7]) == ([0, 2, 4], [1, 3, 5], [19, 21, 23])
    assert _groups("dp", "tp-pp-dp", tp=2, dp=2, pp=2) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_documented_groups_of_eight_ranks() -> None:
    sizes = {"order": "tp-cp-ep-dp-pp", "tp": 2, "dp": 2, "pp": 2}
    assert _groups("tp", **sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _groups("dp", **sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert _groups("pp", **sizes) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert _groups("tp-dp", **sizes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _groups("dp-tp", **sizes) == _groups("tp-dp", **sizes)  # a set of kinds, not a sequence


def test_tokens_of_size_one_may_be_left_out_and_come_last() -> None:
    sizes = {"tp": 2, "dp": 2, "pp": 1, "cp": 1, "ep": 1}
    assert parse_order("DP-tp", sizes) == ["dp", "tp", "pp", "ep", "cp"]
    assert _groups("pp", "DP-tp", **sizes) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("tp-xp-dp", "unknown token 'xp'.*permutation of"),
        ("tp-dp-tp", "names 'tp' twice"),
        ("", "unknown token ''"),
        ("tp-dp", "leaves out 'pp', whose size is 2; add it"),
    ],
)
def test_what_does_not_fit_is_named(order: str, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        parse_order(order, {"tp": 2, "ep": 1, "dp": 2, "pp": 2, "cp": 1})
