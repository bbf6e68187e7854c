"""A mistake of the user is one line that names the value and the fix, exit status 2, said once over all ranks."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from core.dist_checkpointing.format.index import seal
from tests.functional._program import TINY, Ended, run_program

TRAIN = (*TINY, "--train-iters", "2")
PAIR = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
}  # as a launcher sets them; the check comes before any rank waits


def one_line(ended: Ended) -> str:
    """Returns the error line, once it is sure that there is nothing else."""
    lines = ended.err.splitlines()
    assert ended.status == 2, ended
    assert ended.out == "", ended
    assert len(lines) == 1, ended
    assert lines[0].startswith("error: "), ended
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        pytest.param(["--num-layer", "2"], {}, ["--num-layer", "Did you mean --num-layers?"], id="unknown flag"),
        pytest.param(["--lr", "fast"], {}, ["--lr", "fast", "float"], id="wrong type"),
        pytest.param(["--normalization", "Batch"], {}, ["Batch", "--normalization", "RMSNorm"], id="wrong choice"),
        pytest.param(["--lr"], {}, ["--lr", "requires an argument"], id="no value"),
        pytest.param(["corpus"], {}, ["'corpus'", "follows its flag"], id="stray value"),
        pytest.param(["--fp16", "--bf16"], {}, ["fp16", "bf16", "choose one"], id="two precisions"),
        pytest.param(
            ["--use-torch-fsdp2", "--data-parallel-sharding-strategy", "optim"],
            {},
            ["use_torch_fsdp2", "data_parallel_sharding_strategy is optim", "drop one"],
            id="two strategies",
        ),
        pytest.param(
            ["--torch-fsdp2-no-reshard-after-forward"],
            {},
            ["reshard_after_forward", "use_torch_fsdp2"],
            id="FSDP2 alone",
        ),
        pytest.param(["--loss-scale", "128"], {}, ["loss_scale 128", "fp16"], id="loss scale without fp16"),
        pytest.param(
            ["--max-position-embeddings", "16"], {}, ["seq_length 32", "max_position_embeddings 16"], id="too long"
        ),
        pytest.param(
            ["--lr-warmup-iters", "2"], {}, ["lr_warmup_steps is 2", "lr_decay_steps 2"], id="warm-up fills the run"
        ),
        pytest.param(
            ["--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1"],
            {},
            ["lr_warmup_iters 1", "0.1"],
            id="two warm-ups",
        ),
        pytest.param(
            ["--tensor-model-parallel-size", "3"],
            PAIR,
            ["num_attention_heads 2", "3"],
            id="heads by tensor parallelism",
        ),
        pytest.param(
            ["--context-parallel-size", "3"], PAIR, ["2 ranks", "context_parallel_size 3", "multiple of 3"], id="world"
        ),
        pytest.param(
            ["--global-batch-size", "6"],
            PAIR,
            ["global_batch_size 6", "micro_batch_size 2 x data-parallel size 2", "4 or 8"],
            id="global batch",
        ),
        pytest.param(["--train-iters", "0"], {}, ["train_iters is 0", "positive"], id="no iterations"),
    ],
)
def test_flags_are_refused(
    corpus: Path, tmp_path: Path, flags: list[str], environment: dict[str, str], said: list[str]
) -> None:
    base = TINY if "--train-iters" in flags else TRAIN
    ended = run_program("pretrain_gpt", *base, "--data-path", corpus, *flags, folder=tmp_path, **environment)
    line = one_line(ended)
    assert all(part in line for part in said), line
    assert not any(tmp_path.rglob("iter_*"))


def damaged(corpus: Path, folder: Path, kind: str) -> Path:
    """Returns a copy of the corpus with one thing wrong."""
    for suffix in (".bin", ".idx", ".tokenizer.json", ".tokenizer_config.json"):
        shutil.copy(f"{corpus}{suffix}", folder / f"corpus{suffix}")
    index, tokens = folder / "corpus.idx", folder / "corpus.bin"
    if kind == "missing":
        index.unlink()
    elif kind == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-10])
    elif kind == "version":
        content = bytearray(index.read_bytes())
        content[9:17] = struct.pack("<Q", 7)
        index.write_bytes(content)
    elif kind == "empty":
        index.write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 1) + struct.pack("<q", 0))
        tokens.write_bytes(b"")
    elif kind == "token":
        content = bytearray(tokens.read_bytes())
        content[:2] = struct.pack("<H", 4000)
        tokens.write_bytes(content)
    elif kind == "no tokenizer":
        (folder / "corpus.tokenizer.json").unlink()
    return folder / "corpus"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", ["corpus.idx", "prepare_data.py"]),
        ("truncated", ["corpus.bin", "truncated", "prepare"]),
        ("version", ["corpus.idx", "version 7", "prepare"]),
        ("empty", ["corpus", "empty", "prepare"]),
        ("token", ["corpus.bin", "token id 4000", "257", "tokenizer"]),
        ("no tokenizer", ["corpus.tokenizer.json", "--vocab-size", "--tokenizer-model"]),
    ],
)
def test_a_corpus_is_refused(corpus: Path, tmp_path: Path, kind: str, said: list[str]) -> None:
    prefix = damaged(corpus, tmp_path, kind)
    line = one_line(run_program("pretrain_gpt", *TRAIN, "--data-path", prefix, folder=tmp_path))
    assert all(part in line for part in said), line


def test_a_checkpoint_of_another_model_is_refused_and_stays(corpus: Path, saved_run: Path) -> None:
    before = {path: path.read_bytes() for path in saved_run.rglob("*") if path.is_file()}
    wider = [{"32": "64"}.get(flag, flag) if i == 3 else flag for i, flag in enumerate(TRAIN)]
    ended = run_program("pretrain_gpt", *wider, "--data-path", corpus, "--load", saved_run, folder=saved_run.parent)
    line = one_line(ended)
    assert "another model" in line and "hidden_size 32 there and 64 here" in line
    assert {path: path.read_bytes() for path in saved_run.rglob("*") if path.is_file()} == before


def test_another_schedule_is_refused_until_one_is_chosen(corpus: Path, saved_run: Path, tmp_path: Path) -> None:
    longer = [*TINY, "--train-iters", "3", "--data-path", corpus, "--load", saved_run, "--save", tmp_path / "on"]
    line = one_line(run_program("pretrain_gpt", *longer, folder=tmp_path))
    assert "lr_decay_steps is 3, but the checkpoint has 2" in line
    ended = run_program("pretrain_gpt", *longer, "--override-opt_param-scheduler", folder=tmp_path)
    assert ended.status == 0, ended.err


def test_a_run_is_not_overwritten(corpus: Path, saved_run: Path) -> None:
    again = run_program("pretrain_gpt", *TRAIN, "--data-path", corpus, "--save", saved_run, folder=saved_run.parent)
    line = one_line(again)
    assert str(saved_run) in line and "--load" in line


def test_a_run_is_not_overwritten_by_the_continuation_of_another(
    corpus: Path, saved_run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(saved_run, other)
    flags = [*TRAIN, "--data-path", corpus, "--load", saved_run, "--save", other]
    line = one_line(run_program("pretrain_gpt", *flags, folder=tmp_path))
    assert f"--save {other} holds a run already" in line


def test_one_line_starts_a_run_and_continues_it(corpus: Path, tmp_path: Path) -> None:
    flags = [*TRAIN, "--data-path", corpus, "--load", tmp_path / "run", "--save", tmp_path / "run"]
    first, second = (run_program("pretrain_gpt", *flags, folder=tmp_path) for _ in range(2))
    assert first.status == 0 and "holds no checkpoint yet" in first.out, first
    assert second.status == 0 and "at iteration 2 already" in second.out, second


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_is_refused(corpus: Path, tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("in the way")
    line = one_line(
        run_program("pretrain_gpt", *TRAIN, "--data-path", corpus, flag, tmp_path / "file" / "x", folder=tmp_path)
    )
    assert flag in line and "cannot be written (Not a directory)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_diverges_ends_and_keeps_its_checkpoint(corpus: Path, saved_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    flags = [*TINY, "--train-iters", "40", "--data-path", corpus, "--load", run, "--override-opt_param-scheduler"]
    flags += ["--eval-interval", "100", "--save-interval", "1", "--keep-last", "1"]
    ended = run_program("pretrain_gpt", *flags, "--lr", "1e38", folder=tmp_path)
    assert ended.status == 3, ended  # no flag was wrong
    assert "warning: iteration" in ended.err and "skipped" in ended.err, ended
    assert ended.err.splitlines()[-1].startswith("error: gradients have been infinite or NaN for 10 steps"), ended
    # Skipped steps left nothing to continue from: with one to keep, the last step that was made stays too.
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000002", "iter_0000012"]
    assert "warning: the order of samples differs from the checkpoint's (" not in ended.err  # one epoch, as before


def test_a_missing_and_a_foreign_checkpoint_are_refused(corpus: Path, saved_run: Path, tmp_path: Path) -> None:
    flags = [*TRAIN, "--data-path", corpus, "--load", tmp_path / "nowhere"]
    assert "nowhere: no such folder" in one_line(run_program("pretrain_gpt", *flags, folder=tmp_path))
    foreign = tmp_path / "foreign"
    shutil.copytree(saved_run, foreign)
    index = foreign / "iter_0000002" / "checkpoint.json"
    document = json.loads(index.read_text())
    document["metadata"] = {}
    document["sha256"] = seal(document)
    index.write_text(json.dumps(document))
    for program, base in (("pretrain_gpt", [*TRAIN, "--data-path", corpus]), ("generate", [])):
        line = one_line(run_program(program, *base, "--load", foreign, folder=tmp_path))
        assert "not the checkpoint of a pretraining run" in line


def test_generate_refuses_what_it_cannot_do(saved_run: Path, tmp_path: Path) -> None:
    for flags, said in (
        (["--load", saved_run, "--temperature", "-1"], "temperature is -1"),
        (["--load", saved_run, "--top-p", "0"], "top_p is 0"),
        (["--load", saved_run, "--num-tokens", "0"], "--num-tokens is 0"),
        (["--load", saved_run, "--prompts", "x"], "Did you mean --prompt?"),
        (["--load", tmp_path], "holds no checkpoint"),
    ):
        assert said in one_line(run_program("generate", *flags, folder=tmp_path))


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--num-layer", "2"], "--num-layers"), (["--data-path", "nowhere"], "nowhere.idx")],
    ids=["before there is a process group", "with a process group"],
)
def test_two_ranks_say_it_once(tmp_path: Path, flags: list[str], said: str) -> None:
    assert said in one_line(run_program("pretrain_gpt", *TRAIN, *flags, folder=tmp_path, ranks=2))
