"""Describes a wrapped model as a table or as a page: `describe`.

table  collects from the plan what each unit is, keeps and gathers, and formats it as cells and as text
page   formats it as HTML
"""

from __future__ import annotations

from ...base.errors import ConfigError
from .page import as_html
from .table import ModelFacts, as_text, model_facts

__all__ = ["describe", "model_facts"]


def describe(facts: ModelFacts, format: str) -> str:
    """Returns the facts as ``text`` or as ``html``.

    Raises:
        ConfigError: the format is unknown.
    """
    formats = {"text": as_text, "html": as_html}
    if format not in formats:
        raise ConfigError(f"format is {format!r}; it takes 'text' or 'html'")
    return formats[format](facts)
