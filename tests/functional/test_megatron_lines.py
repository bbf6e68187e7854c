"""Command lines that Megatron-LM publishes, scaled down, train the models that Megatron-LM would train.

`megatron_lines.json` has each line as its script passes it on, with the version and the path of the script, sizes that
take its place here, the flags that are removed (fp8), the line about the model that a run begins with, and the samples
of its first steps.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from core.dist_checkpointing import load_metadata
from core.training.config.arguments import parse_arguments
from tests.unit._program import run_program

LINES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("megatron_lines.json").read_text())


def words_of(name: str, *, removed: bool = True, **places: str) -> list[str]:
    """Returns the words of a line, with sizes scaled, paths in place, and, by default, without its flags of fp8."""
    case, flags = LINES[name], list[list[str]]()
    for word in shlex.split(case["line"]):
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    words: list[str] = []
    for flag, *values in flags:
        if removed and flag in case["removed"]:
            continue
        if flag in case["scaled"]:
            values = shlex.split(case["scaled"][flag])
        words += [flag, *(places.get(value, value) for value in values)]
    return words


@pytest.fixture(scope="module")
def places(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by the names that they have in the lines. The vocabulary is that of the corpus: bytes and their end."""
    folder = tmp_path_factory.mktemp("files")
    alphabet = {chr(256 + index): index for index in range(256)}
    (folder / "vocab.json").write_text(json.dumps({**alphabet, "<|endoftext|>": 256}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{corpus}.{name}", folder / name)
    files = {"VOCAB": "vocab.json", "MERGES": "merges.txt", "TOKENIZER": "tokenizer.model"}
    files["${DATA_PATH}/utils/nemotron_2_256k.model"] = "tokenizer.model"
    paths = {name: str(folder / file) for name, file in files.items()}
    return {
        **paths,
        "CORPUS": str(corpus),
        "$DATA_BLEND": str(corpus),
        "${CHECKPOINT_LOAD_PATH}": "${CHECKPOINT_SAVE_PATH}",
    }


@pytest.mark.parametrize("name", LINES)
def test_a_published_line_trains(name: str, places: dict[str, str], tmp_path: Path):
    words = words_of(name, **places)
    ended = run_program("pretrain_gpt", *words, folder=tmp_path, ranks=2, WANDB_MODE="disabled")
    assert ended.status == 0, ended.err
    assert f"model: {LINES[name]['model']}\n" in ended.out
    assert ended.err.count("warning: ignored, since they change no number here") == ("--use-mcore-models" in words)
    config = parse_arguments(words)
    folder = tmp_path / str(config.checkpoint.save)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 3 and all(line["loss"] > 0 for line in steps)
    metadata = load_metadata(folder / "iter_0000003")
    assert metadata["iteration"] == 3
    assert metadata["consumed_samples"] == sum(LINES[name]["batches"])
