"""Converts parameters to plain local tensors in fp32 or wider, which the update rules work on.

Update rules never see a DTensor, so torch's fused kernels run without a DTensor dispatch for each operation. Writes to
low-precision parameters by other code (a load, a clamp, an average) are detected: without that, the next step would
overwrite the new values from the fp32 masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from ..base.dtypes import LOW_PRECISION
from ..base.errors import OptimizerError
from ..base.parameters import local_part
from ..comm.lane import HostRead
from ..dist_checkpointing.global_view import global_view, noting_copy
from ..distributed.engine.gradients import read_gradient
from ..distributed.step_marks import reject_replaced


@dataclass(eq=False)
class MainParam:
    """One trainable parameter of the model, `param`, and `main`, the tensor that the optimizer updates for it.

    `main` is a detached view of this rank's part of the parameter (:meth:`local`). For a parameter in fp16 or bf16 it
    is an fp32 master copy, from which the parameter is refreshed after each step.

    This rank's part is the whole of a plain parameter, or the local shard of a DTensor. In the distributed optimizer
    it is a run of elements of a whole parameter (:class:`~shardstack.optimizer.main_ranges.MainRange`).
    """

    name: str
    """Name in the unwrapped model."""

    param: nn.Parameter
    """The model's parameter: plain, or a DTensor."""

    owner: nn.Module
    """The module that holds the parameter."""

    attribute: str
    """The parameter's name in `owner`."""

    has_master: bool = field(default=True, kw_only=True)
    """False makes `main` a view in low precision too: callers read gradients alone, or keep what a master would have
    elsewhere (`low_precision`)."""

    main: Tensor = field(init=False)
    """The tensor to update, in the shape of `local`. Set once. A view shares the parameter's memory, and is valid
    while the parameter keeps its storage, which `check_storage` checks. The optimizer owns a master's memory. ``grad``
    is set only during the update of a torch optimizer: `TorchRule.update` sets and clears it."""

    is_low_precision: bool = field(init=False)
    """Whether the parameter is in fp16 or bf16, so that its update needs more than its own bits. Fixed."""

    is_copied: bool = field(init=False)
    """Whether `main` is a master in memory of its own. Fixed."""

    rest: Tensor | None = field(default=None, init=False, repr=False)
    """`[n]`: the 16 bits that a parameter in bf16 lacks of its master. `low_precision` sets it once, where it keeps
    masters so."""

    _address: int = field(init=False)
    """Address of this rank's part of the parameter. `note_storage` sets it, when `main` is created and when a wrapper
    has brought the memory back. `check_storage` compares it."""

    def __post_init__(self) -> None:
        if self.param.is_complex():
            raise OptimizerError(
                f"parameter {self.name} is complex, which the norm and the update do not know; hold its real and "
                "imaginary parts in a real parameter, and view that with torch.view_as_complex"
            )
        local = self.local()
        if local.is_meta:
            raise OptimizerError(
                f"parameter {self.name} is on the meta device; materialise the model before its optimizer is built"
            )
        self.is_low_precision = local.dtype in LOW_PRECISION
        self.is_copied = self.is_low_precision and self.has_master
        self.main = local.detach().float() if self.is_copied else local.detach()
        self.note_storage()

    def note_storage(self) -> None:
        """Records where the parameter is now."""
        self._address = local_part(self.param).data_ptr()

    def local(self) -> Tensor:
        """Returns this rank's part of the parameter, sharing its storage."""
        return local_part(self.param).detach()  # the other order would cost a dispatch

    def local_gradient(self) -> Tensor | None:
        """Returns the gradient of this rank's part, in its shape, or None to leave the parameter out of the step."""
        grad = read_gradient(self.param)
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(self.param, DTensor) and grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        grad = local_part(grad)
        return grad.detach() if grad.requires_grad else grad

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Returns the groups whose ranks share the parameter's update.

        Raises:
            OptimizerError: the parameter is a partial sum.
        """
        if not isinstance(self.param, DTensor):
            return ()
        mesh, groups = self.param.device_mesh, []
        for axis, placement in enumerate(self.param.placements):
            if isinstance(placement, Partial):
                raise OptimizerError(
                    f"parameter {self.name} is a partial sum over axis {axis} of {mesh}; shard or replicate it there"
                )
            if not placement.is_replicate() and mesh.size(axis) > 1:
                groups.append(mesh.get_group(axis))
        return tuple(groups)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor in the shape of the parameter, or of a DTensor cut as it is."""
        if isinstance(self.param, DTensor) and not isinstance(whole, DTensor):  # without a source rank nothing is sent
            whole = distribute_tensor(whole, self.param.device_mesh, self.param.placements, src_data_rank=None)
        return local_part(whole.detach())

    def whole(self, state: Tensor) -> Tensor:
        """Views `state`, in the shape of `main`, as a tensor of the whole model for a checkpoint."""
        return noting_copy(global_view(self.param, state), self.param)

    def check_storage(self) -> None:
        """Raises if the parameter was moved after the optimizer was built, so that a stale tensor would be updated.

        Raises:
            OptimizerError: the module holds another parameter under this name, or the parameter another storage.
        """
        reject_replaced("the optimizer", self.param)
        parameter = self.owner._parameters.get(self.attribute)
        # While FSDP2 has a unit gathered, the module holds a plain parameter instead of the sharded one. If some ranks
        # keep the unit whole between forward and backward, it then holds a DTensor on the mesh of these ranks.
        is_replaced = parameter is not self.param and _mesh_of(parameter) == _mesh_of(self.param)
        if is_replaced or local_part(self.param).data_ptr() != self._address:
            raise OptimizerError(
                f"the storage of parameter {self.name} was replaced after the optimizer was built (a move to another "
                "device or dtype, a wrapper that moved it into its buffers, or a load with assign=True); build the "
                "optimizer afterwards, or load in place with shardstack.dist_checkpointing.load_model_state_dict"
            )

    def take_gradient(self) -> Tensor | None:
        """Returns this step's gradient, in the local shape and in its own dtype.

        Raises:
            OptimizerError: a sparse gradient, or one of another shape.
        """
        grad = self.local_gradient()
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise OptimizerError(f"parameter {self.name} has a sparse gradient; give sparse=False")
        if grad.shape != self.main.shape:
            raise OptimizerError(
                f"the gradient of parameter {self.name} has shape {list(grad.shape)} where this rank holds "
                f"{list(self.main.shape)} of the parameter; finish the gradient synchronisation before the step"
            )
        return grad


