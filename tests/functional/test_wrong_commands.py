"""A mistake of the user is one line that names the value and the fix, said once over all ranks, and exit status 2.

Unit tests have every message of settings, of the environment and of files; here is one of each way to the line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.dist_checkpointing.format.index import seal
from core.rendezvous import environment
from tests.unit._program import TINY, one_line, run_program

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


def _intact(run: Path) -> None:
    """Leaves the run as it was saved."""


HUGGING_FACE = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": "2"}
HUGGING_FACE |= {"intermediate_size": 16, "vocab_size": 16, "max_position_embeddings": 8}
PAIR = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
"""As a launcher sets them; the check comes before any rank waits."""
MEETING = {**PAIR, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CASES = {
    "nowhere to meet": Wrong("RANK is set and MASTER_ADDR and MASTER_PORT not", environment=PAIR),
    "two thread counts": Wrong("OMP_NUM_THREADS is '4,2'", environment={"OMP_NUM_THREADS": "4,2"}),
    "restarts as text": Wrong("TORCHELASTIC_RESTART_COUNT is 'x'", environment={"TORCHELASTIC_RESTART_COUNT": "x"}),
    "a device that is none": Wrong("SHARDSTACK_DEVICE is 'tpu'", environment={"SHARDSTACK_DEVICE": "tpu"}),
    "a port that is none": Wrong("MASTER_PORT is '99999'", environment={**MEETING, "MASTER_PORT": "99999"}),
    "a machine that is none": Wrong(
        "MASTER_ADDR is 'no.such.invalid'", environment={**MEETING, "MASTER_ADDR": "no.such.invalid"}
    ),
    "a rank beyond its machine's": Wrong("LOCAL_RANK is 2", environment={**MEETING, "LOCAL_RANK": "2"}),
    "an interface that is none": Wrong("GLOO_SOCKET_IFNAME is 'eth99'", environment={"GLOO_SOCKET_IFNAME": "eth99"}),
    "copies without a launcher": Wrong(
        "SHARDSTACK_LAUNCHER_FD is no socket", environment={"SHARDSTACK_COPIES_FOLDER": "copies"}
    ),
    "a launcher that is gone": Wrong(
        "SHARDSTACK_LAUNCHER_FD is no socket to this process's launcher",
        environment={"SHARDSTACK_COPIES_FOLDER": "copies", "SHARDSTACK_LAUNCHER_FD": "999"},
    ),
    "threads without end": Wrong("OMP_NUM_THREADS is '999999999'", environment={"OMP_NUM_THREADS": "999999999"}),
    "a start that no launcher writes": Wrong(
        "SHARDSTACK_RUN_STARTED is 'a/../../b'", environment={"SHARDSTACK_RUN_STARTED": "a/../../b"}
    ),
    "workers without end": Wrong("num_workers is 100000; it takes 0 to", ("--num-workers", "100000")),
    "an empty folder to save to": Wrong("value for --save: the path is empty", ("--save", "")),
    "an empty folder to load from": Wrong("value for --load: the path is empty", ("--load=",)),
    "no learning rate, in disguise": Wrong('--lr: "1e-400" is 0 or infinity in fp32', ("--lr", "1e-400")),
    "a stray value": Wrong("unexpected value 'corpus'; every value follows its flag", ("corpus",)),
    "global batch": Wrong(
        "global_batch_size 6 is no multiple of micro_batch_size 2 x data-parallel size 2",
        ("--global-batch-size", "6"),
        environment=MEETING,
    ),
    "warm-up fills the run": Wrong("lr_warmup_steps is 2", ("--lr-warmup-iters", "2")),
    "iterations without end": Wrong("samples of 32 tokens are asked for", ("--train-iters", "99999999999999")),
    "a model beyond numbers": Wrong("GiB of weights on each rank", ("--hidden-size", str(2**60))),
    "latest is a folder": Wrong("latest cannot be read", damage=_folder_in_place_of("latest")),
    "the log is a folder": Wrong("log.jsonl is not the log of a run", damage=_folder_in_place_of("log.jsonl")),
    "the settings are a folder": Wrong("config.json is a folder", damage=_folder_in_place_of("config.json")),
    "no settings of the GPT": Wrong("no pretraining run writes, under config.gpt", damage=_sealed(_no_section)),
    "no state of the optimizer": Wrong("metadata of optimizer and schedule", damage=_sealed(_no_step)),
    "no state of the schedule": Wrong("metadata of optimizer and schedule", damage=_sealed(_no_schedule)),
    "weights that are NaN": Wrong("holds weights that are infinite or NaN", damage=_sealed(_not_finite)),
    "a foreign checkpoint": Wrong("not the checkpoint of a pretraining run", damage=_sealed(dict.clear)),
    "another model": Wrong("another model: hidden_size 32 there and 64 here", ("--hidden-size", "64"), damage=_intact),
    "generating from a foreign one": Wrong(
        "not the checkpoint of a pretraining run", damage=_sealed(dict.clear), program="generate"
    ),
    "generating with layers without end": Wrong(
        "its settings are those of another model than it holds", damage=_sealed(_huge), program="generate"
    ),
    "generating without a tokenizer": Wrong(
        "the tokenizer cannot be read (Is a directory)",
        damage=_folder_in_place_of("tokenizer.json"),
        program="generate",
    ),
    "generating with an unknown flag": Wrong(
        "did you mean --prompt?", ("--load", ".", "--prompts", "x"), program="generate"
    ),
    "generating nothing": Wrong("--num-tokens is 0", ("--num-tokens", "0"), damage=_intact, program="generate"),
    "generating from no checkpoint": Wrong("holds no checkpoint", ("--load", "."), program="generate"),
    "generating at no temperature": Wrong(
        "temperature is -1", ("--temperature", "-1"), damage=_intact, program="generate"
    ),
    "a model of Hugging Face's": Wrong(
        "num_attention_heads '2'; it takes 1 to",
        ("--load", "hf", "--save", "out"),
        program="convert",
        files={"hf/config.json": json.dumps(HUGGING_FACE), "hf/model.safetensors": ""},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_cannot_work_is_one_line(
    corpus: Path, saved_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(environment, "_PAUSE_S", 0.0)  # of programs, which are forked
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
    before = _content(tmp_path)
    ended = run_program(wrong.program, *flags, folder=tmp_path, **wrong.environment)
    assert wrong.said in one_line(ended)
    assert _content(tmp_path) == before


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_schedule_is_refused_until_one_is_chosen(corpus: Path, saved_run: Path, tmp_path: Path) -> None:
    longer = [*TINY, "--train-iters", "3", "--data-path", corpus, "--load", saved_run, "--save", tmp_path / "on"]
    line = one_line(run_program("pretrain_gpt", *longer, folder=tmp_path))
    assert "lr_decay_steps is 3, but the checkpoint has 2" in line
    ended = run_program("pretrain_gpt", *longer, "--override-opt_param-scheduler", folder=tmp_path)
    assert ended.status == 0, ended.err


def test_folders_that_are_taken_or_cannot_be_written_are_refused(
    corpus: Path, saved_run: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(saved_run, tmp_path / "other"))
    (tmp_path / "file").write_text("in the way")
    before = _content(tmp_path)
    for flags, said in (
        (("--save", saved_run), f"--save {saved_run} holds a run already"),
        (("--load", saved_run, "--save", other), f"--save {other} holds a run already"),
        (("--save", tmp_path / "file" / "x"), "cannot be written (Not a directory)"),
        (("--tensorboard-dir", tmp_path / "file" / "x"), "cannot be written (Not a directory)"),
    ):
        line = one_line(run_program("pretrain_gpt", *TRAIN, "--data-path", corpus, *flags, folder=tmp_path))
        assert flags[-2] in line and said in line
    assert _content(tmp_path) == before


def test_one_line_starts_a_run_and_continues_it(corpus: Path, tmp_path: Path) -> None:
    # Of a flag that is given twice the last counts.
    flags = [*TRAIN, "--data-path", corpus, "--load", tmp_path / "run", "--save", tmp_path / "run"]
    flags += ["--train-iters", "1"]
    first, second = (run_program("pretrain_gpt", *flags, folder=tmp_path) for _ in range(2))
    assert first.status == 0 and "holds no checkpoint yet" in first.out, first
    assert second.status == 0 and "at iteration 1 already" in second.out, second


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--num-layer", "2"], "--num-layers"), (["--data-path", "nowhere"], "nowhere.idx")],
    ids=["before there is a process group", "with a process group"],
)
def test_two_ranks_say_it_once(tmp_path: Path, flags: list[str], said: str) -> None:
    assert said in one_line(run_program("pretrain_gpt", *TRAIN, *flags, folder=tmp_path, ranks=2))
