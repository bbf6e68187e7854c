"""A bucket of a flat buffer: where each gradient is in it, and which has arrived."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from ..._torch_compat import current_backward
from ...errors import ShardstackError
from ...host_memory import passing_memory
from ..plan.buffers import is_expert_parameter
from ..plan.layout import BucketLayout

_ALLOCATION_ALIGNMENT = 64
"""Bytes, of every tensor that torch allocates on the CPU. What is aligned to `PARAM_ALIGNMENT` elements is so too."""


class Content(Enum):
    """What a parameter's place in a bucket holds."""

    NOTHING = "nothing"
    """What is in memory is of an earlier step: the first gradient replaces it."""

    ZEROS = "zeros"
    """Zeros to add to; no gradient has arrived."""

    GRADIENT = "gradient"
    """The sum of what has arrived."""

    SENT = "sent"
    """Nothing: the gradient that had arrived was reduced, and its memory released."""

    @property
    def counts(self) -> bool:
        """Whether the next gradient is added to what is in memory, rather than replacing it."""
        return self in (Content.ZEROS, Content.GRADIENT)

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has come since the last `Bucket.clear_grads`."""
        return self in (Content.GRADIENT, Content.SENT)

    def zeroed(self) -> Content:
        """The content once memory that did not count was made zero."""
        return Content.GRADIENT if self.has_arrived else Content.ZEROS

    def released(self) -> Content:
        """The content once its memory is gone."""
        return Content.SENT if self.has_arrived else Content.NOTHING


@dataclass(eq=False, slots=True)
class GradSlot:
    """One parameter's place in a bucket.

    ``param.main_grad`` is a view of it: zeros at first, or None after `Bucket.clear_grads` until a gradient arrives,
    which is then copied instead of added to zeros.
    """

    param: nn.Parameter
    name: str
    start: int
    end: int
    accumulates_in_fp32: bool = False
    """``param.main_grad`` is `accumulator`; its values are rounded into `view` when the bucket is reduced."""

    accumulator: Tensor | None = None
    """fp32, of the parameter's shape; allocated when a gradient arrives, freed with the bucket's whole gradients."""

    view: Tensor | None = None
    content: Content = Content.NOTHING
    """Changed by the methods of its bucket alone, on the thread that runs backward or between steps."""

    is_written_by_layer: bool = False
    """A layer adds into ``main_grad`` itself, in its backward, and must find it there, zeroed."""

    lent_to: int | None = None
    """The backward that computes a gradient in `view` (`Bucket.lend`), until it brings the parameter's."""


class FlatMemory:
    """What buckets are parts of: a `ParamAndGradBuffer`, which sets all of this when it is built."""

    names: list[str]
    params: list[nn.Parameter]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    shard_grad_dtype: torch.dtype
    """Of a reduced shard that has memory of its own."""
    device: torch.device
    shard_device: torch.device
    """Of shards that have memory of their own: the host's, where they are offloaded."""
    num_shards: int
    shard_index: int
    accumulated_in_fp32: frozenset[str]
    param_data: Tensor | None
    """`[numel]`, or None where parameters keep their own memory."""
    grad_data: Tensor | None
    """`[numel]`, or None where whole gradients are released."""
    reuses_grads: bool = False
    """Memory of released gradients is given back, for another bucket."""

    def take_grads(self, numel: int) -> Tensor:
        """`[numel]`, of any values, for the whole gradient of a bucket that releases it."""
        return passing_memory(numel, self.grad_dtype, self.device)

    def give_back_grads(self, whole: Tensor) -> None:
        """Takes back what `take_grads` gave, once nothing reads or writes it; without it, it is freed."""

    @property
    def holds_experts(self) -> bool:
        """Whether its parameters carry Megatron-LM's mark of experts; those with and without share no buffer."""
        return is_expert_parameter(self.params[0])


