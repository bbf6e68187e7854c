"""Anchors of Markdown files, as forges make them."""

from __future__ import annotations

import re
from pathlib import Path


def anchors_of(page: Path) -> list[str]:
    """Returns what a link to a heading of a page may name."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]
