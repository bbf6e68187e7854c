"""Describes a wrapped model as a table or as a page: `describe`.

facts  collects from the plan what each unit is, keeps and gathers
rows   formats the facts as cells, and these as text
page   formats the facts as HTML
"""

from __future__ import annotations

from ...base.errors import ConfigError
from .facts import ModelFacts, model_facts
from .page import as_html
from .rows import as_text

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
