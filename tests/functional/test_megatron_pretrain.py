"""A script for Megatron-LM with its imports changed: under DDP, ZeRO-1 and FSDP2 on two ranks, as on one."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.unit._program import REPOSITORY, run_program

SCRIPT = Path(__file__).with_name("_megatron_pretrain.py")
PAGE = REPOSITORY / "docs" / "megatron-pretrain-script.md"
LINE = re.compile(r"iteration (\d+) \| lm loss: (\S+) \| grad norm: (\S+)")


def with_imports_changed(source: str) -> str:
    """Makes the changes that the page asks of a user, and no other."""
    return re.sub(r"\bmegatron\.core\b", "core", source)


@cache
def _run(ranks: int, *flags: str) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each iteration."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "pretrain.py")
        script.write_text(with_imports_changed(SCRIPT.read_text()))
        ended = run_program(script, *flags, folder=Path(folder), ranks=ranks)
    assert ended.status == 0, ended.err
    found = LINE.findall(ended.out)
    assert [int(iteration) for iteration, _, _ in found] == list(range(5)), ended.out
    return [(float(loss), float(norm)) for _, loss, norm in found]


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",), ("--use-torch-fsdp2",)], ids=" ".join)
@pytest.mark.parametrize(
    "per_token", [(), pytest.param(("--calculate-per-token-loss",), marks=pytest.mark.long)], ids=" ".join
)
def test_two_ranks_train_as_one_process_does(flags: tuple[str, ...], per_token: tuple[str, ...]) -> None:
    expected = _run(1)
    found = _run(2, *flags, *per_token)
    assert expected[0][0] > expected[-1][0]  # it learns something
    # Two ranks add the same four micro-batches in another order, and five steps of Adam carry the rounding of fp32 on.
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_replicas_and_shards_train_to_the_same_bits() -> None:
    assert _run(2, "--use-torch-fsdp2") == _run(2)


@pytest.mark.long
def test_half_precision_under_both_wrappers() -> None:
    for wrapper in ((), ("--use-torch-fsdp2",)):
        for (loss, _), (expected_loss, _) in zip(_run(2, "--bf16", *wrapper), _run(1), strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-2)  # bf16 has 8 bits, and losses are means of many


def test_the_page_shows_the_imports_of_the_script() -> None:
    page = PAGE.read_text()
    removed = re.findall(r"^-from (megatron\.core\S*) import", page, re.MULTILINE)
    added = re.findall(r"^\+from (core\S*) import", page, re.MULTILINE)
    assert [with_imports_changed(module) for module in removed] == added
    assert sorted(set(removed)) == sorted(set(re.findall(r"from (megatron\.core\S*) import", SCRIPT.read_text())))
