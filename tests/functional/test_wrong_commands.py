"""Wrong flags, environments and files at the command line: one line each and status 2, all in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.dist_checkpointing.format.index import seal
from tests.functional._program import TINY, Ended, run_program

TRAIN = (*TINY, "--train-iters", "2")


@dataclass(frozen=True)
class Wrong:
    """A command that cannot work."""

    said: str
    """Part of the line that it ends with."""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    damage: Callable[[Path], None] | None = None
    """What is done to a copy of a saved run, which is then loaded."""
    program: str = "pretrain_gpt"
    """Of another one `flags` are all that it is given."""
    files: dict[str, str] = field(default_factory=dict)
    """Files in the folder in which it runs."""


def _sealed(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Changes the metadata of a checkpoint as an attacker does who can seal it again."""

    def damage(run: Path) -> None:
        index = run / "iter_0000002" / "checkpoint.json"
        document = json.loads(index.read_text())
        change(document["metadata"])
        document["sha256"] = seal(document)
        index.write_text(json.dumps(document, separators=(",", ":")))

    return damage


def _folder_in_place_of(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def _deep(run: Path) -> None:
    (run / "iter_0000002" / "checkpoint.json").write_text('{"metadata":' * 985 + "1" + "}" * 985)


def _many_ranks(metadata: dict) -> None:
    metadata["layout"]["ranks"] = 2**20 - 1
    metadata["rng_bytes"] = 2**40


def _no_section(metadata: dict) -> None:
    del metadata["config"]["gpt"]


def _no_step(metadata: dict) -> None:
    metadata["optimizer"] = {"x": 1}


def _no_schedule(metadata: dict) -> None:
    metadata["scheduler"] = {}


def _not_finite(metadata: dict) -> None:
    metadata["finite"] = False


def _huge(metadata: dict) -> None:
    metadata["config"]["model"]["num_layers"] = 10**9


def _hugging_face(said: str, **changed: object) -> Wrong:
    """Returns a model of Hugging Face's whose config.json says something that cannot be."""
    layers = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = {"model_type": "llama", **layers, "vocab_size": 16, "max_position_embeddings": 8} | changed
    files = {"hf/config.json": json.dumps(config), "hf/model.safetensors": ""}
    return Wrong(said, ("--load", "hf", "--save", "out"), program="convert", files=files)


NO_TOKENS = json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}})
PREPARE = ("text.txt", "--output-prefix", "corpus", "--tokenizer", "bpe")
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CASES = {
    "rank as text": Wrong("RANK is 'abc' in the environment", environment={"RANK": "abc", "WORLD_SIZE": "1"}),
    "ranks as text": Wrong("WORLD_SIZE is 'x' in the environment", environment={"RANK": "0", "WORLD_SIZE": "x"}),
    "no ranks": Wrong("WORLD_SIZE is '0'", environment={"RANK": "0", "WORLD_SIZE": "0"}),
    "a rank beyond": Wrong("RANK is 1 and WORLD_SIZE 1", environment={**ALONE, **MEETING, "RANK": "1"}),
    "nowhere to meet": Wrong("RANK is set and MASTER_ADDR and MASTER_PORT not", environment=ALONE),
    "a port as text": Wrong("MASTER_PORT is 'p'", environment={**ALONE, **MEETING, "MASTER_PORT": "p"}),
    "two thread counts": Wrong("OMP_NUM_THREADS is '4,2'", environment={"OMP_NUM_THREADS": "4,2"}),
    "an empty thread count": Wrong("OMP_NUM_THREADS is ''", environment={"OMP_NUM_THREADS": ""}),
    "no threads": Wrong("OMP_NUM_THREADS is '0'", environment={"OMP_NUM_THREADS": "0"}),
    "restarts as text": Wrong("TORCHELASTIC_RESTART_COUNT is 'x'", environment={"TORCHELASTIC_RESTART_COUNT": "x"}),
    "a device that is none": Wrong("SHARDSTACK_DEVICE is 'tpu'", environment={"SHARDSTACK_DEVICE": "tpu"}),
    "iterations without end": Wrong("samples of 32 tokens are asked for", ("--train-iters", "99999999999999")),
    "a timeout without end": Wrong(
        "distributed_timeout_minutes is 1e+300", ("--distributed-timeout-minutes", "1e300")
    ),
    "a model beyond memory": Wrong("GiB of weights on each rank", ("--hidden-size", str(2**24))),
    "a model beyond numbers": Wrong("GiB of weights on each rank", ("--hidden-size", str(2**60))),
    "ranks without a tree": Wrong(
        "which 3 data-parallel ranks cannot share; use 1, 2, 4 of them",
        ("--global-batch-size", "24", "--reproducible-across-ranks"),
        environment={**ALONE, **MEETING, "WORLD_SIZE": "3"},
    ),
    "more ranks than a tree has": Wrong(
        "which 8 data-parallel ranks cannot share; use 1, 2, 4 of them",
        ("--global-batch-size", "24", "--reproducible-across-ranks"),
        environment={**ALONE, **MEETING, "WORLD_SIZE": "8"},
    ),
    "a batch that follows the ranks": Wrong(
        "and global_batch_size is not, which is then one micro-batch a rank", ("--reproducible-across-ranks",)
    ),
    "dropout by rank": Wrong(
        "data_parallel_random_init by rank; drop the latter",
        ("--global-batch-size", "4", "--reproducible-across-ranks", "--data-parallel-random-init"),
    ),
    "a sum by the backend": Wrong(
        "drop average_in_collective",
        ("--global-batch-size", "4", "--reproducible-across-ranks", "--ddp-average-in-collective"),
    ),
    "latest is a folder": Wrong("latest cannot be read", damage=_folder_in_place_of("latest")),
    "the log is a folder": Wrong("log.jsonl is not the log of a run", damage=_folder_in_place_of("log.jsonl")),
    "the settings are a folder": Wrong("config.json is a folder", damage=_folder_in_place_of("config.json")),
    "a description without end": Wrong("nested more than 64 deep", damage=_deep),
    "ranks without end": Wrong("no pretraining run writes, under rng_bytes", damage=_sealed(_many_ranks)),
    "no settings of the GPT": Wrong("no pretraining run writes, under config.gpt", damage=_sealed(_no_section)),
    "no state of the optimizer": Wrong("metadata of optimizer and schedule", damage=_sealed(_no_step)),
    "no state of the schedule": Wrong("metadata of optimizer and schedule", damage=_sealed(_no_schedule)),
    "a tokenizer without tokens": Wrong(
        "the tokenizer's vocabulary is empty", ("--tokenizer-model", "none.json"), files={"none.json": NO_TOKENS}
    ),
    "a BPE of nothing": Wrong(
        "--bpe-training-mib is -5",
        (*PREPARE, "--bpe-training-mib", "-5"),
        program="prepare_data",
        files={"text.txt": "a b c"},
    ),
    "no heads": _hugging_face("num_attention_heads 0; it takes 1 to", num_attention_heads=0),
    "heads as text": _hugging_face("num_attention_heads '2'; it takes 1 to", num_attention_heads="2"),
    "a rope scaling as text": _hugging_face("and no tables", rope_scaling="x"),
    "a width beyond memory": _hugging_face("hidden_size 1099511627776; it takes 1 to", hidden_size=2**40),
    "layers beyond memory": _hugging_face("num_hidden_layers 1000000000000; it takes", num_hidden_layers=10**12),
    "weights that are NaN": Wrong("holds weights that are infinite or NaN", damage=_sealed(_not_finite)),
}