class Bucket:
    """A part of a buffer: the parameters whose gradients are reduced, and that are gathered, in one collective.

    Attributes:
        params: its parameters, in the order in which they lie.
        layout: its place in the buffer, and theirs in it.
        offset: its first element in the buffer.
        numel: its elements, padding included, a multiple of the number of shards.
        param_data: `[numel]`, of which the parameters are views; None where parameters keep their own memory.
        local_param_shard: `[numel / shards]`, this rank's part of `param_data`, which its optimizer updates.
        grad_data: `[numel]`, whole gradients; None while `releases_grads` and none are held.
        separate_shard: `[numel / shards]`, `local_grad_shard` where it has memory of its own, while it has.
        layerwise_gather_list: Megatron-LM's; memory that a caller who gathers parameters itself may leave here, until
            `free_overlap_buffers`.
    """

    layerwise_gather_list: list[Tensor] | None = None

    def __init__(self, buffer: FlatMemory, layout: BucketLayout) -> None:
        self.buffer = buffer
        self.layout = layout
        self.offset, self.numel = layout.start, layout.end - layout.start
        members = [buffer.params[index] for index in layout.members]
        names = [buffer.names[index] for index in layout.members]
        self._slots = {
            param: GradSlot(param, name, *range_, accumulates_in_fp32=name in buffer.accumulated_in_fp32)
            for param, name, range_ in zip(members, names, layout.ranges, strict=True)
        }
        ends = [0, *(end for _, end in layout.ranges)]
        starts = [*(start for start, _ in layout.ranges), self.numel]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
        self.param_data: Tensor | None = None
        self.local_param_shard: Tensor | None = None
        if buffer.param_data is not None:
            self.param_data = buffer.param_data[layout.start : layout.end]
            self.local_param_shard = self.param_data.chunk(buffer.num_shards)[buffer.shard_index]
        self.grad_data: Tensor | None = None
        if buffer.grad_data is not None:
            self._hold_grads(buffer.grad_data[layout.start : layout.end])
            for slot in self._slots.values():  # zeros to add to, so that what is written before a backward counts
                slot.content = Content.ZEROS
                self._view(slot)
        self.separate_shard: Tensor | None = None

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self._slots)

    @property
    def params_list(self) -> list[nn.Parameter]:
        """`params`, by Megatron-LM's name."""
        return self.params

    @property
    def param_to_index(self) -> dict[nn.Parameter, tuple[int, int]]:
        """`range_of` every parameter."""
        return {param: (slot.start, slot.end) for param, slot in self._slots.items()}

    @property
    def numel_unpadded(self) -> int:
        """Elements up to the end of the last parameter, with the gaps between parameters."""
        return max(slot.end for slot in self._slots.values())

    @property
    def params_with_extra_main_grads(self) -> list[nn.Parameter]:
        """Those whose ``main_grad`` is an fp32 tensor of its own, by Megatron-LM's name."""
        return [param for param, slot in self._slots.items() if slot.accumulates_in_fp32]

    @property
    def extra_main_grads(self) -> list[Tensor]:
        """The fp32 ``main_grad`` of `params_with_extra_main_grads`, as far as they are allocated."""
        return [slot.accumulator for slot in self._slots.values() if slot.accumulator is not None]

    def main_grad_dtype(self, param: nn.Parameter) -> torch.dtype:
        """That of the parameter's ``main_grad``."""
        return torch.float32 if self._slots[param].accumulates_in_fp32 else self.buffer.grad_dtype

    @property
    def slots(self) -> list[GradSlot]:
        """The places of its parameters' gradients, in the order in which they lie."""
        return list(self._slots.values())

    @property
    def local_grad_shard(self) -> Tensor:
        """`[numel / shards]`, where this rank's part of the reduced gradient is kept.

        A part of `grad_data`; or, where whole gradients are released, memory of its own, which is allocated when it
        is first asked for after `clear_grads`: until gradients are reduced one of the two is enough.
        """
        if not self.releases_grads:
            return self._held_grads().chunk(self.buffer.num_shards)[self.buffer.shard_index]
        if self.separate_shard is None:
            length = self.numel // self.buffer.num_shards
            buffer = self.buffer
            self.separate_shard = torch.zeros(length, dtype=buffer.shard_grad_dtype, device=buffer.shard_device)
        return self.separate_shard

    @property
    def releases_grads(self) -> bool:
        """Whether whole gradients are freed once they are reduced (ZeRO-2)."""
        return self.buffer.grad_data is None

    def range_of(self, param: nn.Parameter) -> tuple[int, int]:
        """The parameter's elements, ``[start, end)``, counted from the beginning of the bucket."""
        slot = self._slots[param]
        return slot.start, slot.end

    def shard_range_of(self, param: nn.Parameter) -> tuple[int, int]:
        """``[start, end)`` of what this rank's shard holds of the parameter, counted from the shard's beginning."""
        length = self.numel // self.buffer.num_shards
        begin = length * self.buffer.shard_index
        start, end = self.range_of(param)
        return min(max(start - begin, 0), length), min(max(end - begin, 0), length)

    def lend(self, param: nn.Parameter) -> Tensor | None:
        """``main_grad``, for a layer to compute a gradient in, until `take_back`.

        None where it holds a gradient already, is of another dtype than the layer's, is lent to another use, or is not
        aligned as memory of its own would be: the last bits of a matrix product depend on that, and would differ
        from those under a strategy whose parameters lie elsewhere.
        """
        slot = self._slots[param]
        if slot.lent_to is not None or slot.content.counts or param.dtype != self.main_grad_dtype(param):
            return None
        memory = self._memory_of(slot)
        if memory.data_ptr() % _ALLOCATION_ALIGNMENT:
            return None
        slot.lent_to = current_backward()
        return memory.detach()  # autograd copies a gradient that has other references, so not the view

    def take_back(self, param: nn.Parameter) -> None:
        """Ends what `lend` began, as the parameter's gradient of this backward is there to be added.

        Raises:
            ShardstackError: the backward that borrowed has not ended.
        """
        slot = self._slots[param]
        if slot.lent_to not in (None, current_backward()):
            raise ShardstackError(
                f"parameter {slot.name} got a gradient while another backward had begun to compute one and has not "
                "brought it: a checkpoint with use_reentrant=True inside (use False), or a backward that raised (call "
                "zero_grad_buffer); or set gradient_accumulation_fusion to False"
            )
        slot.lent_to = None

    def add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Adds into the parameter's ``main_grad``, allocating the bucket where it was released.

        A `gradient` that was computed there is left there; one may be sparse.
        """
        slot = self._slots[param]
        view = self._view(slot)
        if gradient.is_sparse:
            if not slot.content.counts:
                view.zero_()
            view.add_(gradient.coalesce())  # each row once, so that it is rounded as if it were dense
        elif gradient.data_ptr() == view.data_ptr():
            pass
        elif slot.content.counts:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        slot.content = Content.GRADIENT

    def replace_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Makes `gradient` the parameter's, in place of what has been added."""
        self.take_back(param)
        self._slots[param].content = Content.NOTHING
        self.add_gradient(param, gradient)

    def zero_gradient(self, param: nn.Parameter) -> None:
        """Makes the parameter's gradient zero, in the memory that it has."""
        self._view(self._slots[param]).zero_()

    def holds_gradient(self, param: nn.Parameter, gradient: Tensor) -> bool:
        """Whether `gradient` is the parameter's place here."""
        view = self._slots[param].view
        return view is not None and not gradient.is_sparse and gradient.data_ptr() == view.data_ptr()

    def has_gradient(self, param: nn.Parameter) -> bool:
        """Whether an optimizer has to read a gradient of this parameter.

        One that is trainable now always has one, zeros where no backward reached it; a frozen one has what came
        before it was frozen.
        """
        return param.requires_grad or self._slots[param].content.has_arrived

    def note_written_by_layer(self, param: nn.Parameter) -> None:
        """Remembers that a layer adds this parameter's gradient itself, from now on into zeroed memory."""
        slot = self._slots[param]
        slot.content, slot.is_written_by_layer = Content.GRADIENT, True

    def clear_grads(self) -> None:
        """Makes every gradient zero without touching its memory: ``main_grad`` is None until one arrives."""
        self.separate_shard = None
        for slot in self._slots.values():
            slot.lent_to = None
            if slot.content.counts:  # else it is None already, or zeros that nothing has been added to
                slot.param.main_grad = None  # type: ignore[attr-defined]
            slot.content = Content.NOTHING
        self.prepare_for_layers()

    def prepare_for_layers(self) -> None:
        """Gives layers that add into ``main_grad`` themselves the zeros to add to."""
        for slot in self._slots.values():
            if slot.is_written_by_layer:
                self._view(slot).zero_()
                slot.content = slot.content.zeroed()

    def complete_grads(self) -> Tensor:
        """The whole gradient, `[numel]`, zero where none has arrived; every ``main_grad`` is there afterwards."""
        for slot in self._slots.values():
            view = self._view(slot)
            if not slot.content.counts:
                view.zero_()
                slot.content = slot.content.zeroed()
            if slot.accumulator is not None:
                self._place_of(slot).copy_(slot.accumulator)
        return self._held_grads()

    def update_accumulators(self) -> None:
        """Copies what has been reduced into each ``main_grad`` that is no view of the bucket."""
        for slot in self._slots.values():
            if slot.accumulator is not None and slot.view is not None:
                slot.accumulator.copy_(slot.view)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiplies what an optimizer reads."""
        shard = self.local_grad_shard
        shard.mul_(factor.to(shard.device) if isinstance(factor, Tensor) else factor)
        for accumulator in self.extra_main_grads:
            accumulator.mul_(factor)

    def release_grads(self) -> None:
        """Frees the whole gradient, once the reduction that holds it has ended too."""
        self.grad_data = None
        for slot in self._slots.values():
            slot.view, slot.accumulator, slot.content = None, None, slot.content.released()
            slot.param.main_grad = None  # type: ignore[attr-defined]
            if slot.accumulates_in_fp32:
                slot.param.main_grad_copy_in_grad_buffer = None  # type: ignore[attr-defined]

    def zero_padding(self, data: Tensor) -> None:
        """Zeros the gaps between parameters in `data` `[numel]`, so that they change no sum, norm or update."""
        if self._gaps:
            torch._foreach_zero_([data[start:end] for start, end in self._gaps])

    def _view(self, slot: GradSlot) -> Tensor:
        view = self._memory_of(slot)
        slot.param.main_grad = view  # type: ignore[attr-defined]
        return view

    def _memory_of(self, slot: GradSlot) -> Tensor:
        """Where the parameter's gradient accumulates."""
        if not slot.accumulates_in_fp32:
            return self._place_of(slot)
        if slot.accumulator is None:
            slot.accumulator = torch.zeros(slot.param.shape, dtype=torch.float32, device=self.buffer.device)
        return slot.accumulator

    def _place_of(self, slot: GradSlot) -> Tensor:
        """The parameter's part of `grad_data`."""
        if slot.view is None:
            data = self.buffer.take_grads(self.numel)
            self.zero_padding(data)
            self._hold_grads(data)
        return slot.view  # type: ignore[return-value]

    def _hold_grads(self, data: Tensor) -> None:
        self.grad_data = data
        for slot in self._slots.values():
            slot.view = data[slot.start : slot.end].view(slot.param.shape)
            if slot.accumulates_in_fp32:
                slot.param.main_grad_copy_in_grad_buffer = slot.view  # type: ignore[attr-defined]

    def _held_grads(self) -> Tensor:
        if self.grad_data is None:
            raise RuntimeError("the gradients of this bucket are not allocated")
        return self.grad_data
