"""Turns text or JSON-lines files into a corpus that pretraining reads.

    python examples/gpt/prepare_data.py --input notes.txt articles/*.jsonl.zst --output-prefix data/corpus

writes data/corpus.bin and data/corpus.idx in Megatron-LM's format, and the tokenizer next to them.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from corpus import prepare

from shardstack.base.errors import ConfigError, MissingExtraError
from shardstack.training.config.arguments import parse_call
from shardstack.training.launch.entry import run_command


def main(arguments: Sequence[str]) -> None:
    parse_call(_command(), arguments, name="prepare_data.py")


def _command() -> Any:
    try:
        from cyclopts import Parameter
    except ImportError:
        raise MissingExtraError("cyclopts", "train", "The command line") from None

    def command(
        input: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
        *,
        output_prefix: Path,
        tokenizer: str = "byte",
        vocab_size: int = 32768,
        eod_token: str | None = None,
        format: Literal["auto", "text", "jsonl"] = "auto",
        json_key: str = "text",
        split_on: Literal["file", "line", "blank-lines"] = "file",
        bpe_training_mib: int = 256,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Turn text or JSON-lines files into a corpus that pretraining reads.

        Parameters
        ----------
        input
            Files, folders and quoted glob patterns. Text: .txt .text .md .rst .py; JSON lines: .jsonl .ndjson .json;
            each may end in .gz or .zst.
        output_prefix
            Path of the corpus without suffix: PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json are written.
        tokenizer
            "byte", "bpe" (learned from this input), or the path of a Hugging Face tokenizer.json.
        vocab_size
            Entries that "bpe" may learn.
        eod_token
            The token that ends a document, if the tokenizer's folder does not say which it is.
        format
            Format of the files; "auto" uses their suffix.
        json_key
            Key of the text in each JSON object.
        split_on
            What ends a document of a text file.
        bpe_training_mib
            "bpe" learns from the documents up to this many MiB.
        workers
            Processes that tokenise. Default: one for each available core.
        progress
            Draw a progress bar on stderr. Default: when that is a terminal.
        """
        if bpe_training_mib < 1:
            raise ConfigError(f"--bpe-training-mib is {bpe_training_mib}; it takes a positive number")
        corpus = prepare(
            input,
            output_prefix,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eod_token=eod_token,
            file_format=format,
            json_key=json_key,
            split_on=split_on,
            bpe_training_bytes=bpe_training_mib << 20,
            workers=_available_cores() if workers is None else workers,
            progress=sys.stderr.isatty() if progress is None else progress,
        )
        print(
            f"{corpus.prefix}: {corpus.num_documents:,} documents and {corpus.num_tokens:,} tokens from "
            f"{corpus.num_files:,} files, vocabulary of {corpus.vocab_size:,}"
        )

    return command


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    run_command(main)