def _is_one_line(ended: Ended, said: str) -> None:
    # A progress bar may be drawn before what is wrong is known.
    lines = [line for line in ended.err.replace("\r", "\n").splitlines() if line and not line.startswith("training:")]
    assert ended.status == 2, ended
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], ended
    assert len(lines[0]) < 1000


@pytest.mark.parametrize("kind", CASES)
def test_what_cannot_work_is_one_line(corpus: Path, saved_run: Path, tmp_path: Path, kind: str) -> None:
    wrong = CASES[kind]
    for name, text in wrong.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    flags = [*TRAIN, "--data-path", corpus, *wrong.flags] if wrong.program == "pretrain_gpt" else list(wrong.flags)
    if wrong.damage is not None:
        run = Path(shutil.copytree(saved_run, tmp_path / "run"))
        wrong.damage(run)
        flags += ["--load", run]
    _is_one_line(run_program(wrong.program, *flags, folder=tmp_path, **wrong.environment), wrong.said)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_sealed(_huge), "its settings are those of another model than it holds"),
        (_sealed(_no_section), "no pretraining run writes, under config.gpt"),
        (_deep, "nested more than 64 deep"),
        (_folder_in_place_of("tokenizer.json"), "the tokenizer cannot be read (Is a directory)"),
    ],
    ids=["layers without end", "no settings", "deep", "a folder"],
)
def test_a_run_that_text_is_not_generated_from_is_one_line(
    saved_run: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    damage(run)
    _is_one_line(run_program("generate", "--load", run, folder=tmp_path), said)


def test_of_a_flag_that_is_given_twice_the_last_counts(corpus: Path, tmp_path: Path) -> None:
    flags = (*TRAIN, "--train-iters", "9", "--train-iters", "1", "--save", tmp_path / "run")
    ended = run_program("pretrain_gpt", *flags, "--data-path", corpus, folder=tmp_path)
    assert ended.status == 0 and (tmp_path / "run" / "latest").read_text() == "iter_0000001\n", ended.err
