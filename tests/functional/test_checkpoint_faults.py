"""After any fault in a run or its files the last whole checkpoint is there, and errors say which it is."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from core.base.errors import CheckpointError
from core.dist_checkpointing import saving
from core.dist_checkpointing.format.index import seal
from tests.unit._program import REPOSITORY, TINY, content, forget_after, load_program, log, run_program
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import Bomb

KILLED_RUNS = REPOSITORY / "tests" / "functional" / "_killed_runs.py"
FLAGS = (
    *TINY[:-2],  # but for the number of validations
    *("--train-iters", "6", "--save-interval", "2", "--eval-interval", "100", "--eval-iters", "0"),
    *("--global-batch-size", "4", "--use-torch-fsdp2"),
)


def _pretrain(*arguments: str) -> str:
    """Returns the error that ended the run; empty if none did."""
    try:
        load_program("pretrain_gpt").main(arguments)
    except CheckpointError as error:
        return str(error)
    return ""


def pretrain(corpus: Path, *flags: str | Path, ranks: int = 2) -> str:
    messages = run_distributed(_pretrain, ranks, *FLAGS, "--data-path", str(corpus), *map(str, flags))
    assert len(set(messages)) == 1, messages
    return messages[0]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run of six iterations with three checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert pretrain(corpus, "--save", run) == ""
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_async_saving_writes_the_same_checkpoints(corpus: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pretrain(corpus, "--save", run, "--async-save", "--keep-last", "2", "--keep-every", "6") == ""
    assert sorted(path.name for path in run.glob("*iter_*")) == ["iter_0000004", "iter_0000006"]
    for name in ("iter_0000004", "iter_0000006"):
        assert content(run / name) == content(whole / name)
    assert log(run) == log(whole)


def _damage(folder: Path, kind: str) -> None:
    file = folder / "rank_00001.bin"
    if kind == "flipped bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "missing":
        file.unlink()


def test_a_damaged_checkpoint_is_named_and_an_older_one_offered(corpus: Path, whole: Path, run: Path) -> None:
    _damage(run / "iter_0000006", "truncated")
    _damage(run / "iter_0000004", "flipped bit")  # the offer is not made blindly
    error = pretrain(corpus, "--load", run)
    assert f"{run / 'iter_0000006' / 'rank_00001.bin'} has" in error
    assert error.endswith(
        f"iter_0000002 in the same folder is whole: continue from it with --load {run / 'iter_0000002'}"
    )
    assert "\n" not in error
    assert pretrain(corpus, "--load", run / "iter_0000002") == ""  # doing as it says
    assert content(run / "iter_0000006") == content(whole / "iter_0000006")
    _damage(run / "iter_0000002", "missing")
    for name in ("iter_0000004", "iter_0000006"):
        _damage(run / name, "truncated")
    assert pretrain(corpus, "--load", run).endswith(f"no other checkpoint in {run} is whole")


def test_a_flipped_bit_is_found_where_tensors_are_resharded(corpus: Path, run: Path) -> None:
    _damage(run / "iter_0000006", "flipped bit")
    error = pretrain(corpus, "--load", run, "--no-verify-checkpoint", ranks=1)
    assert "rank_00001.bin is damaged in " in error
    assert error.endswith(f"--load {run / 'iter_0000004'}")


def test_every_reader_refuses_a_flipped_bit(corpus: Path, run: Path, tmp_path: Path) -> None:
    """In the weights of the layout that reads them, where nothing is cut again."""
    tensors = json.loads((run / "iter_0000006" / "checkpoint.json").read_text())["tensors"]
    _, _, file, start, num_bytes, _ = tensors["model.decoder.final_layernorm.weight"]["pieces"][0]
    path = run / "iter_0000006" / file
    data = bytearray(path.read_bytes())
    data[start] ^= 16
    path.write_bytes(data)
    started = [*(flag for flag in FLAGS if flag != "--use-torch-fsdp2"), "--data-path", corpus]
    commands = [
        ("generate", ["--load", run, "--prompt", "a", "--num-tokens", "2"]),
        ("convert", ["--load", run, "--save", tmp_path / "hf"]),
        ("pretrain_gpt", [*started, "--pretrained-checkpoint", run, "--save", tmp_path / "new"]),
        ("pretrain_gpt", [*started, "--load", run, "--save", tmp_path / "new"]),
    ]
    place = f"{path} is damaged in model.decoder.final_layernorm.weight (bytes {start} to {start + num_bytes})"
    for program, flags in commands:
        ended = run_program(program, *flags, folder=tmp_path)
        assert ended.status == 2, ended
        assert place in ended.err.splitlines()[-1], ended
        assert ended.err.endswith(f"continue from it with --load {run / 'iter_0000004'}\n"), ended


def test_restarted_ranks_continue_from_the_last_good_checkpoint(corpus: Path, run: Path, tmp_path: Path) -> None:
    _damage(run / "iter_0000006", "flipped bit")
    index = run / "iter_0000004" / "checkpoint.json"
    document = json.loads(index.read_text())
    document["metadata"]["finite"] = False
    index.write_text(json.dumps(document | {"sha256": seal(document)}))
    flags = [*FLAGS, "--data-path", corpus, "--save", run]
    refused = run_program("pretrain_gpt", *flags, folder=tmp_path)
    assert refused.status == 2 and "holds a run already" in refused.err
    ended = run_program("pretrain_gpt", *flags, folder=tmp_path, TORCHELASTIC_RESTART_COUNT="1")
    assert ended.status == 0, ended
    assert f"{run / 'iter_0000006'} is no good; continuing from {run / 'iter_0000002'}" in ended.err
    assert f" tensors of {run / 'iter_0000002'} by their hashes: " in ended.out
    assert [line["step"] for line in log(run)] == [1, 2, 3, 4, 5, 6]


def _pretrain_with_little_room(*arguments: str) -> str:
    """While the second rank writes tensors, the kernel refuses to let a file grow."""
    append, limits = saving._write_piece, resource.getrlimit(resource.RLIMIT_FSIZE)

    def in_little_room(stream, tensor, start):
        resource.setrlimit(resource.RLIMIT_FSIZE, (stream.tell() + 100, limits[1]))
        try:
            append(stream, tensor, start)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    if dist.get_rank() == 1:
        saving._write_piece = in_little_room
    try:
        return _pretrain(*arguments)
    finally:
        saving._write_piece = append


@pytest.mark.parametrize("how", [pytest.param([], marks=pytest.mark.long), ["--async-save"]], ids=["at once", "async"])
def test_a_full_disk_ends_the_run_with_its_last_checkpoint(
    corpus: Path, whole: Path, run: Path, how: list[str]
) -> None:
    forget_after(run, 2)
    flags = ["--data-path", str(corpus), "--load", str(run), *how]
    messages = run_distributed(_pretrain_with_little_room, 2, *FLAGS, *flags)
    assert messages[0] == messages[1]
    assert f"saving {run / 'iter_0000004'}" in messages[0] and "File too large" in messages[0]
    assert sorted(path.name for path in run.glob("*iter_*")) == ["iter_0000002"]
    assert log(run)[-1]["step"] in ([4] if not how else [4, 5, 6])
    assert pretrain(corpus, "--load", run, *how) == ""
    assert content(run / "iter_0000006") == content(whole / "iter_0000006")


def _killed_runs(corpus: Path, folder: Path, *flags: str, limit_s: float) -> dict:
    ended = run_program(KILLED_RUNS, corpus, folder, *flags, folder=folder, limit_s=limit_s)
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_killed_runs_resume_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    counts = _killed_runs(
        corpus, tmp_path, "--kills", "1", "--seed", "1", "--kinds", "fsdp2, async", "--iterations", "8", limit_s=1000
    )
    assert counts["kills"] == 1


@pytest.mark.long
@pytest.mark.timeout(1830)
def test_fifty_killed_runs_resume_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    counts = _killed_runs(corpus, tmp_path, "--kills", "50", "--seed", "2", limit_s=1800)
    assert counts["kills"] == 50
    assert counts["of all"] > 10 and counts["of one rank"] > 10 and counts["while saving"] > 5
    assert len(set(counts["resumed from"])) > 10


@pytest.mark.parametrize(
    ("file", "program", "status"),
    [
        ("iter_0000006/checkpoint.json", "pretrain_gpt", 2),
        ("iter_0000006/rank_00001.bin", "generate", 2),
        ("iter_0000006/.metadata", "generate", 2),
        ("latest", "pretrain_gpt", 2),
        ("tokenizer.json", "generate", 2),
        ("log.jsonl", "pretrain_gpt", 2),
        ("config.json", "pretrain_gpt", 0),  # which it does not read
    ],
)
def test_no_file_of_a_run_can_run_anything(
    corpus: Path, run: Path, tmp_path: Path, file: str, program: str, status: int
) -> None:
    """A pickle that would create a file replaces each file in turn, and a program opens the run."""
    ran = tmp_path / "ran"
    (run / file).write_bytes(pickle.dumps(Bomb(ran)))
    if file.endswith(".metadata"):
        (run / "iter_0000006" / "checkpoint.json").unlink()  # else it would not be read
    flags = [*(f for f in FLAGS if f not in ("--use-torch-fsdp2", "--train-iters", "6")), "--data-path", corpus]
    flags += ["--train-iters", "7", "--override-opt_param-scheduler"]
    flags = flags if program == "pretrain_gpt" else ["--prompt", "a", "--num-tokens", "2"]
    ended = run_program(program, *flags, "--load", run, folder=tmp_path)
    assert not ran.exists()
    assert ended.status == status and "Traceback" not in ended.err, ended
    assert status == 0 or "error: " in ended.err.splitlines()[-1], ended.err  # a bar may come before it
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists()  # it is a real one
