"""A tokenizer whose ids are bytes: every text round-trips, and nothing is learned."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstack.tokenizers import END_OF_DOCUMENT, Tokenizer, tokenizers_library, utf8


class ByteTokenizer(Tokenizer):
    """A tokenizer whose id b is byte b, 0 to 255, and id 256 ends a document."""

    def __init__(self) -> None:
        super().__init__(_byte_backend(), END_OF_DOCUMENT)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the bytes of a text, a hundred times as fast as the library does."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)


@functools.cache
def _byte_symbols() -> list[str]:
    """Maps each byte to the printable character of byte-level tokenizers (Radford et al., GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


def _byte_backend() -> Any:
    library = tokenizers_library()
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_DOCUMENT])
    return backend
