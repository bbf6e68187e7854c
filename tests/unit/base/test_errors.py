"""The tree of exceptions, which users catch by its nodes and which is drawn once, and the checks that raise them."""

import math
import re
from types import SimpleNamespace

import pytest

from core.base import errors
from core.base.errors import ConfigError, ParallelConfigError, check_range, out_of_choices, out_of_range

TREE = {
    "ShardstackError": (Exception,),
    "ConfigError": (errors.ShardstackError, ValueError),
    "ParallelConfigError": (errors.ConfigError,),
    "GradSyncError": (errors.ConfigError, AssertionError),
    "ParallelStateError": (errors.ShardstackError, RuntimeError, AssertionError),
    "WrapError": (errors.ShardstackError, ValueError),
    "DataError": (errors.ShardstackError, ValueError),
    "OptimizerError": (errors.ShardstackError, RuntimeError),
    "UnitError": (errors.ShardstackError, RuntimeError),
    "OutOfStepError": (errors.ShardstackError, RuntimeError),
    "MemoryLimitError": (errors.ShardstackError, RuntimeError),
    "CheckpointError": (errors.ShardstackError, RuntimeError),
    "WeightsError": (errors.ShardstackError, RuntimeError),
    "MissingExtraError": (errors.ShardstackError, ImportError),
}


def test_the_tree() -> None:
    found = {
        name: thing.__bases__
        for name, thing in vars(errors).items()
        if getattr(thing, "__module__", "") == errors.__name__ and isinstance(thing, type)
    }
    assert found == TREE


def test_the_drawing_is_the_tree() -> None:
    drawn = re.findall(r"^ {4}([ │├└─]*)(\w+Error)(?: \(([\w, ]+)\))?", errors.__doc__ or "", re.MULTILINE)
    parents: list[str] = []
    found = {}
    for lead, name, builtins in drawn:
        depth = len(lead) // 4
        parents[depth:] = [name]
        found[name] = ([parents[depth - 1]] if depth else ["Exception"]) + (builtins.split(", ") if builtins else [])
    assert found == {name: [base.__name__ for base in bases] for name, bases in TREE.items()}


def test_a_missing_extra_names_what_to_install() -> None:
    with pytest.raises(
        ImportError, match=r"^the progress bar needs the package 'tqdm': pip install 'shardstack\[train\]'$"
    ):
        raise errors.MissingExtraError("tqdm", "train", "the progress bar")


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
    assert list(out_of_choices(settings, a=("y", "z"), c=("y",))) == ["a is 'x'; it takes one of y, z"]
    assert list(out_of_choices(settings, True, a=("y",), b=("y",))) == ["a is 'x'; it takes None or one of y"]
    assert list(out_of_choices(settings, b=("y",))) == ["b is None; it takes one of y"]
