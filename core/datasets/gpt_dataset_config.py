"""The settings of a dataset, under Megatron-LM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from ..base.errors import ConfigError, check_range
from ..base.megatron_names import takes_megatron_fields

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

Blend: TypeAlias = tuple[list[str], list[float] | None]


class Vocabulary(Protocol):
    """What a config reads of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...


@takes_megatron_fields
@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Settings of a dataset. Fields have Megatron-LM's names where it has them.

    Raises:
        ConfigError: a value is out of range, an option needs `eod` and it is None, or `eod` and `vocab_size` are not
            the tokenizer's.
    """

    sequence_length: int
    """Tokens in a sample's input, and in its labels."""

    random_seed: int = 1234
    """Seed of the order of documents and samples, 0 to 2**32 - 1."""

    split: str = "969,30,1"
    """Shares of the documents for training (the first ones), validation (the next ones) and test (the last ones)."""

    vocab_size: int | None = None
    """Entries of the model's embedding. A corpus with a larger token is refused. None: not checked."""

    eod: int | None = None
    """Id of the end-of-document token, for the three options below."""

    tokenizer: Vocabulary | None = None
    """Gives `vocab_size` and `eod`. None: the two are given, or not needed."""

    blend: Blend | None = None
    """The path of a corpus for `BlendedMegatronDatasetBuilder`, as ``([path], None)``. None: mock data."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""

    reset_attention_mask: bool = False
    """Return the start of each token's document, so that attention can be restricted to it."""

    create_attention_mask: bool = True
    """Return the attention mask of each sample, with `s x s` elements. Models here need none: attention is causal, and
    `reset_attention_mask` returns what documents need."""

    eod_mask_loss: bool = False
    """Mask the loss where the input is an end of document, whose label is the start of an unrelated one."""

    cache_dir: Path | None = None
    """Folder of the index cache. None: `<prefix>.cache`, next to the corpus."""

    def __post_init__(self) -> None:
        check_range(self, "sequence_length", least=1, takes="a positive number of tokens")
        check_range(self, "random_seed", least=0, below=2**32, takes=f"0 to {2**32 - 1}")
        for name in ("vocab_size", "eod") if self.tokenizer is not None else ():
            given, known = getattr(self, name), getattr(self.tokenizer, name)
            if given not in (None, known):
                raise ConfigError(f"{name} is {given}, and the tokenizer's is {known}; give one of the two")
            object.__setattr__(self, name, known)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if self.eod is None and getattr(self, name):
                raise ConfigError(f"{name} needs to know the end-of-document token: set eod to its id")
        parse_shares(self.split)


def parse_shares(text: str) -> list[float]:
    """Parses a `split` into shares of training, validation and test, in any unit.

    Raises:
        ConfigError: `text` is no list of one to three shares.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    shares += [0.0] * (len(SPLITS) - len(shares))
    if len(shares) > len(SPLITS) or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split is {text!r}; it takes one to three shares that are not all zero, like '969,30,1'")
    return shares
