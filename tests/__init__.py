"""Tests, and what they share. Modules of `examples/gpt` find each other as a script's neighbours; so do tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples" / "gpt"))
