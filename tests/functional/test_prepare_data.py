"""The command `examples/gpt/prepare_data.py`, as a user runs it."""

from pathlib import Path

import numpy as np
import pytest

from core.datasets.indexed_dataset import IndexedDataset
from tests.unit._program import Ended, one_line, run_program


def _run(folder: Path, *arguments: str) -> Ended:
    return run_program("prepare_data", *arguments, folder=folder)


def test_text_becomes_a_corpus(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.jsonl").write_text('{"body": "dear"}\n{"body": "reader"}\n')
    result = _run(
        tmp_path, "--input", "a.txt", "b.jsonl", "--json-key", "body", "--output-prefix", "new/c", "--workers", "1"
    )
    assert (result.status, result.err) == (0, "")
    assert result.out == "new/c: 3 documents and 18 tokens from 2 files, vocabulary of 257\n"
    expected = b"".join(np.array([*text, 256], "<u2").tobytes() for text in (b"hello", b"dear", b"reader"))
    assert (tmp_path / "new" / "c.bin").read_bytes() == expected
    assert len(IndexedDataset(tmp_path / "new" / "c")) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.txt", "--output-prefix", "c"], "absent.txt: no such file, folder or pattern"),
        (["--input", "a.jsonl", "--output-prefix", "c", "--workers", "two"], '"two" is not an integer'),
        (["--input", "a.jsonl", "--output-prefix", "c", "--tokenizer", "bpe", "--bpe-training-mib", "-5"], "is -5"),
        (["--inptu", "a.jsonl", "--output-prefix", "c"], "Unknown option: --inptu"),
        ([], "--input"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert message in one_line(_run(tmp_path, *arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_help_shows_every_flag(tmp_path: Path):
    result = _run(tmp_path, "--help")
    assert result.status == 0
    for flag in ("--input", "--output-prefix", "--tokenizer", "--json-key", "--split-on", "--workers", "--progress"):
        assert flag in result.out
