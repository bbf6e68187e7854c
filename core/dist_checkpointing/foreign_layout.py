"""Reads tensors of another project's names and layout into any layout of ours, and makes them from it.

A :class:`Recipe` lists the rows of foreign tensors that form one of our parameters; this file knows nothing else about
models. Under any layout of our tensor, each rank reads only the rows that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..base.dtypes import dtype_name
from ..base.errors import CheckpointError
from .agreement import Ranks, refuse
from .format.index import CheckpointIndex, Piece
from .format.reader import PieceReader
from .gathering import Outgoing
from .global_view import can_be_cast, held_boxes
from .safetensors_io import open_safetensors


@dataclass(frozen=True)
class Run:
    """`count` of our rows, from `start` on and `step` apart, that are consecutive rows of a foreign tensor."""

    source: str
    """The foreign tensor's name."""
    count: int
    start: int = 0
    step: int = 1
    source_start: int = 0
    """First row of the run in the foreign tensor."""
    transposed: bool = False
    """Our rows are the foreign tensor's columns."""
    source_index: tuple[int, ...] = ()
    """Indices along the first dimensions, if the foreign tensor is a stack, of layers or of experts."""
    index: int | None = None
    """Index along our first dimension, if our tensor is a stack of experts, whose rows these are. None for other
    tensors."""
    source_column: int = 0
    """The first element taken of each foreign row, of which our row may be a part."""
    scale: float = 1.0
    """Multiplies what is read."""

    def within(self, begin: int, end: int, index: int | None) -> Run:
        """Returns the part of the run that our rows ``[begin, end)`` have, as rows of entry `index` of a stack."""
        first = max(0, -(-(begin - self.start) // self.step))
        last = min(self.count, -(-(end - self.start) // self.step))
        start = self.start + first * self.step - begin
        return replace(self, count=last - first, start=start, source_start=self.source_start + first, index=index)


@dataclass(frozen=True)
class Recipe:
    """The rows of foreign tensors that form one of our tensors."""

    name: str
    """Our tensor's name in the model's state dict."""
    runs: tuple[Run, ...]
    padded: bool = False
    """Whether rows that no run names are zeros: entries of a vocabulary without a token."""


def foreign_shapes(recipes: Iterable[Recipe], ours: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every foreign tensor that the recipes name, from the shapes of our whole tensors."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for recipe in recipes:
        for run in recipe.runs:
            count = rows[run.source] = max(rows.get(run.source, 0), run.source_start + run.count)
            row = ours[recipe.name][1 if run.index is None else 2 :]
            rest = (run.source_column + row[0], *row[1:]) if row else ()
            leading = tuple(place + 1 for place in run.source_index)
            if run.source in shapes:
                shape_so_far = shapes[run.source]
                leading = tuple(map(max, zip(leading, shape_so_far[: len(leading)], strict=True)))
                before = shape_so_far[len(leading) : -1] if run.transposed else shape_so_far[len(leading) + 1 :]
                rest = tuple(map(max, zip(rest, before, strict=True)))
            shapes[run.source] = (*leading, *rest, count) if run.transposed else (*leading, count, *rest)
            if not ours[recipe.name]:  # a number
                shapes[run.source] = ()
    return shapes


def make_foreign(
    name: str, shape: Sequence[int], recipes: Iterable[Recipe], ours: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Builds one foreign tensor from our whole tensors, the inverse of :func:`load_foreign`."""
    parts = [(run, ours[recipe.name]) for recipe in recipes for run in recipe.runs if run.source == name]
    tensor = parts[0][1].new_empty(tuple(shape))
    for run, stack in parts:
        whole = stack if run.index is None else stack[run.index]
        box = _source_box(run, slice(0, run.count), [slice(0, size) for size in whole.shape[1:]])
        tensor[box].copy_(_transpose_if_columns(run, whole[run.start : run.start + run.count * run.step : run.step]))
    return tensor


def foreign_tensors(recipes: Iterable[Recipe], views: Mapping[str, torch.Tensor]) -> list[Outgoing]:
    """Returns what goes out as the foreign tensors that recipes name, in order, each made of one of ours."""
    recipes, outgoing = list(recipes), list[Outgoing]()
    shapes = foreign_shapes(recipes, {recipe.name: tuple(views[recipe.name].shape) for recipe in recipes})
    for recipe in recipes:
        for name in dict.fromkeys(run.source for run in recipe.runs):
            shape = shapes[name]
            is_same = recipe.runs == (Run(name, shape[0] if shape else 1),) and views[recipe.name].shape == shape
            make: Any = itemgetter(recipe.name) if is_same else partial(make_foreign, name, shape, [recipe])
            outgoing.append(Outgoing(name, shape, (recipe.name,), make))
    return outgoing


@torch.no_grad()
def load_foreign(
    targets: Mapping[str, torch.Tensor],
    recipes: Iterable[Recipe],
    index: CheckpointIndex,
    folder: Path,
    *,
    ignored_names: Iterable[str] = (),
    process_group: ProcessGroup | None = None,
) -> None:
    """Fills our tensors in place from a foreign checkpoint. Holds one piece of a foreign tensor at a time.

    Values are rounded to our dtype where both are floating point. Every rank of `process_group` calls it and reads by
    itself; ranks communicate only to agree on errors.

    Args:
        targets: tensors of the whole model by name, as `model_state_dict` or an optimizer gives them.
        recipes: one for each of `targets`.
        index: the index of the foreign checkpoint in `folder`.
        ignored_names: foreign tensors that no recipe has to name.

    Raises:
        CheckpointError: on all ranks, before anything is written. Names all tensors that are missing, left over or of
            another shape or kind; or one of ours that is on the meta device.
    """
    recipes = list(recipes)
    ranks = Ranks(process_group)
    ranks.on_all(lambda: _check(targets, recipes, index, folder, set(ignored_names)))
    source = BoxReader(folder, index)

    def fill_all() -> None:
        for recipe in recipes:
            _fill(targets[recipe.name], recipe, source)
            source.close_files()

    ranks.on_all(fill_all)


def _check(
    targets: Mapping[str, torch.Tensor], recipes: list[Recipe], index: CheckpointIndex, folder: Path, without: set[str]
) -> None:
    empty = [name for name, target in targets.items() if any(part.is_meta for _, part in held_boxes(target))]
    if empty:
        raise CheckpointError(f"{empty[0]} is on the meta device: nothing was loaded; wrap the model or call to_empty")
    names = {recipe.name for recipe in recipes}
    problems = [f"the model has no {name}" for name in sorted(names - targets.keys())]
    problems += [f"nothing there makes up {name}" for name in sorted(targets.keys() - names)]
    ours = [recipe for recipe in recipes if recipe.name in targets]
    shapes = foreign_shapes(ours, {name: tuple(tensor.shape) for name, tensor in targets.items()})
    problems += [f"missing there: {name}" for name in sorted(shapes.keys() - index.tensors.keys())]
    problems += [f"left over there: {name}" for name in sorted(index.tensors.keys() - shapes.keys() - without)]
    for name in sorted(shapes.keys() & index.tensors.keys()):
        entry = index.tensors[name]
        if entry.shape != shapes[name]:
            problems.append(f"{name} is {list(entry.shape)} there, and the model takes {list(shapes[name])}")
    for recipe in ours:
        target = targets[recipe.name]
        num_row_dims = 2 if any(run.index is not None for run in recipe.runs) else 1
        rows = math.prod(target.shape[:num_row_dims]) if target.dim() else 0
        num_foreign = sum(run.count for run in recipe.runs)
        if num_foreign != rows and (num_foreign > rows or not recipe.padded):
            problems.append(f"{recipe.name} has {rows} rows here, and {num_foreign} there")
        for name in sorted({run.source for run in recipe.runs} & index.tensors.keys()):
            dtype = index.tensors[name].dtype
            if dtype != target.dtype and not can_be_cast(dtype, target):
                problems.append(f"{name} is {dtype_name(dtype)} there, and {dtype_name(target.dtype)} in the model")
    refuse(f"{folder} is of another model, and nothing was loaded", problems)


def _fill(target: torch.Tensor, recipe: Recipe, source: BoxReader) -> None:
    for offsets, part in held_boxes(target):
        if recipe.padded:
            part.zero_()
        for run in recipe.runs if part.numel() else ():
            if run.index is None:
                _fill_rows(part, offsets, run, source)
            elif offsets[0] <= run.index < offsets[0] + part.shape[0]:
                _fill_rows(part[run.index - offsets[0]], offsets[1:], run, source)


def _fill_rows(part: torch.Tensor, offsets: Sequence[int], run: Run, source: BoxReader) -> None:
    own = run.within(offsets[0], offsets[0] + part.shape[0], run.index)
    if own.count <= 0:
        return
    rest = [slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True)]
    rows = part[own.start : own.start + (own.count - 1) * own.step + 1 : own.step]
    if run.source_column:
        rest[0] = slice(rest[0].start + run.source_column, rest[0].stop + run.source_column)
    rows.copy_(_transpose_if_columns(run, source.read(run.source, _source_box(own, slice(0, own.count), rest))))
    if run.scale != 1:
        rows.mul_(run.scale)


def _source_box(run: Run, rows: slice, rest: list[slice]) -> tuple[slice | int, ...]:
    """Returns the box of the foreign tensor with these rows of the run, and these elements of them."""
    own = slice(run.source_start + rows.start, run.source_start + rows.stop)
    box: list[slice | int] = [*rest, own] if run.transposed else [own, *rest]
    return (*run.source_index, *box)


def _transpose_if_columns(run: Run, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(0, -1) if run.transposed else tensor


class BoxReader(PieceReader):
    """Reads boxes of foreign tensors. A result may be a view of the file: do not write to it.

    Keeps files open for the boxes that follow.
    """

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        super().__init__(folder, index)
        # Open safetensors files by name; tensors read from them may be views of their pages. `close_files` clears it.
        self.files: dict[str, Any] = {}

    def close_files(self) -> None:
        """Closes all files: they are mapped, and pages that were read count as this process's memory while open."""
        self.files.clear()

    def read(self, name: str, box: tuple[slice | int, ...]) -> torch.Tensor:
        bounds = [(part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in box]
        offsets, sizes = [start for start, _ in bounds], [stop - start for start, stop in bounds]
        overlaps = list(self.overlaps(name, offsets, sizes))
        if len(overlaps) == 1:
            whole = self.piece_values(name, overlaps[0][0])[overlaps[0][2]]
        else:
            whole = torch.empty(sizes, dtype=self.index.tensors[name].dtype)
            for piece, inside, within in overlaps:
                whole[inside] = self.piece_values(name, piece)[within]
        values: torch.Tensor = whole[tuple(0 if isinstance(part, int) else slice(None) for part in box)]
        return values

    def piece_values(self, name: str, piece: Piece) -> Any:
        if self.index.encoding != "safetensors":
            return super().piece_values(name, piece)
        if piece.file not in self.files:
            self.files[piece.file] = open_safetensors(self.folder / piece.file)
        return self.files[piece.file].get_slice(name)
