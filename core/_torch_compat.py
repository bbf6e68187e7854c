"""The one place for what differs between the torch versions that `setup.py` admits."""

from __future__ import annotations
