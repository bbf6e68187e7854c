"""Marks and sums of copies in memory: a changed byte shows, and a mark is of one place and one job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.dist_checkpointing.copy_files import decode_mark, encode_mark, word_sum


@pytest.mark.parametrize("at", [0, 7, 8, 16])
def test_a_changed_byte_changes_the_sum(at):
    data = torch.arange(17, dtype=torch.uint8)
    changed = data.clone()
    changed[at] ^= 128
    assert word_sum(changed) != word_sum(data)


def test_a_mark_is_of_its_place_and_job():
    path, mark = Path("generation_00001/version_0/rank_00000.json"), {"step": 1, "metadata": {}, "sums": {"a": 1}}
    text = encode_mark(mark, b"secret", path)
    assert decode_mark(text.ljust(4096), b"secret", Path("/elsewhere", path)) == mark
    assert decode_mark(b"\0" + text[1:], b"secret", path) is None  # being written
    for other in ("generation_00002", "version_1", "rank_00001.json"):
        parts = [other if other[:4] == part[:4] else part for part in path.parts]
        with pytest.raises(ValueError, match="no mark of this place"):
            decode_mark(text, b"secret", Path(*parts))
    with pytest.raises(ValueError, match="no mark of this place"):
        decode_mark(text, b"another", path)
