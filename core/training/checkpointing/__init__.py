"""Saves and loads a run: model, optimizer, schedule, random streams and the position in the data."""

from .run_checkpoint import (
    TOKENIZER_FILE,
    find_checkpoint,
    is_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_tokenizer,
    weights_hash,
)
from .run_metadata import check_is_run
from .writer import CheckpointWriter

__all__ = [
    "TOKENIZER_FILE",
    "CheckpointWriter",
    "check_is_run",
    "find_checkpoint",
    "is_checkpoint",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "save_tokenizer",
    "weights_hash",
]
