"""A run that stops and goes on equals, bit by bit, the run that never stopped; a deterministic one its repetition."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from core.dist_checkpointing import load_metadata
from core.training import loop
from tests.unit._program import TINY, content, forget_after, load_program, log, pretrain, run_program
from tests.unit._spawn import RankFailure, run_distributed

# Dropout draws from the random streams, and several micro-batches and workers make order matter.
FLAGS = (
    *TINY,
    *("--train-iters", "6", "--save-interval", "3", "--eval-interval", "2", "--global-batch-size", "8"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--lr-warmup-iters", "2", "--log-num-zeros-in-grad"),
)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, [], marks=pytest.mark.long),
        pytest.param(2, [], marks=pytest.mark.long),
        pytest.param(2, ["--use-torch-fsdp2"], marks=pytest.mark.long),
        pytest.param(
            *(2, ["--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"]),
            marks=pytest.mark.long,  # a golden case has it
        ),
        pytest.param(2, ["--bf16"], marks=pytest.mark.long),
        (
            2,
            [
                "--use-torch-fsdp2",
                "--fp16",
                "--initial-loss-scale",
                "1048576",
                "--loss-scale-window",
                "2",
                "--async-save",
            ],
        ),
        pytest.param(2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"], marks=pytest.mark.long),
        (2, ["--context-parallel-size", "2", "--reset-attention-mask", "--reset-position-ids"]),
        (1, ["--num-workers", "1", "--calculate-per-token-loss", "--optimizer", "sgd"]),
    ],
    ids=[
        "one rank",
        "ddp",
        "fsdp2",
        "zero1 bf16, overlapped",
        "ddp bf16",
        "fsdp2 fp16 with a loss scale that moves, saved asynchronously",
        "tensor parallel",
        "context parallel, documents apart",
        "workers, per token, sgd",
    ],
)
def test_stop_and_resume_equals_the_uninterrupted_run(
    corpus: Path, tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    def run(*more: str) -> None:
        arguments = [*FLAGS, *flags, "--data-path", str(corpus), *more]
        if ranks > 1:
            run_distributed(pretrain, ranks, *arguments)
        else:  # a process of its own, which may start readers of data
            ended = run_program("pretrain_gpt", *arguments, folder=tmp_path)
            assert ended.status == 0, ended.err

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run("--save", str(whole))
    assert [line["step"] for line in log(whole)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    expected = content(whole / "iter_0000006")
    assert expected != content(whole / "iter_0000003")

    shutil.copytree(whole, resumed)  # as a crash in iteration 6 leaves it: the log is ahead of the checkpoint
    forget_after(resumed, 3)
    run("--load", str(resumed))
    assert content(resumed / "iter_0000006") == expected
    assert log(resumed) == log(whole)
    if "--fp16" in flags:
        assert len({line["loss_scale"] for line in log(whole) if "loss_scale" in line}) > 1
    assert (resumed / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_deterministic_run_is_repeated_bit_by_bit(corpus: Path, tmp_path: Path) -> None:
    for name in ("once", "again"):
        flags = (*FLAGS, "--deterministic", "--data-path", corpus, "--save", tmp_path / name)
        ended = run_program("pretrain_gpt", *flags, folder=tmp_path, OMP_NUM_THREADS="2")
        assert ended.status == 0, ended.err
    assert content(tmp_path / "once" / "iter_0000006") == content(tmp_path / "again" / "iter_0000006")
    assert log(tmp_path / "once") == log(tmp_path / "again")


@pytest.mark.long  # the matrix of checkpoints has every wrapper, and the next test numbers of ranks
def test_another_wrapper_and_world_size_continue_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    arguments = [*FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0", "--data-path", str(corpus)]
    first = tmp_path / "first"
    run_distributed(pretrain, 2, *arguments, "--bf16", "--use-torch-fsdp2", "--save", str(first))
    forget_after(first, 3)
    losses = {}
    for name, ranks, flags in (
        ("fsdp2", 2, ["--use-torch-fsdp2"]),
        ("tensor parallel", 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        ("context parallel", 2, ["--context-parallel-size", "2", "--use-distributed-optimizer"]),
        ("alone", 1, []),
    ):
        second = tmp_path / name
        run_distributed(pretrain, ranks, *arguments, "--bf16", *flags, "--load", str(first), "--save", str(second))
        losses[name] = [line["loss"] for line in log(second) if "loss" in line]
        assert [line["step"] for line in log(second) if "loss" in line] == [4, 5, 6]
    # Gradients in bf16 are rounded in another order by each; a run that started again would be off in the first digit.
    for name in losses:
        assert losses[name] == pytest.approx(losses["fsdp2"], rel=2e-3), name


def _pretrain_noting_samples(*arguments: str) -> list[int]:
    """Returns which samples of the training split this rank read, in order."""
    from core.datasets.gpt_dataset import GPTDataset

    seen: list[int] = []
    read = GPTDataset.__getitem__

    def noting(dataset: GPTDataset, index: int) -> Any:
        if dataset.split == "train":
            seen.append(index)
        return read(dataset, index)

    GPTDataset.__getitem__ = noting
    try:
        pretrain(*arguments)
    finally:
        GPTDataset.__getitem__ = read
    return seen


def test_another_world_size_resumes_the_same_samples_and_numbers(corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0", "--data-path", str(corpus)]
    first, batch = tmp_path / "first", 8
    run_distributed(pretrain, 2, *flags, "--save", str(first))
    expected = [line["loss"] for line in log(first) if "loss" in line][3:]
    forget_after(first, 3)
    for ranks in (2, 1):
        second = tmp_path / str(ranks)
        seen = run_distributed(_pretrain_noting_samples, ranks, *flags, "--load", str(first), "--save", str(second))
        for step in range(3):
            share = batch // ranks
            read = sorted(i for of_rank in seen for i in of_rank[step * share : (step + 1) * share])
            assert read == list(range((3 + step) * batch, (4 + step) * batch)), (ranks, step)
        losses = [line["loss"] for line in log(second) if "loss" in line]
        assert losses == (expected if ranks == 2 else pytest.approx(expected, rel=1e-5))


def test_weights_alone_are_saved_and_continued_on_request(corpus: Path, tmp_path: Path) -> None:
    def run(folder: str, *more: str) -> None:
        place = str(tmp_path / folder)
        flags = (*FLAGS, "--data-path", str(corpus), "--eval-iters", "0")
        run_distributed(pretrain, 2, *flags, "--save", place, "--load", place, *more)

    run("whole", "--exit-interval", "2")
    shutil.copytree(tmp_path / "whole", tmp_path / "anew")
    run("whole", "--exit-interval", "4")
    run("anew", "--exit-interval", "4", "--no-load-optim", "--no-load-rng")
    rates = {name: [line["lr"] for line in log(tmp_path / name) if "lr" in line] for name in ("whole", "anew")}
    assert rates["whole"][:2] == rates["anew"][:2] == rates["anew"][2:] != rates["whole"][2:]
    losses = {name: [line["loss"] for line in log(tmp_path / name) if "loss" in line] for name in rates}
    assert losses["whole"][:2] == losses["anew"][:2] and losses["whole"][3] != losses["anew"][3]

    run("bare", "--exit-interval", "2", "--no-save-optim", "--no-save-rng")
    metadata = load_metadata(tmp_path / "bare" / "iter_0000002")
    assert metadata["optimizer"] == {} and metadata["rng_bytes"] == 0
    index = json.loads((tmp_path / "bare" / "iter_0000002" / "checkpoint.json").read_text())
    assert {name.partition(".")[0] for name in index["tensors"]} == {"model"}
    with pytest.raises(RankFailure, match=r"holds weights alone, .* or add --no-load-optim"):
        run("bare", "--exit-interval", "3")
    run("bare", "--exit-interval", "3", "--no-load-optim")
    in_samples = (
        "--rampup-batch-size",
        "4",
        "4",
        "8",
        "--no-megatron-defaults",
        "--override-opt_param-scheduler",
        "--exit-interval",
        "5",
    )
    with pytest.raises(RankFailure, match="the schedule counts iterations in the checkpoint, and samples here"):
        run("whole", *in_samples)
    assert [line["step"] for line in log(tmp_path / "bare") if "loss" in line] == [1, 2, 3]


def test_a_run_ends_when_its_minutes_are_over(corpus: Path, tmp_path: Path) -> None:
    words = (*FLAGS, "--data-path", str(corpus), "--exit-duration-in-mins", "1e-6", "--save", str(tmp_path / "run"))
    profile = ("--profile", "--profile-step-start", "0", "--profile-step-end", "1", "--profile-ranks", "1")
    run_distributed(pretrain, 2, *words, *profile)
    # The second step's result is known after the first one's, which says to stop.
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_0000002"]
    traces = list((tmp_path / "run" / "profile").glob("*.json"))
    assert len(traces) == 1 and "aten::" in traces[0].read_text()


def _reason_with_a_late_rank(*words: str) -> str:
    """Returns what ended a run on this rank. The second rank was started an hour before."""
    program, ended = load_program("pretrain_gpt"), []

    def train(*arguments: Any) -> Any:
        ended.append(loop.train(*arguments))
        return ended[0]

    started = time.monotonic() - 3600 * dist.get_rank()
    with mock.patch.object(program, "train", train), mock.patch.object(loop, "_STARTED_AT", started):
        program.main(words)
    return ended[0].stopped_by


def test_all_ranks_say_that_the_minutes_are_over(corpus: Path, tmp_path: Path) -> None:
    words = (*FLAGS, "--data-path", str(corpus), "--exit-duration-in-mins", "30", "--save", str(tmp_path / "run"))
    assert run_distributed(_reason_with_a_late_rank, 2, *words) == ["exit_duration_in_mins"] * 2


def test_masters_are_read_without_the_optimizer(corpus: Path, tmp_path: Path) -> None:
    words = (*FLAGS, "--data-path", str(corpus), "--bf16", "--log-weights-hash", "1", "--no-megatron-defaults")
    run_distributed(pretrain, 1, *words, "--exit-interval", "3", "--save", str(tmp_path / "first"))
    still = ("--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--exit-interval", "4")
    masters = ("--no-load-optim", "--load-main-params-from-ckpt", "--load", str(tmp_path / "first"))
    run_distributed(pretrain, 1, *words, *still, *masters, "--save", str(tmp_path / "second"))
    (last, then) = (log(tmp_path / name) for name in ("first", "second"))
    hashes = [{n["step"]: n["weights_hash"] for n in lines if "weights_hash" in n} for lines in (last, then)]
    assert hashes[1][4] == hashes[0][3] != hashes[0][2]
