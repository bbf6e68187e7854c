"""One parameter's place in a bucket, where its gradient is accumulated and reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...base._torch_compat import current_backward
from ...base.errors import ShardstackError, WrapError

_ALLOCATION_ALIGNMENT = 64
"""Bytes, of every tensor that torch allocates on the CPU. `PARAM_ALIGNMENT` elements are aligned so too."""


@dataclass(eq=False, slots=True)
class GradSlot:
    """One parameter's place in a bucket.

    ``param.main_grad`` is a view of the place while its values count, and else None: the first gradient is then
    copied into the place instead of added to zeros. Only methods of this class change the state: autograd's thread
    during a backward, the main thread between steps, never both at once.
    """

    param: nn.Parameter
    name: str
    """The parameter's name in the model, for messages."""

    start: int
    end: int
    """Elements ``[start, end)`` of the bucket."""

    grad_dtype: torch.dtype
    """Dtype of `view`."""

    allocate: Callable[[], None]
    """Allocates the bucket's whole gradient and calls `hold` of each slot of the bucket."""

    accumulates_in_fp32: bool = False
    """``param.main_grad`` is `accumulator`. Its values are rounded into `view` when the bucket is reduced."""

    kept: tuple[int, int] = (0, 0)
    """Elements ``[start, end)`` of this rank's shard of the bucket that are of this parameter."""

    first: int = 0
    """Place in the flattened parameter of the first of the elements `kept`."""

    accumulator: Tensor | None = None
    """fp32, in the parameter's shape, owned by the slot. None unless `accumulates_in_fp32`. Allocated when a gradient
    arrives, freed by `release`. Where the bucket keeps whole gradients, it stays allocated from step to step."""

    view: Tensor | None = None
    """The parameter's part of the bucket's whole gradient, in the parameter's shape. The bucket or its buffer owns the
    memory. `hold` sets it when the bucket gets the memory, `release` clears it."""

    counts: bool = False
    """Whether the values in memory are those of this step, to which the next gradient is added: gradients, or zeros of
    a new buffer, for a layer that adds in its own backward, or to send an incomplete bucket. Ends when the values are
    sent and released or set aside, and with the step."""

    has_arrived: bool = False
    """Whether a gradient has arrived in this step, also if it was sent and released since. `clear` ends it."""

    borrower: int | None = None
    """The backward that computes the gradient in the memory: `lend` sets it. It ends when the gradient arrives. After
    a backward that raised it ends when gradients are cleared, or the bucket is sent."""

    is_written_by_layer: bool = False
    """Whether a layer's backward adds into ``main_grad`` itself, which must then exist and be zeroed. The first such
    gradient sets it, or the wrapper when it is built. Never cleared."""

    @property
    def main_grad_dtype(self) -> torch.dtype:
        """Dtype of ``param.main_grad``."""
        return torch.float32 if self.accumulates_in_fp32 else self.grad_dtype

    @property
    def has_gradient(self) -> bool:
        """Whether an optimizer has to read a gradient of this parameter.

        True for a trainable parameter, whose gradient is zero if no backward reached it. For a frozen parameter true
        if a gradient arrived before it was frozen.
        """
        return self.param.requires_grad or self.has_arrived

    # ---- memory

    def check_size(self) -> None:
        """Raises if the parameter has another size than when the model was wrapped.

        Raises:
            WrapError: names it.
        """
        if self.param.numel() != self.end - self.start:
            raise WrapError(
                f"parameter {self.name} has the shape {list(self.param.shape)}, and had {self.end - self.start} "
                "elements when the model was wrapped; resize it before"
            )

    def view_of(self, memory: Tensor) -> Tensor:
        """Returns the slot's part of `memory` `[numel]`, in the parameter's shape."""
        self.check_size()
        return memory[self.start : self.end].view(self.param.shape)

    def hold(self, data: Tensor) -> None:
        """Makes `view` the slot's part of the bucket's whole gradient `data` `[numel]`."""
        self.view = self.view_of(data)
        if self.accumulates_in_fp32:
            self.param.main_grad_copy_in_grad_buffer = self.view  # type: ignore[attr-defined]

    def release(self) -> None:
        """Drops the memory, after its values were sent."""
        self.view = self.accumulator = self.param.main_grad = None  # type: ignore[attr-defined]
        self.counts = False
        if self.accumulates_in_fp32:
            self.param.main_grad_copy_in_grad_buffer = None  # type: ignore[attr-defined]

    def restart(self) -> None:
        """Keeps the memory, whose values were set aside. The next gradient is copied over them."""
        self.counts = False
        self.param.main_grad = None  # type: ignore[attr-defined]

    def memory(self) -> Tensor:
        """Returns the memory in which the gradient accumulates, allocated if it was released."""
        memory = self.accumulator if self.accumulates_in_fp32 else self.view
        if memory is not None:
            return memory
        if self.accumulates_in_fp32:
            self.accumulator = torch.zeros(self.param.shape, dtype=torch.float32, device=self.param.device)
            return self.accumulator
        self.allocate()  # calls `hold`
        return self.view  # type: ignore[return-value]

    # ---- gradients that arrive

    def lend(self) -> Tensor | None:
        """Lends ``main_grad`` to a layer, which computes a gradient in it. Returns None if it cannot be lent.

        It cannot be lent if it holds a gradient already, has another dtype than the parameter, or is lent already. Nor
        if it is less aligned than an allocation of torch: the last bits of a matrix product depend on the alignment,
        and results would differ between sharding strategies, which place parameters at different addresses.
        """
        if self.borrower is not None or self.counts or self.param.dtype != self.main_grad_dtype:
            return None
        memory = self.memory()
        if memory.data_ptr() % _ALLOCATION_ALIGNMENT:
            return None
        self.borrower = current_backward()
        return memory.detach()  # autograd copies a gradient that has other references, so not the view

    def take_back(self) -> None:
        """Ends a loan of `lend`, when the gradient arrives.

        Raises:
            ShardstackError: another backward has borrowed the memory and has not returned it.
        """
        if self.borrower not in (None, current_backward()):
            raise ShardstackError(
                f"parameter {self.name} got a gradient while another backward had begun to compute one and has not "
                "brought it: a checkpoint with use_reentrant=True inside (use False), or a backward that raised (call "
                "zero_grad_buffer); or set gradient_accumulation_fusion to False"
            )
        self.borrower = None

    def add(self, gradient: Tensor) -> None:
        """Adds a dense or sparse `gradient` into ``main_grad``. Does nothing if it was computed in that memory."""
        memory = self.param.main_grad = self.memory()  # type: ignore[attr-defined]
        if gradient.is_sparse:
            if not self.counts:
                memory.zero_()
            memory.add_(gradient.coalesce())  # each row once, so that it is rounded as if it were dense
        elif gradient.data_ptr() == memory.data_ptr():
            pass
        elif self.counts:
            memory.add_(gradient)
        else:
            memory.copy_(gradient)
        self.counts = self.has_arrived = True

    def note_written_by_layer(self) -> None:
        """Remembers that a layer adds this parameter's gradient itself, from now on into zeroed memory."""
        self.counts = self.has_arrived = self.is_written_by_layer = True

    # ---- steps

    def clear(self) -> None:
        """Makes the gradient zero without touching its memory: ``main_grad`` is None until one arrives."""
        if self.counts:  # else it is None already
            self.param.main_grad = None  # type: ignore[attr-defined]
        self.counts, self.has_arrived, self.borrower = False, False, None

    def zero(self, *, writes: bool = True) -> None:
        """Exposes zeros as ``main_grad``, to which the next backward adds, or a layer itself.

        Args:
            writes: False for memory that is zero: a system backs it with pages when it is first written to.
        """
        self.param.main_grad = memory = self.memory()  # type: ignore[attr-defined]
        self.counts, self.borrower = True, None
        if writes:
            memory.zero_()

    def complete(self) -> None:
        """Zeros the gradient if none has arrived, and rounds the accumulator into `view`."""
        if not self.counts:
            self.zero()
        if self.accumulator is not None:
            if self.view is None:
                self.allocate()
            self.view.copy_(self.accumulator)  # type: ignore[union-attr]