def _mesh_of(parameter: nn.Parameter | None) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def low_precision_weights(params: Sequence[MainParam]) -> dict[Tensor, Tensor]:
    """Returns this rank's part of each parameter in low precision by its master."""
    return {p.main: p.local() for p in params if p.is_copied}


def refresh_parameters(weights: Mapping[Tensor, Tensor]) -> None:
    """Writes masters, the keys, into their parameters in low precision."""
    if weights:
        torch._foreach_copy_(list(weights.values()), list(weights))


def refresh_masters(params: Sequence[MainParam]) -> None:
    """Writes the parameters in low precision into their masters."""
    low = [p for p in params if p.is_copied]
    if low:
        torch._foreach_copy_([p.main for p in low], [p.local() for p in low])
    for p in params:
        if p.rest is not None:
            p.rest.zero_()


class WrittenParams:
    """Compares low-precision parameters with their values when masters and parameters last agreed.

    It compares sums of the parameters' bits over short runs of elements, and the bits themselves where a parameter is
    small. Torch's count of in-place writes would be cheaper, but misses writes through ``.data``, and a checkpoint
    loader's writes to the local part of a DTensor. (Sums do not detect values that change places within their run
    alone. A run is shorter than a row, and no row is a multiple of it: exchanged rows or columns do show.)

    Args:
        params: the parameters that the optimizer updates.
    """

    def __init__(self, params: Sequence[MainParam]) -> None:
        watched = [p for p in params if p.is_copied or p.rest is not None]
        self._params: Final = [p for p in watched if p.main.numel()]
        # Sums of each parameter when masters and parameters last agreed, on its device. `note_agreement` sets them
        # without waiting for the device, `find_written` compares them.
        self._sums: list[Tensor] = []
        # Torch's counts of writes to each parameter then. `note_agreement` sets them too.
        self._counts: list[int] = []
        self.note_agreement()

    def note_agreement(self) -> None:
        """Records that masters and parameters agree. Call it after one was copied into the other."""
        self._sums, self._counts = self._sums_of_runs(), [p.param._version for p in self._params]

    def were_counted(self) -> bool:
        """Returns whether torch has counted a write since the last agreement. Waits for nothing."""
        return self._counts != [p.param._version for p in self._params]

    def held(self, params: Sequence[MainParam]) -> list[Tensor]:
        """Returns what some of the parameters are compared with."""
        return [sums for p, sums in zip(self._params, self._sums, strict=True) if p in params]

    @property
    def names(self) -> list[str]:
        """Names of the watched parameters."""
        return [p.name for p in self._params]

    def refresh_masters(self) -> None:
        """Copies values that other code has written to parameters into the masters.

        Waits for the device once. An element that still equals its rounded master keeps the master's full precision,
        because a checkpoint's weights may be loaded after its masters.
        """
        flags = self.find_written()
        if flags is None:
            return
        for p, is_written in zip(self._params, HostRead(flags).wait(), strict=True):
            if is_written and p.rest is not None:
                self._drop_rest(p, p.rest)
            elif is_written:
                local = p.local()
                p.main.copy_(torch.where(p.main.to(local.dtype) == local, p.main, local.float()))

    def _drop_rest(self, p: MainParam, rest: Tensor) -> None:
        """Zeroes the rest of a parameter's elements in the runs that were written since the last agreement."""
        runs = _in_runs(rest, p.local(), _row(p))
        changed = _sums_of_runs(p.local(), _row(p)) != self._sums[self._params.index(p)]
        for part, is_changed in zip(runs, changed.split([len(part) for part in runs]), strict=True):
            part[is_changed] = 0

    def find_written(self) -> Tensor | None:
        """Returns which parameters were written since the last agreement, or None if none is watched.

        Returns:
            bools `[len(names)]` on the device.
        """
        if not self._params:
            return None
        device = self._params[0].main.device
        pairs = zip(self._sums_of_runs(), self._sums, strict=True)
        return torch.stack([(now != before).any().to(device) for now, before in pairs])

    def _sums_of_runs(self) -> list[Tensor]:
        return [_sums_of_runs(p.local(), _row(p)) for p in self._params]


