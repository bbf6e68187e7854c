"""The corpus format: bytes composed by hand, corpora read back, merged, and refused when damaged."""

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus_writer import IndexedDatasetBuilder

from core.base.errors import DataError
from core.datasets.indexed_dataset import DType, IndexedDataset
from tests.unit.datasets._corpus import write_corpus

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def _index_bytes(code: int, lengths: list[int], pointers: list[int], documents: list[int], version: int = 1) -> bytes:
    """Returns an .idx as Megatron-LM's `_IndexWriter` lays it out, composed field by field."""
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def test_written_files_match_the_format(tmp_path: Path):
    with IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16) as builder:
        builder.add_document([7, 8, 9], [3])
        builder.add_document(torch.tensor([1, 2, 3, 65499]), [1, 3])
        builder.add_document([5], [1])
        builder.finalize(tmp_path / "c.idx")
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<8H", 7, 8, 9, 1, 2, 3, 65499, 5)
    assert (tmp_path / "c.idx").read_bytes() == _index_bytes(8, [3, 1, 3, 1], [0, 6, 8, 14], [0, 1, 3, 4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_every_dtype_code_is_written_and_read(tmp_path: Path, name: str, code: int):
    corpus = write_corpus(tmp_path / "c", [[1, 2], [3]], name)
    assert (tmp_path / "c.idx").read_bytes()[17] == code
    assert corpus.dtype == np.dtype(name)
    assert [corpus[0].tolist(), corpus[1].tolist()] == [[1, 2], [3]]


def test_files_composed_by_hand_are_read(tmp_path: Path):
    (tmp_path / "c.bin").write_bytes(struct.pack("<6i", 10, 11, 12, 13, 14, 70000))
    (tmp_path / "c.idx").write_bytes(_index_bytes(4, [2, 0, 4], [0, 8, 8], [0, 2, 3]))
    corpus = IndexedDataset(tmp_path / "c")
    assert len(corpus) == 3
    assert [part.tolist() for part in corpus[:]] == [[10, 11], [], [12, 13, 14, 70000]]
    assert corpus[-1].tolist() == [12, 13, 14, 70000]
    assert corpus.get(2, 1, 2).tolist() == [13, 14]
    assert corpus.get(2, offset=3).tolist() == [70000]
    assert corpus.sequence_lengths.tolist() == [2, 0, 4]
    assert corpus.document_indices.tolist() == [0, 2, 3]
    assert np.concatenate(list(corpus.iterate_tokens(4))).tolist() == [10, 11, 12, 13, 14, 70000]


def test_modes_of_a_multimodal_index_are_ignored(tmp_path: Path):
    write_corpus(tmp_path / "c", [[1, 2], [3]])
    with (tmp_path / "c.idx").open("ab") as file:
        file.write(bytes([0, 1]))
    assert IndexedDataset(tmp_path / "c")[1].tolist() == [3]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (None, "int32")]
)
def test_optimal_dtype_is_megatrons_rule(vocabulary: int | None, dtype: str):
    assert DType.optimal_dtype(vocabulary) == np.dtype(dtype)


def test_merging_equals_writing_all_at_once(tmp_path: Path):
    documents = [[1, 2, 3], [], [4], [5, 6]]
    write_corpus(tmp_path / "whole", documents)
    write_corpus(tmp_path / "first", documents[:3])
    write_corpus(tmp_path / "second", documents[3:])
    with IndexedDatasetBuilder(tmp_path / "merged.bin", np.uint16) as builder:
        builder.add_index(tmp_path / "first")
        builder.add_index(tmp_path / "second")
        builder.finalize(tmp_path / "merged.idx")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_merging_other_dtypes_is_refused(tmp_path: Path):
    write_corpus(tmp_path / "wide", [[1]], np.int32)
    with (
        IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16) as builder,
        pytest.raises(DataError, match=r"wide\.idx holds int32 tokens .* corpus of uint16"),
    ):
        builder.add_index(tmp_path / "wide")


