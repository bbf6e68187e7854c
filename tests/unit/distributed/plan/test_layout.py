"""The places of parameters in buffers, and the cuts of buffers."""

from __future__ import annotations

import itertools

import pytest

from core.distributed.plan.layout import PARAM_ALIGNMENT, default_bucket_size, lay_out

SIZES = [1, 70, 64, 200, 7, 129]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", [{}, {"bucket_size": 100}], ids=["whole", "size"])
def test_buckets_tile_the_buffer_and_divide_by_the_ranks(dp_size, cut):
    layouts = lay_out(SIZES, dp_size=dp_size, **cut)
    assert [index for layout in layouts for index in layout.members] == list(range(len(SIZES)))
    assert layouts[0].start == 0
    assert all(before.end == after.start for before, after in itertools.pairwise(layouts))
    for layout in layouts:
        assert layout.end > layout.start and (layout.end - layout.start) % (dp_size * PARAM_ALIGNMENT) == 0
        place = 0
        for index, (start, end) in zip(layout.members, layout.ranges, strict=True):
            assert start >= place and start % PARAM_ALIGNMENT == 0 and end - start == SIZES[index]
            place = end
        assert place <= layout.end - layout.start


def test_a_bucket_closes_once_it_is_full():
    assert [layout.members for layout in lay_out(SIZES, dp_size=2, bucket_size=100)] == [(0, 1, 2), (3,), (4, 5)]
    assert [layout.members for layout in lay_out(SIZES, dp_size=2, bucket_size=1)] == [(i,) for i in range(6)]
    assert len(lay_out(SIZES, dp_size=2)) == 1


def test_what_is_not_cut_has_no_gaps():
    layouts = lay_out(SIZES, dp_size=None, bucket_size=100)
    assert [layout.members for layout in layouts] == [(0, 1, 2), (3,), (4, 5)]
    assert [(layout.start, layout.end) for layout in layouts] == [(0, 135), (135, 335), (335, 471)]
    assert [layout.ranges for layout in layouts] == [((0, 1), (1, 71), (71, 135)), ((0, 200),), ((0, 7), (7, 136))]


def test_the_default_bucket_grows_with_the_ranks_that_share_it():
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


def test_some_parameters_have_a_bucket_of_their_own():
    assert [layout.members for layout in lay_out(SIZES, dp_size=2, alone=[0])] == [(0,), (1, 2, 3, 4, 5)]
    assert [layout.members for layout in lay_out(SIZES, dp_size=2, alone=[3])] == [(0, 1, 2), (3,), (4, 5)]


def test_gradients_computed_in_the_buffer_begin_aligned():
    first, second = lay_out([15, 9, 80], dp_size=None, bucket_size=20, aligned={2})
    assert (first.start, first.end, first.ranges) == (0, 24, ((0, 15), (15, 24)))
    begin = PARAM_ALIGNMENT - 24  # the buffer's 64th element, in a bucket that begins at its 24th
    assert (second.start, second.ranges) == (24, ((begin, begin + 80),))
