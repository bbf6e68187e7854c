"""No file of a checkpoint can run anything, reach outside its folder, or describe tensors that its bytes are not."""

import json

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import load, load_metadata, save


def _edited(*path_and_value):
    *path, value = path_and_value

    def edit(document):
        at = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return edit


_W = ("tensors", "w")
_PIECE = (*_W, "pieces", 0)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_edited("format", "else"), "no \"format\""),
        (_edited("version", 3), "version 3, and this library reads version 2"),
        (_edited("byte_order", "big"), "'big' order"),
        (_edited("extra", 1), "unknown keys"),
        (_edited("tensors", []), "no tables"),
        (_edited("file_bytes", "rank_00000.bin", "24"), "no integers"),
        (_edited("file_bytes", "rank_00000.bin", True), "no integers"),
        (_edited(*_W, "dtype", "object"), "unknown dtype 'object'"),
        (_edited(*_W, "dtype", ["float32"]), "unknown dtype"),
        (_edited(*_W, "dtype", "float64"), "6 elements in 24 bytes"),
        (_edited(*_W, "shape", [2, -3]), "list of sizes"),
        (_edited(*_W, "shape", [3, 3]), "not covered exactly once"),
        (_edited(*_W, "shape", [2, 2]), "outside of it"),
        (_edited(*_W, "pieces", []), "not covered exactly once"),
        (_edited(*_W, "pieces", {}), "no dtype, shape and pieces"),
        (_edited(*_PIECE, 0, [0]), "piece of other rank"),
        (_edited(*_PIECE, 0, [0, 1]), "outside of it"),
        (_edited(*_PIECE, 2, "../secret"), "unlisted file"),
        (_edited(*_PIECE, 3, 4), "beyond the end"),
        (_edited(*_PIECE, 3, -1), "no place in a file"),
        (_edited(*_PIECE, 4, 1 << 80), "no place in a file"),
        (_edited(*_PIECE, [1, 2]), "without its six fields"),
        (_edited(*_PIECE, 5, "ff"), "16 hexadecimal digits"),
        (_edited(*_PIECE, 5, 7), "16 hexadecimal digits"),
        (_edited(*_PIECE, 5, "0" * 16), "not the sum of its pieces' hashes"),
        (_edited(*_W, "hash", "0" * 16), "not the sum of its pieces' hashes"),
        (_edited("metadata", "step", 4), "its text does not match its sha256"),
        (_edited("sha256", "0" * 64), "its text does not match its sha256"),
        (_edited("sha256", None), "its text does not match its sha256"),
    ],
)  # fmt: skip
def test_a_description_that_contradicts_itself_is_refused(tmp_path, edit, problem):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={"step": 3})
    path = tmp_path / "it" / "checkpoint.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        load({"w": torch.zeros(2, 3)}, tmp_path / "it")
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "a/b.bin", "..", ""])
def test_a_file_outside_the_folder_is_never_opened(tmp_path, name):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={})
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    path = tmp_path / "it" / "checkpoint.json"
    path.write_text(path.read_text().replace("rank_00000.bin", name))
    with pytest.raises(CheckpointError, match="no name of a file in the folder"):
        load({"w": torch.zeros(2, 3)}, tmp_path / "it")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "\x80\x04."])
def test_text_that_is_no_description_is_refused(tmp_path, text):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={})
    (tmp_path / "it" / "checkpoint.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged or unsafe"):
        load_metadata(tmp_path / "it")
