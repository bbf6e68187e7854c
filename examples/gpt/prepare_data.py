"""Turns text or JSON-lines files into a corpus that pretraining reads.

    python examples/gpt/prepare_data.py --input notes.txt articles/*.jsonl.zst --output-prefix data/corpus

writes data/corpus.bin and data/corpus.idx in Megatron-LM's format, and the tokenizer beside them.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from core.datasets.prepare import prepare
from core.errors import MissingExtraError, ShardstackError

_SPLITS = Literal["file", "line", "blank-lines"]
_FORMATS = Literal["auto", "text", "jsonl"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for a mistake in the input, 130 after Ctrl-C."""
    try:
        _run(sys.argv[1:] if arguments is None else list(arguments))
    except ShardstackError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written")
        return 130
    return 0


def _run(arguments: list[str]) -> None:
    try:
        from cyclopts import App, CycloptsError, Parameter
    except ImportError:
        raise MissingExtraError("cyclopts", "train", "The command line") from None

    def command(
        input: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
        *,
        output_prefix: Path,
        tokenizer: str = "byte",
        vocab_size: int = 32768,
        eod_token: str | None = None,
        format: _FORMATS = "auto",
        json_key: str = "text",
        split_on: _SPLITS = "file",
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
            The token that ends a document, where a tokenizer.json does not tell.
        format
            What the files are; "auto" goes by their suffix.
        json_key
            Where the text of each JSON object stands.
        split_on
            What ends a document of a text file.
        bpe_training_mib
            "bpe" learns from the documents up to this many MiB.
        workers
            Processes that tokenise. Default: one for each available core.
        progress
            Draw a progress bar on stderr. Default: when that is a terminal.
        """
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

    app = App(name="prepare_data.py", default_command=command, help_format="plaintext", version_flags=[])
    try:
        app(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ShardstackError(" ".join(str(error).split())) from None


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