def _row(p: MainParam) -> int:
    """Returns the number of elements in a row of a parameter, 1 in a vector."""
    return p.param.shape[-1] if p.param.ndim > 1 else 1


_WORDS_COMPARED = 4096
"""Largest size, in 8-byte words, of a tensor that is compared word by word, because its copy is small."""

_WORDS_OF_RUN = 125
"""Words in a run. Odd, so that columns that change places cross the ends of runs. Longer runs are hardly faster."""


def _in_runs(flat: Tensor, tensor: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of a flat tensor: `[runs, elements]`, and the elements before and after these.

    Args:
        tensor: 16-bit tensor of as many elements, whose words make the runs.
        row: number of elements in a row of the parameter, 1 in a vector; runs are shorter, or single words.
    """
    start = min(int(-tensor.storage_offset() % 4), len(flat))
    words = (len(flat) - start) // 4
    run = 1 if words <= _WORDS_COMPARED else max(1, min(_WORDS_OF_RUN, row // 4 - 1 | 1))
    stop = start + words // run * run * 4
    return flat[start:stop].view(-1, 4 * run), flat[:start], flat[stop:]


def _sums_of_runs(tensor: Tensor, row: int) -> Tensor:
    """Returns the sums of a 16-bit tensor's bits over runs of eight-byte words, and the remainders at its ends.

    Returns:
        `[runs + rest]` in int64.
    """
    bits = tensor.detach().reshape(-1).view(torch.int16)
    in_runs, before, after = _in_runs(bits, tensor, row)
    return torch.cat([in_runs.view(torch.int64).sum(1), before, after])
