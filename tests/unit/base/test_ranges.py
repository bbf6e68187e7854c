"""One check and one wording for numbers out of their range."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from core.base.errors import ConfigError, ParallelConfigError
from core.base.ranges import check_range, out_of_choices, out_of_range


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"least": 0}, [0, 1e9, 10**400, None], [-1e-9, math.inf, -math.inf, math.nan]),
        ({"least": 1}, [1, None], [0, 0.5, math.inf]),
        ({"over": 0}, [1e-9, None], [0, -1, math.inf, math.nan]),
        ({"least": 0, "below": 1}, [0, 0.999], [1, -0.1, math.nan]),
        ({"over": 0, "most": 1}, [0.1, 1], [0, 1.1]),
    ],
)
def test_bounds_belong_to_the_range_or_not(bounds, inside, outside):
    for value in inside:
        assert not list(out_of_range(SimpleNamespace(x=value), "x", **bounds))
    for value in outside:
        assert list(out_of_range(SimpleNamespace(x=value), "x", **bounds))


def test_the_message_says_what_was_found_and_what_is_taken():
    settings = SimpleNamespace(a=-1, b=-2, c=3)
    assert list(out_of_range(settings, "a", "b", "c", least=0)) == [
        "a is -1; it takes zero or a positive number",
        "b is -2; it takes zero or a positive number",
    ]
    with pytest.raises(ConfigError, match=r"^a is -1; it takes a positive number$"):
        check_range(settings, "a", "b", least=1)
    with pytest.raises(ParallelConfigError, match=r"^c is 3; it takes 0 to 2$"):
        check_range(settings, "c", least=0, most=2, takes="0 to 2", error=ParallelConfigError)


def test_a_value_that_is_no_choice_is_named_with_the_choices():
    settings = SimpleNamespace(a="x", b=None, c="y")
    assert list(out_of_choices(settings, a=("y", "z"), c=("y",))) == ['a is \'x\'; it takes one of "y", "z"']
    assert list(out_of_choices(settings, True, a=("y",), b=("y",))) == ["a is 'x'; it takes None or one of \"y\""]
    assert list(out_of_choices(settings, b=("y",))) == ['b is None; it takes one of "y"']
