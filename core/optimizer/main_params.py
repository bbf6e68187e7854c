"""A parameter as the update sees it: a plain local tensor, fp32 at least, with its gradient.

The update never meets a DTensor, so torch's fused kernels run on it without a dispatch per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from ..diagnostics.stale_optimizers import reject_replaced
from ..dist_checkpointing.views.global_view import global_view
from ..distributed.parameter_owner import read_gradient
from ..dtensors import local_part
from ..errors import OptimizerError

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class MainParam:
    """One trainable parameter of the model, `param`, and `main`, the tensor that the optimizer updates for it.

    `main` is a detached view that shares the storage of what this rank updates of the parameter (:meth:`local`); for
    a parameter in fp16 or bf16 it is an fp32 master copy, from which the parameter is refreshed after each step.

    What this rank updates is here all that it holds: the whole of a plain parameter, or its shard of a DTensor. The
    distributed optimizer updates a run of elements of a parameter that all ranks hold
    (:class:`~core.optimizer.distrib_optimizer.MainRange`); everything else treats both equally.
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
    """False: `main` is a view in low precision too, where gradients are read and nothing is updated."""

    main: Tensor = field(init=False)
    """In the shape of `local`. A view is valid while the parameter keeps its storage, which `check_storage` checks; a
    master is the optimizer's own memory. Its ``grad`` is set during the update alone."""

    _address: int = field(init=False)
    """Address of this rank's part of the parameter when `main` was made; `check_storage` compares it."""

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
        self.main = local.detach().float() if self.is_low_precision and self.has_master else local.detach()
        self._address = local_part(self.param).data_ptr()

    @property
    def is_low_precision(self) -> bool:
        """Whether the parameter is in fp16 or bf16, so that its update takes an fp32 master."""
        return self.local().dtype in _LOW_PRECISION

    def local(self) -> Tensor:
        """Returns what this rank updates of the parameter, sharing its storage."""
        return local_part(self.param).detach()  # the other order would cost a dispatch

    def local_gradient(self) -> Tensor | None:
        """Returns the gradient of what this rank updates, in the same shape; None leaves the parameter out of the
        step."""
        grad = read_gradient(self.param)
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(self.param, DTensor) and grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        return local_part(grad).detach()

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Returns the groups over whose ranks together the parameter is updated once.

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

    def whole(self, state: Tensor) -> Tensor:
        """Returns `state`, in the shape of `main`, as the tensor of the whole model for a checkpoint; shares its
        storage."""
        return global_view(self.param, state)

    def check_storage(self) -> None:
        """Raises where the parameter has moved since the optimizer was built, which would update a stale tensor.

        Raises:
            OptimizerError: the module holds another parameter under this name, or the parameter another storage.
        """
        reject_replaced("the optimizer", self.param)
        held = self.owner._parameters.get(self.attribute)
        # While FSDP2 has a unit gathered, the module holds a plain parameter in place of the sharded one; between
        # forward and backward of a unit that a part of the ranks keeps whole, a DTensor on the mesh of those.
        replaced = held is not self.param and _mesh_of(held) == _mesh_of(self.param)
        if replaced or local_part(self.param).data_ptr() != self._address:
            raise OptimizerError(
                f"the storage of parameter {self.name} was replaced after the optimizer was built (a move to another "
                "device or dtype, a wrapper that moved it into its buffers, or a load with assign=True); build the "
                "optimizer afterwards, or load in place with core.dist_checkpointing.load_model_state_dict"
            )

    def take_gradient(self) -> Tensor | None:
        """Returns this step's gradient, in the local shape.

        Raises:
            OptimizerError: a sparse gradient, or one of another shape.
        """
        grad = self.local_gradient()
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise OptimizerError(
                f"parameter {self.name} has a sparse gradient; the optimizer takes dense ones (sparse=False)"
            )
        if grad.shape != self.main.shape:
            raise OptimizerError(
                f"the gradient of parameter {self.name} has shape {list(grad.shape)} where this rank holds "
                f"{list(self.main.shape)} of the parameter; finish the gradient synchronisation before the step"
            )
        return grad


def _mesh_of(parameter: nn.Parameter | None) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def take_gradients(params: Sequence[MainParam]) -> list[Tensor | None]:
    """Returns the gradients of a step in the dtypes of the main tensors; copies where that differs, all at once.

    Raises:
        OptimizerError: as `MainParam.take_gradient`.
    """
    grads = [p.take_gradient() for p in params]
    cast = [i for i, grad in enumerate(grads) if grad is not None and grad.dtype != params[i].main.dtype]
    if cast:
        sources = [grad for i in cast if (grad := grads[i]) is not None]
        copies = [torch.empty_like(grad, dtype=params[i].main.dtype) for i, grad in zip(cast, sources, strict=True)]
        torch._foreach_copy_(copies, sources)
        for i, copy in zip(cast, copies, strict=True):
            grads[i] = copy
    return grads


def refresh_parameters(params: Sequence[MainParam]) -> None:
    """Writes the masters into their parameters in low precision."""
    copied = [p for p in params if p.is_low_precision]
    if copied:
        torch._foreach_copy_([p.local() for p in copied], [p.main for p in copied])


def refresh_masters(params: Sequence[MainParam]) -> None:
    """Writes the parameters in low precision into their masters."""
    copied = [p for p in params if p.is_low_precision]
    if copied:
        torch._foreach_copy_([p.main for p in copied], [p.local() for p in copied])