def test_unfinalised_writer_leaves_old_corpus(tmp_path: Path):
    write_corpus(tmp_path / "c", [[1, 2]])
    with pytest.raises(KeyboardInterrupt), IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16) as builder:
        builder.add_document([3, 4, 5], [3])
        raise KeyboardInterrupt
    assert IndexedDataset(tmp_path / "c")[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_exists_needs_both_files(tmp_path: Path):
    write_corpus(tmp_path / "c", [[1]])
    assert IndexedDataset.exists(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    assert not IndexedDataset.exists(tmp_path / "c")


def _damage(prefix: Path, what: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    good = index.read_bytes()
    if what == "no idx":
        index.unlink()
    elif what == "no bin":
        tokens.unlink()
    elif what == "short bin":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif what == "long bin":
        tokens.write_bytes(tokens.read_bytes() + b"\0")
    else:
        replacement = {
            "short idx": good[:-4],
            "long idx": good + b"12345",
            "header cut": good[:20],
            "empty idx": b"",
            "magic": b"PK\x03\x04" + good[4:],
            "version": _index_bytes(8, [2, 1], [0, 4], [0, 1, 2], version=2),
            "dtype": _index_bytes(9, [2, 1], [0, 4], [0, 1, 2]),
            "documents": _index_bytes(8, [2, 1], [0, 4], [0, 1, 3]),
            "no document": _index_bytes(8, [], [], [0]),
        }[what]
        index.write_bytes(replacement)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no idx", r"c\.idx: cannot be read \(No such file.*make the corpus with shardstack prepare-data"),
        ("no bin", r"c\.bin: cannot be read \(No such file"),
        ("short bin", r"c\.bin: truncated, 5 bytes where the index says 6; prepare"),
        ("long bin", r"c\.bin: longer than its index says, 7 bytes .* 6"),
        ("short idx", r"c\.idx: truncated, 78 bytes where 2 sequences and 3 document indices take 82"),
        ("long idx", r"c\.idx: too long, 87 bytes"),
        ("header cut", r"c\.idx: truncated, 20 bytes of a 34-byte header"),
        ("empty idx", r"c\.idx: truncated, 0 bytes"),
        ("magic", r"c\.idx: starts with b'PK.*no index of this format"),
        ("version", r"c\.idx: index version 2, only 1 is read; prepare the corpus again"),
        ("dtype", r"c\.idx: dtype code 9 is unknown; codes run from 1 to 8"),
        ("documents", r"c\.idx: documents must span sequences 0 to 2, found \[0, 3\]"),
        ("no document", r"c\.idx: the corpus is empty"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, what: str, message: str):
    write_corpus(tmp_path / "c", [[1, 2], [3]])
    _damage(tmp_path / "c", what)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "c")


def test_a_prefix_with_a_suffix_is_explained(tmp_path: Path):
    write_corpus(tmp_path / "c", [[1]])
    with pytest.raises(DataError, match=r"the prefix is the path without \.bin or \.idx"):
        IndexedDataset(tmp_path / "c.bin")


@pytest.mark.parametrize(
    ("lengths", "pointers", "documents", "said"),
    [
        ([2, 1], [400, 4], [0, 1, 2], "sequence 0 has the length 2 and starts at byte 400"),
        ([2**31 - 1, 1], [0, 4], [0, 1, 2], "sequence 1 has the length 1 and starts at byte 4"),
        ([5, -2, 0], [0, 10, 6], [0, 1, 3], "sequence 1 has the length -2 and starts at byte 10"),
        ([2, 1], [0, 3], [0, 1, 2], "sequence 1 has the length 1 and starts at byte 3"),
        ([1, 1, 1], [0, 2, 4], [0, 2, 1, 3], "documents go back"),
    ],
    ids=["beyond the end", "longer than the file", "negative", "between two tokens", "documents"],
)
def test_an_inconsistent_index_is_refused_when_opened(
    tmp_path: Path, lengths: list[int], pointers: list[int], documents: list[int], said: str
):
    write_corpus(tmp_path / "c", [[1, 2], [3]])
    (tmp_path / "c.idx").write_bytes(_index_bytes(8, lengths, pointers, documents))
    tracemalloc.start()
    with pytest.raises(DataError, match=f"c.idx: {said}"):
        IndexedDataset(tmp_path / "c")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_drafts_of_killed_writers_are_removed(tmp_path: Path):
    (tmp_path / ".c.bin.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".c.idx.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".c.bin.notes.tmp").touch()
    with IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16), IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16):
        assert len(list(tmp_path.glob(".c.bin.*.tmp"))) == 3
    write_corpus(tmp_path / "c", [[1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.bin.notes.tmp", "c.bin", "c.idx"]


def test_files_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_replace(path: Path, target: Path) -> None:
        done.append("name " + Path(target).name)
        replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_corpus(tmp_path / "c", [[1]])
    assert [text.split(".tmp")[0][:11] for text in done[:2]] == ["sync .c.idx", "sync .c.bin"]
    assert done[2:] == ["name c.bin", "name c.idx", f"sync {tmp_path.name}", f"sync {tmp_path.name}"]


def test_reads_outside_a_sequence_are_refused(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c", [[1, 2], [3]])
    with pytest.raises(IndexError, match="sequence 2 of a corpus of 2"):
        corpus[2]
    with pytest.raises(DataError, match=r"tokens \[1, 3\) of sequence 0, which has 2 tokens"):
        corpus.get(0, 1, 2)


def test_documents_that_cannot_be_stored_are_refused(tmp_path: Path):
    with IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16) as builder:
        with pytest.raises(DataError, match=r"tokens from 1 to 65536 \(int64\) do not fit uint16"):
            builder.add_document([1, 65536], [2])
        with pytest.raises(DataError, match="tokens from -1 to 1"):
            builder.add_document([1, -1], [2])
        with pytest.raises(DataError, match=r"of 2 tokens was given sequence lengths \[3\]"):
            builder.add_document([1, 2], [3])
        with pytest.raises(DataError, match="lengths below 2\\^31"):
            builder.add_document(np.broadcast_to(np.uint16(1), 2**31), [2**31])
    with pytest.raises(DataError, match="dtype complex64 cannot be stored"):
        IndexedDatasetBuilder(tmp_path / "c.bin", np.complex64)
    with pytest.raises(DataError, match=r"absent/c\.bin: cannot be written \(No such file"):
        IndexedDatasetBuilder(tmp_path / "absent" / "c.bin")
