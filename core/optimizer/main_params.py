"""A parameter as the update sees it: a plain local tensor, fp32 at least, with its gradient beside it.

The update never meets a DTensor, so torch's fused kernels run on it without a dispatch per operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import OptimizerError

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class MainParam:
    """One trainable parameter of the model, `param`, and `main`, the tensor that the optimizer updates for it.

    `main` is a detached view that shares the storage of the parameter's local shard; for a parameter in fp16 or bf16
    it is an fp32 master copy, from which the parameter is refreshed after each step. Either has the local shape.
    """

    name: str
    """Name in the unwrapped model."""

    param: nn.Parameter
    """The model's parameter: plain, or a DTensor of which this rank holds a shard."""

    owner: nn.Module
    """The module that holds the parameter."""

    attribute: str
    """The parameter's name in `owner`."""

    main: Tensor = field(init=False)
    _data_ptr: int = field(init=False)

    def __post_init__(self) -> None:
        local = self.local()
        if local.is_meta:
            raise OptimizerError(
                f"parameter {self.name} is on the meta device; materialise the model before its optimizer is built"
            )
        self.main = local.detach().float() if self.is_low_precision else local.detach()
        self._data_ptr = local.data_ptr()

    @property
    def is_low_precision(self) -> bool:
        """Whether `main` is an fp32 master copy instead of a view."""
        return self.param.dtype in _LOW_PRECISION

    def local(self) -> Tensor:
        """This rank's part of the parameter, sharing its storage."""
        return _local(self.param.detach())

    def check_storage(self) -> None:
        """Raises where the parameter has moved since the optimizer was built, which would update a stale tensor.

        Raises:
            OptimizerError: the module holds another parameter under this name, or the parameter another storage.
        """
        held = self.owner._parameters.get(self.attribute)
        # While FSDP2 has a unit gathered, the module holds a plain parameter in place of the sharded one.
        replaced = held is not self.param and isinstance(held, DTensor) == isinstance(self.param, DTensor)
        local = self.local()
        if replaced or local.data_ptr() != self._data_ptr:
            raise OptimizerError(
                f"the storage of parameter {self.name} was replaced after the optimizer was built (a move to another "
                "device or dtype, or a load with assign=True); build the optimizer afterwards, or load in place with "
                "core.dist_checkpointing.load_model_state_dict"
            )

    def take_gradient(self) -> Tensor | None:
        """This step's gradient, in the local shape and the dtype of `main`; a copy only where the dtype differs.

        Raises:
            OptimizerError: a sparse gradient, or one of another shape.
        """
        grad: Tensor | None = getattr(self.param, "main_grad", None)
        if grad is None:
            grad = self.param.grad
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(self.param, DTensor) and grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        grad = _local(grad.detach())
        if grad.layout != torch.strided:
            raise OptimizerError(
                f"parameter {self.name} has a sparse gradient; the optimizer takes dense ones (sparse=False)"
            )
        if grad.shape != self.main.shape:
            raise OptimizerError(
                f"the gradient of parameter {self.name} has shape {list(grad.shape)} where this rank holds "
                f"{list(self.main.shape)} of the parameter; finish the gradient synchronisation before the step"
            )
        return grad.to(self.main.dtype)


def refresh_parameters(params: list[MainParam]) -> None:
    """Writes the masters into the parameters in low precision that they stand for."""
    copied = [p for p in params if p.is_low_precision]
    if copied:
        torch._foreach_copy_([p.local() for p in copied], [p.main for p in copied])


def refresh_masters(params: list[MainParam]) -> None:
    """Writes the parameters in low precision into their masters."""
    copied = [p for p in params if p.is_low_precision]
    if copied:
        torch._foreach_copy_([p.main for p in copied], [p.local() for p in copied])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
