"""Converts text to token ids and back with the `tokenizers` library (extra `train`), and has Megatron-LM's entry.

A tokenizer is stored next to its corpus as ``<prefix>.tokenizer.json``, so that training and generation find the
vocabulary and the end-of-document token. The file is a plain Hugging Face ``tokenizer.json``; the end-of-document
token is, as in Hugging Face's folders, the ``eos_token`` of a ``tokenizer_config.json`` next to it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base.errors import ConfigError, DataError, ShardstackError, import_extra
from .base.files import TOKENIZER_BYTES, BoundsError, brief, read_file, read_json, write_durably

END_OF_DOCUMENT = "<|endoftext|>"

_LARGEST_GAP = 1 << 16
"""Ids without a token that a vocabulary may have, on top of four times its number of tokens."""

# Names of the end-of-document token in published tokenizers, tried if no configuration names it.
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """A tokenizer with a vocabulary size and an end-of-document token.

    Text is data: a document that spells out a special token gets the ids of those characters, never the special id.

    Raises:
        DataError: nothing says which token ends a document, or it is not in the vocabulary.
    """

    def __init__(self, backend: Any, eod_token: str | None = None) -> None:
        """Takes a `tokenizers.Tokenizer`, and changes it to encode whole texts."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError("the tokenizer's vocabulary is empty; give one that has tokens")
        self.vocab_size: int = max(ids.values()) + 1
        """One more than the largest id: the rows of an embedding, also if ids have gaps."""
        if self.vocab_size > 4 * len(ids) + _LARGEST_GAP:
            raise DataError(
                f"the tokenizer has {len(ids)} tokens, and ids up to {self.vocab_size - 1}: an embedding would have "
                "as many rows; give a tokenizer whose ids follow one another"
            )
        candidates = _KNOWN_ENDS if eod_token is None else (eod_token,)
        self.eod_token = next((token for token in candidates if token in ids), "")
        if not self.eod_token:
            special = sorted(token.content for token in backend.get_added_tokens_decoder().values())
            raise DataError(
                f"the tokenizer has no end-of-document token {' or '.join(map(repr, candidates))}; name one of its "
                f"special tokens as eod_token: {', '.join(special[:20]) or 'it has none'}"
            )
        self.eod: int = ids[self.eod_token]

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids `[n]` of a text, without special tokens.

        Raises:
            DataError: the text has half of a surrogate pair, which is no character.
        """
        utf8(text)
        with _failures_as_errors("the tokenizer cannot encode a text"):
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Returns the text of token ids. Spells out special tokens. Bytes that are not UTF-8 become U+FFFD."""
        with _failures_as_errors("the tokenizer cannot decode tokens"):
            return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        """Returns the content of a ``tokenizer.json``."""
        return str(self._backend.to_str())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``[<name>.]tokenizer.json`` and, next to it, ``[<name>.]tokenizer_config.json``.

        Raises:
            OSError: the folder is missing or cannot be written.
        """
        config = json.dumps({"eos_token": self.eod_token}, indent=1)
        for target, content in ((_config_path(Path(path)), config), (Path(path), self.to_json())):
            write_durably(target, content)


def utf8(text: str) -> bytes:
    """Returns a text in UTF-8.

    Raises:
        DataError: the text has half of a surrogate pair, which is no character.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"{text[error.start]!r} at character {error.start}"
        raise DataError(f"the text holds an unpaired surrogate, {surrogate}; remove it") from None


def tokenizer_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of a corpus's tokenizer."""
    return Path(f"{os.fspath(prefix)}.tokenizer.json")


def load_tokenizer(path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
    """Loads a Hugging Face ``tokenizer.json``.

    Args:
        eod_token: the token that ends a document. None: the `eos_token` of the ``tokenizer_config.json`` next to the
            file, or else the first commonly used one in the vocabulary.

    Raises:
        DataError: the file is missing or no tokenizer, or nothing says which token ends a document.
    """
    path = Path(path)
    try:
        content = read_file(path, TOKENIZER_BYTES).decode("utf-8")
    except (OSError, BoundsError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise DataError(f"{path}: the tokenizer cannot be read ({reason}); give a tokenizer.json") from None
    return tokenizer_from_json(content, eod_token or _configured_end(_config_path(path)), str(path))


def tokenizer_from_json(content: str, eod_token: str | None = None, name: str = "tokenizer.json") -> Tokenizer:
    """Builds the tokenizer whose `to_json` is `content`. Errors call it `name`."""
    library = tokenizers_library()
    with _failures_as_errors(f"{name}: no Hugging Face tokenizer.json"):
        backend = library.Tokenizer.from_str(content)
    try:
        with _failures_as_errors("the tokenizer cannot be used"):
            return Tokenizer(backend, eod_token)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


@contextlib.contextmanager
def _failures_as_errors(what: str) -> Iterator[None]:
    """Raises DataError for failures of the library, which raises plain Exceptions, or a BaseException in a panic."""
    try:
        yield
    except ShardstackError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({brief(str(error))})") from None


def _config_path(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix('.json')}_config.json")


def _configured_end(path: Path) -> str | None:
    """Reads the `eos_token` of a Hugging Face tokenizer configuration: a string, or an object with it as content."""
    with contextlib.suppress(OSError, BoundsError):
        match read_json(path):
            case {"eos_token": str(token) | {"content": str(token)}}:
                return token
    return None


def tokenizers_library() -> Any:
    """Returns the package `tokenizers`, or raises MissingExtraError."""
    return import_extra("tokenizers", "train", "A tokenizer")


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
        metadata_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        metdata_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
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
            ConfigError: the metadata cannot be read or names another library, or `vocab_size` is no positive number.
        """
        metadata = metadata_path if metadata_path is not None else metdata_path
        if isinstance(metadata, (str, os.PathLike)):
            try:
                metadata = read_json(Path(metadata))
            except (OSError, ValueError) as error:  # BoundsError, and a path that is none
                raise ConfigError(f"the tokenizer's metadata cannot be read from {metadata!r} ({error})") from None
        library = metadata.get("library") if isinstance(metadata, Mapping) else metadata
        if library != "null-text":
            raise ConfigError(
                f"MegatronTokenizer was asked for library {brief(library)} and makes 'null-text' alone; read a "
                "tokenizer.json by shardstack.tokenizers.load_tokenizer"
            )
        if type(vocab_size) is not int or vocab_size < 1:
            raise ConfigError(f"a null tokenizer was given vocab_size {brief(vocab_size)}; it takes a positive number")
        return NullTokenizer(vocab_size)
