"""Brings each matrix of a sharded model whole to one rank, its owner, and sends the result to the ranks that hold it.

Ranks say at the start which boxes of each parameter they hold, as a checkpoint would store them. Nothing else is known
of wrappers, so that every cut takes the same path: rows, runs of elements, tensor-parallel and expert-parallel parts,
replicas. Matrices are exchanged in buckets by all-to-all, two for each: to the owners, and back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import OptimizerError
from ...comm.call import Wait
from ...comm.collectives import all_to_all_by_backend
from ...dist_checkpointing.agreement import Ranks, held_parts
from ...dist_checkpointing.gathering import in_buckets
from .matrices import Matrix, cost

BUCKET_ELEMENTS = 2**23
"""Elements for each rank that a bucket has at most. A larger parameter is a bucket of its own."""

Box = tuple[int, int, int, int]
"""First row, end row, first column and end column of a part of a parameter's `[rows, columns]`."""


def boxes_of(whole: Tensor) -> list[Box]:
    """Returns the boxes of a whole-model tensor that this rank holds, in the order of its memory."""
    boxes: list[Box] = []
    for offsets, sizes in held_parts(whole):
        *outer, first, column = (0, *offsets) if len(offsets) == 2 else offsets
        num_rows, num_columns = sizes[-2:]
        for batch in range(math.prod(sizes[:-2])):
            start = (sum(outer) + batch) * whole.shape[-2] + first
            boxes.append((start, start + num_rows, column, column + num_columns))
    return boxes


@dataclass(frozen=True, eq=False)
class _Part:
    """The part of a matrix that is in a box."""

    matrix: int
    box: Box
    first: int
    end: int
    """The matrix's rows ``[first, end)`` are in the box."""
    rows: slice | Tensor
    """Where the matrix's rows are in the box."""
    starts: dict[int, int]
    """By rank that holds the box: its first element in the rank's memory of the parameter."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.first, self.box[3] - self.box[2]

    @property
    def window(self) -> tuple[slice, slice]:
        """The part's place in the matrix."""
        return slice(self.first, self.end), slice(*self.box[2:])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_Route = tuple[list[list[_Part]], list[list[_Part]], bool]
"""The parts that this rank sends and receives in one all-to-all, by the other rank, and whether any rank sends
something to another one."""


Arrival = Wait[Iterable[tuple[_Part, Tensor]]]
"""The wait for the parts that this rank receives in an exchange, each with its `[rows, columns]`."""


