"""The tree of exceptions is public: users catch its nodes, and it is drawn once, at the top of the file."""

import re

import pytest

from core.base import errors

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
    found = {name: thing.__bases__ for name, thing in vars(errors).items() if isinstance(thing, type)}
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
