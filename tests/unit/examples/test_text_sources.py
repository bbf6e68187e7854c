"""Files found, documents cut and decoded, and every kind of bad input named with file and place."""

import gzip
import sys
from pathlib import Path

import pytest
import zstandard
from text_sources import find_files, parse_record, read_records, resolve_format, standard_library_sources

from core.base.errors import DataError, MissingExtraError


def _documents(path: Path, split_on: str = "file", json_key: str = "text") -> list[str]:
    kind = resolve_format(path)
    records = read_records(path, kind, split_on, lambda _: None)
    return [parse_record(record, path.name, kind, json_key) for record in records]


def _write(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


TEXT = "first\r\nstill first\n\n  \nsecond é\n\n\n\nthird".encode()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("split_on", "documents"),
    [
        ("file", [TEXT.decode()]),
        ("blank-lines", ["first\r\nstill first\n", "second é\n", "third"]),
        ("line", ["first", "still first", "second é", "third"]),
    ],
)
def test_a_text_file_is_cut_into_documents(tmp_path: Path, suffix: str, split_on: str, documents: list[str]):
    assert _documents(_write(tmp_path / f"a.txt{suffix}", TEXT), split_on) == documents


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_give_the_text_of_a_key(tmp_path: Path, suffix: str):
    content = b'{"text": "a\\nb", "id": 1}\n\n{"id": 2, "text": "\xc3\xa9"}\r\n{"text": ""}'
    path = _write(tmp_path / f"a.jsonl{suffix}", content)
    assert _documents(path) == ["a\nb", "é", ""]


def test_files_of_several_compressed_frames_are_read_to_the_end(tmp_path: Path):
    parts = [f"line {number} {'x' * 50000}\n".encode() for number in range(5)]
    (tmp_path / "a.txt.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    (tmp_path / "a.txt.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    expected = [part.decode().rstrip() for part in parts]
    assert _documents(tmp_path / "a.txt.gz", "line") == expected
    assert _documents(tmp_path / "a.txt.zst", "line") == expected


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    assert _documents(_write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert _documents(_write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}')) == ["hello"]


def test_all_bytes_of_the_file_are_reported(tmp_path: Path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        path = _write(tmp_path / name, b'{"text": "a"}\n\n' * 1000)
        seen: list[int] = []
        assert len(list(read_records(path, "jsonl", "file", seen.append))) == 1000
        assert sum(seen) == path.stat().st_size


def test_json_lines_are_streamed(tmp_path: Path):
    path = _write(tmp_path / "a.jsonl.gz", b'{"text": "0123456789"}\n' * 200_000)
    seen: list[int] = []
    next(read_records(path, "jsonl", "file", seen.append))
    assert sum(seen) < path.stat().st_size  # not read to the end for the first line


def test_folders_and_patterns_are_sorted_and_none_is_taken_twice(tmp_path: Path):
    for name in ("b.txt", "a.jsonl", "sub/c.md.gz", "skip.pdf", ".hidden.txt", "old.bin", "old.tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*inputs: Path | str, file_format: str = "auto") -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in find_files(inputs, file_format)]

    assert names(tmp_path) == ["a.jsonl", "b.txt", "sub/c.md.gz"]
    assert names(tmp_path, file_format="text") == ["a.jsonl", "b.txt", "skip.pdf", "sub/c.md.gz"]
    assert names(f"{tmp_path}/*.txt", tmp_path / "a.jsonl", tmp_path / "b.txt") == ["b.txt", "a.jsonl"]
    assert names(f"{tmp_path}/**/*.gz") == ["sub/c.md.gz"]
    assert names(tmp_path / "skip.pdf", file_format="text") == ["skip.pdf"]


def test_what_is_not_there_or_not_known_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"absent\.txt: no such file, folder or pattern; check the path"):
        find_files([tmp_path / "absent.txt"])
    with pytest.raises(DataError, match=r"no such file, folder or pattern"):
        find_files([f"{tmp_path}/*.txt"])
    with pytest.raises(DataError, match=r"no file with a known suffix \(\.txt "):
        find_files([tmp_path])
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match=r"a\.pdf: unknown suffix '\.pdf', known are \.txt .* or name the format"):
        find_files([tmp_path / "a.pdf"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl, line 3: invalid JSON \(Expecting ',' delimiter at column 13\)"),
        (b"[" * 100_000, r"a\.jsonl, line 3: invalid JSON"),
        (b'["text"]', r"a\.jsonl, line 3: a JSON list; each line must be one object"),
        (b'{"body": "a", "id": 3}', r"line 3: no key 'text'; keys there: 'body', 'id'; name the right one"),
        (b"{}", r"line 3: no key 'text'; keys there: none"),
        (b'{"text": ["a"]}', r"line 3: 'text' is of type list, it must be text"),
        (b'{"text": "\xe9"}', r"a\.jsonl: byte 0xe9 at offset 25 \(line 3\) is no UTF-8; convert"),
    ],
)
def test_a_bad_json_line_is_named_with_its_number(tmp_path: Path, line: bytes, message: str):
    path = _write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        _documents(path)


def test_bytes_that_are_no_utf8_are_named_with_their_place(tmp_path: Path):
    path = _write(tmp_path / "a.txt", b"\xef\xbb\xbfone\ntwo\n\nthree \xff")
    with pytest.raises(DataError, match=r"a\.txt: byte 0xff at offset 18 \(line 4\) is no UTF-8"):
        _documents(path)
    with pytest.raises(DataError, match=r"byte 0xff at offset 18 \(line 4\)"):
        _documents(path, "blank-lines")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("split_on", ["file", "line"])
def test_a_compressed_file_that_is_damaged_is_named(tmp_path: Path, suffix: str, split_on: str):
    path = _write(tmp_path / f"a.txt{suffix}", bytes(range(256)).hex().encode() * 50)
    whole = path.read_bytes()
    for content in (whole[:-6], whole[:20], b"not compressed at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.txt\{suffix}: damaged or cut short"):
            _documents(path, split_on)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(No such file"):
        _documents(tmp_path / "a.txt")


def test_zst_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _write(tmp_path / "a.txt.zst", b"text")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardstack\[train\]'"):
        _documents(path)


def test_the_standard_library_is_a_corpus():
    sources = standard_library_sources()
    names = {path.name for path in sources}
    assert {"argparse.py", "typing.py"} <= names
    assert sources == sorted(sources)
    assert not any({"test", "tests", "site-packages", "encodings"} & set(path.parts[-4:-1]) for path in sources)
    assert 4e6 < sum(path.stat().st_size for path in sources) < 40e6
