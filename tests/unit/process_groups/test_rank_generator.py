"""Rank arithmetic against its definition, for every order of the five kinds of parallelism."""

from itertools import combinations, permutations

import pytest

from core.base.errors import ParallelConfigError
from core.process_groups.rank_generator import RankGenerator
from tests.unit._ranks import Factorisation

ORDERS = ["-".join(tokens) for tokens in permutations(("tp", "cp", "ep", "dp", "pp"))]
SUBSETS = ["-".join(tokens) for n in (1, 2, 3, 5) for tokens in combinations(("tp", "cp", "ep", "dp", "pp"), n)]
SIZES = [
    {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 2},
    {"tp": 2, "cp": 2, "ep": 1, "dp": 2, "pp": 2},
    {"tp": 1, "cp": 1, "ep": 3, "dp": 2, "pp": 2},
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_every_order_and_every_set_of_kinds(sizes: dict[str, int]) -> None:
    for order in ORDERS:
        generator, expected = RankGenerator(**sizes, order=order), Factorisation(order, sizes)
        for kinds in SUBSETS:
            groups = generator.get_ranks(kinds)
            assert {tuple(group) for group in groups} == expected.table(kinds), (order, kinds)
            assert sum(map(len, groups)) == generator.world_size, (order, kinds)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-tp-pp-cp-ep", "pp-ep-dp-cp-tp"])
def test_a_world_of_64(order: str) -> None:
    sizes = {"tp": 4, "cp": 2, "ep": 1, "dp": 4, "pp": 2}
    generator, expected = RankGenerator(**sizes, order=order), Factorisation(order, sizes)
    assert generator.world_size == 64
    for kinds in SUBSETS:
        assert {tuple(group) for group in generator.get_ranks(kinds)} == expected.table(kinds), kinds


def test_the_sequence_of_groups_and_of_ranks_is_megatrons() -> None:
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=4, cp=1, order="tp-dp-pp")
    dp_groups = generator.get_ranks("dp")
    assert (dp_groups[0], dp_groups[1], dp_groups[7]) == ([0, 2, 4], [1, 3, 5], [19, 21, 23])
    assert RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-pp-dp").get_ranks("dp") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]


def test_the_documented_groups_of_eight_ranks() -> None:
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert generator.get_ranks("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert generator.get_ranks("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert generator.get_ranks("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert generator.get_ranks("tp-dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert generator.get_ranks("dp-tp") == generator.get_ranks("tp-dp")  # a set of kinds, not a sequence


def test_rank_offset_moves_every_rank() -> None:
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-dp", rank_offset=8)
    assert generator.get_ranks("tp") == [[8, 9], [10, 11]]
    assert generator.get_ranks("dp") == [[8, 10], [9, 11]]


def test_tokens_of_size_one_may_be_left_out_and_come_last() -> None:
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="DP-tp")
    assert generator.order == "dp-tp-pp-ep-cp"
    assert generator.get_ranks("pp") == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "tp-xp-dp"}, "unknown token 'xp'.*permutation of"),
        ({"order": "tp-dp-tp"}, "names 'tp' twice"),
        ({"order": ""}, "unknown token ''"),
        ({"order": "tp-dp", "pp": 2}, "leaves out 'pp', whose size is 2; add it"),
        ({"ep": 2, "cp": 2}, "ep is 2 and cp is 2; .*ep=1 for the dense layers and one with cp=1 for the experts"),
        ({"tp": 0}, "size of 'tp' is 0"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    arguments = {"tp": 2, "ep": 1, "dp": 2, "pp": 1, "cp": 1, "order": "tp-cp-ep-dp-pp"} | change
    with pytest.raises(ParallelConfigError, match=message):
        RankGenerator(**arguments)  # type: ignore[arg-type]


def test_an_unknown_kind_is_named() -> None:
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-dp")
    with pytest.raises(ParallelConfigError, match=r"names \['xp'\]; the kinds of parallelism are"):
        generator.get_ranks("tp-xp")
