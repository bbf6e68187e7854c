"""Readers check the bounds of a file before they allocate anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.base.files import (
    MAX_DEPTH,
    BoundsError,
    brief,
    open_in_place,
    parse_json,
    read_file,
    read_json,
    write_durably,
)


def test_a_file_is_read_up_to_a_size_and_only_where_it_is_a_file(tmp_path: Path):
    (tmp_path / "ten").write_bytes(bytes(10))
    assert read_file(tmp_path / "ten", 10) == bytes(10)
    with pytest.raises(BoundsError, match="10 bytes, and no file of this kind has more than 9"):
        read_file(tmp_path / "ten", 9)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BoundsError, match="no regular file"):
        read_file(tmp_path / "pipe", 9)  # without waiting for who writes into it
    with pytest.raises(OSError):
        read_file(tmp_path, 9)


def test_a_file_is_replaced_and_never_written_through_a_link(tmp_path: Path):
    own, run = tmp_path / "own", tmp_path / "run"
    own.write_text("mine")
    run.mkdir()
    for name in ("latest", ".latest.tmp"):
        (run / name).symlink_to(own)
    for text in ("one", "two"):
        write_durably(run / "latest", text)
        assert (run / "latest").read_text() == text
    assert own.read_text() == "mine"
    assert [(path.name, path.is_symlink()) for path in run.iterdir()] == [("latest", False)]
    (run / ".latest.tmp").write_text("left by a crash, and longer")
    write_durably(run / "latest", "three")
    assert (run / "latest").read_text() == "three"


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "latest").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "latest", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "old")]


def test_files_of_fixed_names_are_not_links(tmp_path: Path):
    (tmp_path / "own").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            open_in_place(tmp_path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with pytest.raises(OSError):
        read_file(tmp_path / "link", 9, follow_link=False)
    assert read_file(tmp_path / "link", 9) == b"mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        ('{"a":' * 100_000, "nested more than 64 deep"),
        ("1" * 33, "a number of 33 digits"),
        ("[1, 2", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_is_neither_deep_nor_endless(text: str, said: str):
    with pytest.raises(BoundsError, match=said):
        parse_json(text)


def test_json_that_is_as_deep_as_allowed_is_read(tmp_path: Path):
    text = "[" * MAX_DEPTH + '"]["' + "]" * MAX_DEPTH
    assert str(parse_json(text)) == text.replace('"', "'")
    (tmp_path / "a.json").write_bytes(b"\xff")
    with pytest.raises(BoundsError, match="no UTF-8 text"):
        read_json(tmp_path / "a.json")


def test_a_message_shows_little_of_a_value():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert len(brief(deep)) < 200
    assert len(brief("x" * 10**6)) < 200
