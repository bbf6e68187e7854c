"""The decoder-only language model."""

from .gpt_model import GPTModel

__all__ = ["GPTModel"]
