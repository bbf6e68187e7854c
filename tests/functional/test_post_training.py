"""The program that trains by GRPO next to a toy server, as its users run it on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit._program import REPOSITORY, run_program

EXAMPLE = REPOSITORY / "examples" / "post_training" / "grpo.py"
ROUNDS = 8
ROUND = re.compile(r"round \d+: reward ([\d.]+), freed (\d+) bytes, off by (\S+)")


def _rounds(strategy: str, folder: Path) -> list[tuple[str, int, float]]:
    ended = run_program(EXAMPLE, strategy, str(ROUNDS), folder=folder, ranks=2)
    assert ended.status == 0, ended.err
    return [(reward, int(freed), float(apart)) for reward, freed, apart in ROUND.findall(ended.out)]


@pytest.mark.parametrize("strategies", [("no_shard", "optim_grads_params", "fsdp2"), ("optim", "optim_grads")])
def test_rewards_rise_and_are_the_same_under_all_wrappers(strategies: tuple[str, ...], tmp_path: Path) -> None:
    runs = [_rounds(strategy, tmp_path) for strategy in strategies]
    for rounds in runs:
        assert len(rounds) == ROUNDS and all(freed > 0 for _, freed, _ in rounds)
        assert [reward for reward, _, _ in rounds] == [reward for reward, _, _ in runs[0]]
        # The server and the trainer compute the same products, of other numbers of rows: a few bits of fp32.
        assert all(apart <= 1e-5 for _, _, apart in rounds)
        first, last = float(rounds[0][0]), float(rounds[-1][0])
        assert last > first
