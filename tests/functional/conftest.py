"""A small corpus for whole runs, and a run that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit._program import TINY, run_program
from tests.unit.datasets._corpus import corpus_in

pytest.register_assert_rewrite("tests.functional._equality")  # whose comparisons shall say what differs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-level corpus of some hundred short documents."""
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def saved_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two steps. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    flags = (*TINY, "--train-iters", "2", "--data-path", corpus, "--save", folder)
    ended = run_program("pretrain_gpt", *flags, folder=folder.parent)
    assert ended.status == 0, ended.err
    return folder
