"""Helpers of datasets that Megatron-LM's scripts import by these names."""

from __future__ import annotations


def compile_helpers() -> None:
    """Does nothing: Megatron-LM compiles the loops over documents here, and `sample_index` has them in numpy."""