class MatrixOwners:
    """The owner of each matrix, and the exchanges between owners and the ranks that hold its parts.

    Args:
        matrices: all matrices, equal on every rank.
        wholes: by name, whole-model view of each parameter, as `MainParam.whole` returns it.
        group: ranks that hold parts; None is this rank alone. All of them make an instance together.
        device: device of the exchanged tensors.

    Attributes:
        owners: rank in the group of each matrix's owner.
        buckets: indices of the parameters of each bucket, the largest first.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        wholes: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._matrices, self._group, self.device = matrices, group, device
        ranks = Ranks(group, alone=group is None)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        starts = _starts_by_box(ranks.all_gather([boxes_of(whole) for whole in wholes.values()]))
        self._parts = [_parts_of(index, matrix, starts[matrix.param]) for index, matrix in enumerate(matrices)]
        for matrix, parts in zip(matrices, self._parts, strict=True):
            if sum(part.numel for part in parts) != math.prod(matrix.shape):
                raise OptimizerError(
                    f"the ranks that share parameter {[*wholes][matrix.param]} hold parts that do not make it up; "
                    "wrap the model so that each element is on one rank and its replicas"
                )
        costs = [cost(matrix.shape) for matrix in matrices]
        holders = [sorted(set.intersection(*(set(part.starts) for part in parts))) for parts in self._parts]  # of all
        self.owners = assign_owners(costs, holders, self.num_ranks)
        # Rows that are no slice, on the device of the memory that they index. `_at` adds; nothing clears.
        self._indices: dict[_Part, Tensor] = {}
        of_param: list[list[int]] = [[] for _ in wholes]
        for index, matrix in enumerate(matrices):
            of_param[matrix.param].append(index)
        sizes = [whole.numel() for whole in wholes.values()]
        order = sorted(range(len(sizes)), key=lambda param: -sum(costs[index] for index in of_param[param]))
        self.buckets = in_buckets([(param, sizes[param]) for param in order], BUCKET_ELEMENTS * self.num_ranks)
        # Of each bucket: the routes to the owners and back.
        self._routes: Final = [self._make_routes([m for p in bucket for m in of_param[p]]) for bucket in self.buckets]

    def start_bringing(self, bucket: int, memory: Mapping[int, Tensor], dtype: torch.dtype) -> Arrival:
        """Starts to bring a bucket's matrices, in `dtype`, to their owners.

        Args:
            memory: this rank's elements of each parameter of the bucket, `[n]`.
        """

        def read(part: _Part) -> Tensor:
            elements, rows = self._at(part, memory)
            return elements[rows]

        return self._start(self._routes[bucket][0], read, dtype, "matrices to their owners")

    def take(self, arrival: Arrival) -> dict[int, Tensor]:
        """Returns the matrices that this rank owns, by index, when they have arrived."""
        matrices: dict[int, Tensor] = {}
        for part, values in arrival():
            if part.matrix not in matrices:
                matrices[part.matrix] = values.new_empty(self._matrices[part.matrix].shape)
            matrices[part.matrix][part.window] = values
        return matrices

    def start_returning(self, bucket: int, matrices: dict[int, Tensor], dtype: torch.dtype) -> Arrival:
        """Starts to send a bucket's matrices, in `dtype`, from their owners to all ranks that hold parts."""
        route = self._routes[bucket][1]
        return self._start(route, lambda part: matrices[part.matrix][part.window], dtype, "matrices from their owners")

    def put(self, arrival: Arrival, memory: Mapping[int, Tensor], factors: Sequence[float]) -> None:
        """Writes what has arrived into this rank's elements of the parameters.

        Args:
            memory: as of `start_bringing`.
            factors: factor of each matrix, in the dtype of the memory.
        """
        for part, values in arrival():
            elements, rows = self._at(part, memory)
            if factors[part.matrix] != 1.0:
                values = values.to(elements.dtype) * factors[part.matrix]
            elements[rows] = values if isinstance(rows, slice) else values.to(elements.device, elements.dtype)

    def _at(self, part: _Part, memory: Mapping[int, Tensor]) -> tuple[Tensor, slice | Tensor]:
        """Returns the box in this rank's memory, `[rows, columns]`, and which of its rows are the part's."""
        top, bottom, left, right = part.box
        shape, start = (bottom - top, right - left), part.starts[self.rank]
        elements = memory[self._matrices[part.matrix].param][start : start + math.prod(shape)].view(shape)
        if isinstance(part.rows, slice):
            return elements, part.rows
        if part not in self._indices:
            self._indices[part] = part.rows.to(elements.device)
        return elements, self._indices[part]

    def _start(self, route: _Route, read: Callable[[_Part], Tensor], dtype: torch.dtype, what: str) -> Arrival:
        sends, receives, crosses_ranks = route
        values = [read(part).reshape(-1).to(self.device, dtype) for to_rank in sends for part in to_rank]
        arriving = torch.cat(values) if values else torch.empty(0, dtype=dtype, device=self.device)
        work: dist.Work | None = None
        if self._group is not None and crosses_ranks:
            into, out = ([sum(part.numel for part in parts) for parts in side] for side in (receives, sends))
            leaving, arriving = arriving, arriving.new_empty(sum(into))
            work = all_to_all_by_backend(arriving, leaving, self._group, what=what, sizes=(into, out), async_op=True)
        parts = list(itertools.chain(*receives))

        def arrive() -> Iterable[tuple[_Part, Tensor]]:
            if work is not None:
                work.wait()
            flat = arriving.split([part.numel for part in parts])
            return ((part, numbers.view(part.shape)) for part, numbers in zip(parts, flat, strict=True))

        return arrive

    def _make_routes(self, indices: Sequence[int]) -> tuple[_Route, _Route]:
        parts = [(part, self.owners[index]) for index in indices for part in self._parts[index]]
        # The owner itself, or the holder that is nearest to it.
        to_owners = [(part, min(part.starts, key=lambda at: (abs(at - owner), at)), owner) for part, owner in parts]
        to_holders = [(part, owner, holder) for part, owner in parts for holder in part.starts]
        return self._route(to_owners), self._route(to_holders)

    def _route(self, transfers: Sequence[tuple[_Part, int, int]]) -> _Route:
        """Returns what this rank sends and receives of transfers, each with its source and target."""
        sends: list[list[_Part]] = [[] for _ in range(self.num_ranks)]
        receives: list[list[_Part]] = [[] for _ in range(self.num_ranks)]
        for part, source, target in transfers:
            if source == self.rank:
                sends[target].append(part)
            if target == self.rank:
                receives[source].append(part)
        return sends, receives, any(source != target for _, source, target in transfers)


def assign_owners(costs: Sequence[int], holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Returns the owner of each matrix: the largest first, each to the rank that has least (Graham, 1969).

    A rank that holds a whole matrix owns it while it has less than its share, as nothing is sent to it then. If every
    matrix is whole on some rank, none is sent to another one.

    Args:
        holders: ranks that hold each matrix whole.
    """
    load, owners = [0] * num_ranks, [0] * len(costs)
    share, stay = sum(costs) / num_ranks, all(holders)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        near = [rank for rank in holders[index] if stay or load[rank] + costs[index] <= share]
        owners[index] = min(near or range(num_ranks), key=load.__getitem__)
        load[owners[index]] += costs[index]
    return owners


def _starts_by_box(of_ranks: Sequence[Sequence[Sequence[Box]]]) -> list[dict[Box, dict[int, int]]]:
    """Returns for each parameter its boxes. For each box, by rank that holds it, its place in the rank's memory.

    Args:
        of_ranks: boxes by rank and parameter, in the order of the rank's memory.
    """
    starts: list[dict[Box, dict[int, int]]] = [{} for _ in of_ranks[0]]
    for rank, of_rank in enumerate(of_ranks):
        for of_param, boxes in zip(starts, of_rank, strict=True):
            start = 0
            for box in boxes:
                of_param.setdefault(box, {})[rank] = start
                start += (box[1] - box[0]) * (box[3] - box[2])
    return starts


def _parts_of(index: int, matrix: Matrix, starts: dict[Box, dict[int, int]]) -> list[_Part]:
    rows = [torch.tensor([box[end] for box in starts], dtype=torch.int64) for end in (0, 1)]
    firsts, ends = (torch.searchsorted(matrix.rows.contiguous(), bounds).tolist() for bounds in rows)
    spans = zip(starts.items(), firsts, ends, strict=True)
    return [
        _Part(index, box, first, end, _as_slice(matrix.rows[first:end] - box[0]), ranks)
        for (box, ranks), first, end in spans
        if first < end
    ]


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Returns ascending rows as a slice if they are equally far apart, which copies faster."""
    first, last, step = int(rows[0]), int(rows[-1]), int(rows[1] - rows[0]) if len(rows) > 1 else 1
    return slice(first, last + 1, step) if torch.equal(rows, torch.arange(first, last + 1, step)) else rows
