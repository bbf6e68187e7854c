"""Finds the weights in files of Megatron-LM's format ``torch``, ``mp_rank_<tensor>[_<stage>]/model_optim_rng.pt``.

Each is a pickle with all that one rank of tensor and pipeline parallelism has; it is read without being run. Layers
have numbers within their stage. The state of the optimizer is by position, and is not read.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...base.errors import CheckpointError
from ...dist_checkpointing.format.index import CheckpointIndex, Piece, TensorEntry
from ...dist_checkpointing.format.torch_archive import Place, TorchArchive
from .architecture import Architecture

LEGACY_FILES = "mp_rank_*/model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)(\..*)")
_BY_ROWS = re.compile(r"(?:.*\.)?(linear_qkv|linear_fc1|word_embeddings|output_layer)\.(weight|bias)\d*")
_BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight\d*")


def read_legacy_index(folder: Path, a: Architecture) -> CheckpointIndex:
    """Returns the index of a checkpoint, with layers numbered, and gate and up as tensors of their own.

    Raises:
        CheckpointError: files are missing or damaged, or experts are on several ranks.
    """
    files = {path: path.relative_to(folder).as_posix() for path in sorted(folder.glob(LEGACY_FILES))}
    ranks = dict[tuple[int, int], tuple[str, TorchArchive]]()
    degrees = (1, 1, 1)
    for path, file in files.items():
        try:
            with path.open("rb") as stream:
                archive = TorchArchive(stream)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path}: {error}; use another checkpoint") from error
        number = _RANK.fullmatch(path.parent.name)
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        degrees = tuple(getattr(archive.root.get("args"), "state", {}).get(name, 1) for name in names)
        if number is None or degrees[2] != 1:
            raise CheckpointError(f"{path} has experts of one rank among several; save as --ckpt-format torch_dist")
        ranks[int(number[2] or 0), int(number[1])] = file, archive
    num_stages, num_cuts = degrees[1], degrees[0]
    if ranks.keys() != {(stage, cut) for stage in range(num_stages) for cut in range(num_cuts)}:
        raise CheckpointError(
            f"{folder} has {len(ranks)} files, of {num_cuts} x {num_stages} ranks of tensor and pipeline parallelism; "
            "restore the others"
        )
    found, first = dict[str, TensorEntry](), 0
    for chunk in ("model", *(f"model{number}" for number in range(a["num_layers"]))):
        for stage in range(num_stages):
            layers = 0
            for cut in range(num_cuts):
                file, archive = ranks[stage, cut]
                for key, value in (archive.root.get(chunk) or {}).items():
                    is_copy = key.endswith("output_layer.weight") and a.ties_embeddings
                    if is_copy or (place := archive.tensor(value)) is None:
                        continue
                    if layer := _LAYER.fullmatch(key):
                        layers = max(layers, int(layer[2]) + 1)
                        key = f"{layer[1]}{first + int(layer[2])}{layer[3]}"
                    _add(found, key, place, file, cut, is_gated=a["gated_linear_unit"])
            first += layers
    index = CheckpointIndex(found, {file: path.stat().st_size for path, file in files.items()})
    index.check()
    return index


def _add(found: dict[str, TensorEntry], name: str, place: Place, file: str, cut: int, *, is_gated: bool) -> None:
    """Adds what a rank of tensor parallelism has of a tensor. Of tensors that all ranks have, the first one counts."""
    dtype, shape, start, num_bytes = place
    axis = 0 if _BY_ROWS.fullmatch(name) else 1 if _BY_COLUMNS.fullmatch(name) else None
    if axis is None and cut:
        return
    halves = ("_w", "_v") if is_gated and ".linear_fc1." in name and axis == 0 else ("",)
    sizes = (shape[0] // len(halves), *shape[1:]) if shape else ()
    offsets = tuple(cut * size if dim == axis else 0 for dim, size in enumerate(sizes))
    for number, half in enumerate(halves):
        part = num_bytes // len(halves)
        piece = Piece(offsets, sizes, file, start + number * part, part)
        before = found[name + half].pieces if name + half in found else ()
        whole = tuple(map(sum, zip(offsets, sizes, strict=True)))
        found[name + half] = TensorEntry(dtype, whole, (*before, piece))
