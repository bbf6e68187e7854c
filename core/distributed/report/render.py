"""Formats the facts as text or HTML."""

from __future__ import annotations

from ...errors import ConfigError
from .facts import ModelFacts
from .page import as_html
from .table import as_text


def describe(facts: ModelFacts, format: str) -> str:
    """Returns the facts as ``text`` or as ``html``.

    Raises:
        ConfigError: the format is unknown.
    """
    if format == "text":
        return as_text(facts)
    if format == "html":
        return as_html(facts)
    raise ConfigError(f"format is {format!r}; it takes 'text' or 'html'")
