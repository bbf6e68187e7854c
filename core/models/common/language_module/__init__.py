"""The base of language models."""

from .language_module import LanguageModule

__all__ = ["LanguageModule"]
