"""Scripts that know nothing of this library train with the bits of one process, and go on at another size."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.functional._own_scripts import OPTIMIZERS, SCRIPTS, WRAPPERS, Wrapped, plain_weights
from tests.unit._spawn import run_distributed

_STEPS = 4
_ALL = list(itertools.product(SCRIPTS, WRAPPERS))


def _differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def _compare_all(optimizers: list[str], others: bool) -> list[str]:
    """Returns every script and wrapper whose weights are not those of one process."""
    problems = []
    for (script, wrapper), number in zip(_ALL, itertools.count()):
        for optimizer in optimizers if others else [optimizers[number % len(optimizers)]]:
            wrapped = Wrapped(script, optimizer, wrapper)
            wrapped.train(range(_STEPS))
            if names := _differing(wrapped.weights(), plain_weights(script, optimizer, _STEPS)):
                problems.append(f"{script}, {optimizer}, {wrapper}: {', '.join(names)}")
    return problems


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, 4])
def test_scripts_have_the_bits_of_one_process(ranks: int) -> None:
    assert run_distributed(_compare_all, ranks, list(OPTIMIZERS), False) == [[]] * ranks


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_optimizer_has_the_bits_of_one_process(ranks: int) -> None:
    assert run_distributed(_compare_all, ranks, list(OPTIMIZERS), True) == [[]] * ranks


def _train_and_save(folder: str) -> None:
    for script, wrapper in _ALL:
        wrapped = Wrapped(script, "NAdam", wrapper)
        wrapped.train(range(2))
        wrapped.save(Path(folder, script, wrapper), 2)


def _load_and_go_on(folder: str) -> list[str]:
    problems = []
    for script in SCRIPTS:
        expected = plain_weights(script, "NAdam", _STEPS)
        for first, second in zip(WRAPPERS, [*list(WRAPPERS)[2:], *list(WRAPPERS)[:2]], strict=True):
            wrapped = Wrapped(script, "NAdam", second)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert wrapped.load(Path(folder, script, first)) == 2
            assert any("random streams start anew" in str(w.message) for w in caught) == (dist.get_rank() == 0)
            wrapped.train(range(2, _STEPS))
            if names := _differing(wrapped.weights(), expected):
                problems.append(f"{script}, {first} to {second}: {', '.join(names)}")
    return problems


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 1, marks=pytest.mark.long)])
def test_scripts_go_on_to_the_bit_at_another_size(before: int, after: int, tmp_path: Path) -> None:
    run_distributed(_train_and_save, before, str(tmp_path))
    assert run_distributed(_load_and_go_on, after, str(tmp_path)) == [[]] * after
