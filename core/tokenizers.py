"""Megatron-LM's entry to tokenizers. Those that encode text are in `core.datasets.tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base.errors import ConfigError


@dataclass(frozen=True)
class NullTokenizer:
    """A vocabulary without text: ids 0 to `num_tokens` - 1, and `num_tokens` ends a document."""

    num_tokens: int

    @property
    def vocab_size(self) -> int:
        """The number of ids, with the end of document."""
        return self.num_tokens + 1

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self.num_tokens


class MegatronTokenizer:
    """Makes tokenizers from Megatron-LM's metadata."""

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None,
        metadata_path: str | Mapping[str, Any] | None = None,
        metdata_path: str | Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> NullTokenizer:
        """Returns the tokenizer of library "null-text", which has ids and no text.

        Args:
            tokenizer_path: not read by this library.
            metadata_path: the metadata, or the path of a JSON file with it; ``{"library": "null-text"}``.
            metdata_path: the same; Megatron-LM's smallest training loop spells it so.
            vocab_size: number of ids without the end of document.

        Raises:
            ConfigError: the metadata names another library, or `vocab_size` is missing.
        """
        metadata = metadata_path if metadata_path is not None else metdata_path
        if isinstance(metadata, str):
            metadata = json.loads(Path(metadata).read_text(encoding="utf-8"))
        library = None if metadata is None else metadata.get("library")
        if library != "null-text":
            raise ConfigError(
                f"MegatronTokenizer was asked for library {library!r} and makes 'null-text' alone; read a "
                "tokenizer.json by core.datasets.tokenizer.load_tokenizer"
            )
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"a null tokenizer was given vocab_size {vocab_size}; it takes a positive number")
        return NullTokenizer(vocab_size)
