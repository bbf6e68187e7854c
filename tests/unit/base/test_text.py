"""Bytes and ranks as text for messages."""

import pytest

from core.base.text import aligned, bytes_cell, choices, nearest, rank_list, readable_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (2**62, "4 EiB")],
)
def test_bytes_have_three_digits_and_the_unit_that_fits(num_bytes, text):
    assert readable_bytes(num_bytes) == text


def test_no_bytes_are_a_dash_in_a_table():
    assert (bytes_cell(0), bytes_cell(1536)) == ("-", "1.5 KiB")


def test_columns_are_aligned_on_their_side():
    assert aligned([("a", "b", "c"), ("aaa", "", "ccc")], 2) == ["a    b    c", "aaa     ccc"]
    assert aligned([("a", "b"), ("aa", "")], 2) == ["a   b", "aa"] and aligned([]) == []


def test_many_ranks_are_counted():
    assert rank_list([3]) == "rank 3"
    assert rank_list([0, 2]) == "ranks 0, 2"
    assert rank_list(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_choices_name_the_nearest_first():
    assert choices("otpim", ["optim", "no_shard"]) == "did you mean 'optim'? it takes one of optim, no_shard"
    assert choices("FULL", ["full"]).startswith("did you mean 'full'?")
    assert choices("zzz", ["a", "b"]) == "it takes one of a, b"
    assert choices("x", [str(n) for n in range(30)]).endswith(" 19 and 10 more")
    assert choices("x", []) == "there is none to choose from"


def test_the_nearest_name_may_be_cut_off():
    names = ["--nnodes", "--nproc-per-node", "--num-layers"]
    assert nearest("--nprocs", names) == "did you mean --nproc-per-node?"  # as a whole it is nearer to --nnodes
    assert nearest("--layers", names) == nearest("--num-layerz", names) == "did you mean --num-layers?"
    assert nearest("--quick", names) == "see --help" and nearest("x", [], "drop it") == "drop it"
