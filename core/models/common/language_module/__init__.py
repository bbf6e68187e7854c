"""What models of language share."""

from .language_module import LanguageModule

__all__ = ["LanguageModule"]
