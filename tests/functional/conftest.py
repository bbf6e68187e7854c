"""A small corpus for whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import prepare

pytest.register_assert_rewrite("tests.functional._equality")  # whose comparisons shall say what differs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-level corpus of some hundred short documents."""
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text("\n".join(f"the square of {i} is {i * i}, and its cube is {i**3}" for i in range(400)))
    prepare([text], folder / "numbers", tokenizer="byte", split_on="line")
    return folder / "numbers"
