"""Every wrapper computes the same bits on any number of ranks: losses, norms, zeros, loss scales, weights.

One run on one rank is the expectation of all the others, and every comparison is of equal bits: each addition of a
step has one place in one tree, and what is not an addition of floating-point numbers in that tree is exact.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from core.base.micro_batch_tree import MicroBatchTree
from core.tensor_parallel.random import MicroBatchSeeds
from tests.functional._reproducible import KINDS, WRAPPERS, Kind, Record, on_one_rank, on_ranks, train
from tests.unit._program import TINY, forget_after, log, pretrain, run_program
from tests.unit._spawn import run_distributed

QUICK = {
    ("8 micro-batches", "ddp", 4),
    ("8 micro-batches", "fsdp2", 2),
    ("12 micro-batches, per token", "zero2, every micro-batch", 2),
    ("12 micro-batches, per token", "hybrid zero3", 4),
    ("Muon", "hybrid fsdp2", 4),
    ("fp16", "zero3", 2),
    ("sequences in two parts", "zero2, overlapped", 2),
}
"""What runs each time; the rest of the table is for the long set."""


def _cases() -> list:
    cases = []
    for name, kind in KINDS.items():
        for wrapper in WRAPPERS:
            for ranks in kind.ranks:
                is_hybrid, is_each = "hybrid" in wrapper, "every" in wrapper
                instances = WRAPPERS[wrapper].get("num_distributed_optimizer_instances", 1)
                if ranks % instances or (kind.context_parallel > 1 and is_hybrid and not is_each):
                    continue
                if is_each and not kind.reduces_in_fp32 and not wrapper.startswith(("zero2", "hybrid zero2")):
                    continue  # refused: shards are in fp32
                if kind.context_parallel * ranks > 8 or (wrapper == "ddp" and ranks == 1):
                    continue
                marks = [] if (name, wrapper, ranks) in QUICK else [pytest.mark.long]
                cases.append(pytest.param(name, wrapper, ranks, marks=marks, id=f"{name}-{wrapper}-{ranks}"))
    return cases


@pytest.mark.parametrize(("kind", "wrapper", "ranks"), _cases())
def test_a_run_has_the_same_bits_on_any_number_of_ranks(kind: str, wrapper: str, ranks: int) -> None:
    # Parts of a sequence are the lowest level of the tree where each micro-batch is reduced, and else the highest.
    is_other_tree = KINDS[kind].context_parallel > 1 and "every" in wrapper
    of = wrapper.removeprefix("hybrid ") if is_other_tree else "ddp"
    expected = on_one_rank(KINDS[kind], of)
    assert expected.losses[-1] < expected.losses[0] and len(set(expected.hashes)) > 5
    if KINDS[kind].precision == "fp16":
        assert len(set(expected.scales)) > 2 and None in expected.grad_norms
    assert on_ranks(wrapper, KINDS[kind], ranks) == expected


def test_the_loss_is_that_of_the_mean_of_micro_batches() -> None:
    """The first step's, before weights move: the mode computes what a run without it computes."""
    first = on_one_rank(KINDS["8 micro-batches"]).losses[0]
    assert math.isclose(first, math.log(61), rel_tol=0.1)  # of random weights


FLAGS = (
    *(*TINY, "--train-iters", "9", "--save-interval", "3", "--global-batch-size", "8", "--eval-interval", "4"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--lr-warmup-iters", "2", "--num-workers", "0"),
    *("--reproducible-across-ranks", "--log-weights-hash", "1"),
)


@pytest.mark.parametrize(
    "legs",
    [
        (
            (2, "--data-parallel-sharding-strategy", "optim_grads"),
            (4, "--use-torch-fsdp2"),
            (1, "--data-parallel-sharding-strategy", "optim_grads_params"),
        ),
        pytest.param(
            (
                (2, "--bf16", "--grad-reduce-in-fp32", "--use-torch-fsdp2", "--reduce-every-micro-batch"),
                (4, "--bf16", "--grad-reduce-in-fp32", "--use-distributed-optimizer"),
                (1, "--bf16", "--grad-reduce-in-fp32"),
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["fp32", "bf16"],
)
def test_a_run_on_two_then_four_then_one_rank_is_the_run_on_one(corpus: Path, tmp_path: Path, legs: tuple) -> None:
    """Three steps on each; the log of the whole run, and the hash of its weights, are those of nine on one rank."""
    precision = [flag for flag in legs[0] if flag in ("--bf16", "--grad-reduce-in-fp32")]
    arguments = (*FLAGS, "--data-path", str(corpus))
    run_distributed(pretrain, 1, *arguments, *precision, "--save", str(tmp_path / "whole"))

    moved = tmp_path / "moved"
    for number, (ranks, *flags) in enumerate(legs):
        continued = () if number == 0 else ("--load", str(moved))
        run_distributed(pretrain, ranks, *arguments, *flags, "--save", str(moved), *continued)
        if number < 2:  # as a crash leaves the run after more iterations
            forget_after(moved, 3 * (number + 1))
    assert log(moved) == log(tmp_path / "whole")
    hashes = [line["weights_hash"] for line in log(moved) if "weights_hash" in line]
    assert len(hashes) == 9 and len(set(hashes)) == 9
    shown = [_inspected(tmp_path / name, tmp_path) for name in ("whole", "moved")]
    assert all(f"weights {hashes[-1]}" in text for text in shown), shown


def _inspected(run: Path, folder: Path) -> str:
    script = folder / "inspect_checkpoint.py"
    script.write_text("import sys\nfrom core.dist_checkpointing.inspect import main\nsys.exit(main())\n")
    ended = run_program(script, run, folder=folder)
    assert ended.status == 0, ended.err
    return ended.out


@pytest.mark.parametrize("fault", ["the first micro-batch twice", "one rank's dropout"])
def test_the_comparison_sees_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another micro-batch, or another mask, in one place of the tree is seen in the first loss."""
    kind = dataclasses.replace(Kind(), steps=2)
    expected = on_one_rank(kind)
    found = run_distributed(_train_with_fault, 2, fault, kind)
    assert found[0].losses[0] != expected.losses[0]


def _train_with_fault(fault: str, kind: Kind) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "one rank's dropout":
            patch.setattr(MicroBatchSeeds, "enter", lambda self, index: None)
        else:
            index = MicroBatchTree.index
            patch.setattr(MicroBatchTree, "index", lambda self, *place: max(index(self, *place), 1))
        return train("ddp", kind)
