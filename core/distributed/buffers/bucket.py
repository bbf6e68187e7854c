"""A bucket: the part of a flat buffer that one collective reduces or gathers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..plan.layout import BucketLayout
from .flat_memory import FlatMemory
from .grad_slot import GradSlot


class Bucket:
    """Parameters of a flat buffer whose gradients one collective reduces, and whose values one collective gathers.

    The thread that runs a backward stores gradients, the main thread clears them between steps. While a collective
    runs in a lane, the lane's thread or stream reads and writes `grad_data`, `param_data` and the shards.

    Attributes:
        params: the bucket's parameters, in the order of their places.
        slots: the places of their gradients, in the same order.
        layout: the bucket's place in the buffer, and the parameters' places in the bucket.
        offset: the bucket's first element in the buffer.
        numel: number of elements, padding included; a multiple of the number of shards.
        buffer: owns `param_data`, and `grad_data` unless `releases_grads`.
        param_data: `[numel]`, a view of the buffer's `param_data`; the parameters are views of it. None where
            parameters keep their own memory.
        local_param_shard: `[numel / shards]`, this rank's part of `param_data`, which its optimizer updates. Set once,
            by the constructor or by `ShardedBuffer`, whose shards have memory of their own.
        grad_data: `[numel]`, whole gradients. Without `releases_grads` a view of the buffer's `grad_data`; fixed.
            With `releases_grads` memory of the bucket: allocated for the first gradient of a step or to send the
            bucket, dropped by `release_grads`, None in between.
        separate_shard: `[numel / shards]`, memory of `local_grad_shard` with `releases_grads`. Allocated when it is
            first asked for in a step; dropped by `clear_grads`, and by `BucketSums`, which then owns it.
        layerwise_gather_list: Megatron-LM's name. A caller that gathers parameters itself sets it;
            `BucketGroup.free_overlap_buffers` clears it.
    """

    layerwise_gather_list: list[Tensor] | None = None

    def __init__(self, buffer: FlatMemory, layout: BucketLayout) -> None:
        self.buffer = buffer
        self.layout = layout
        self.offset, self.numel = layout.start, layout.end - layout.start
        self._slots: dict[nn.Parameter, GradSlot] = {}  # filled here, then fixed
        for index, (start, end) in zip(layout.members, layout.ranges, strict=True):
            param, name = buffer.params[index], buffer.names[index]
            self._slots[param] = GradSlot(
                param,
                name,
                start,
                end,
                buffer.grad_dtype,
                self._allocate_grads,
                accumulates_in_fp32=name in buffer.accumulated_in_fp32,
            )
        ends = [0, *(end for _, end in layout.ranges)]
        starts = [*(start for start, _ in layout.ranges), self.numel]
        # Padding, ``[start, end)`` in the bucket.
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
        self.param_data: Tensor | None = None
        self.local_param_shard: Tensor | None = None
        if buffer.param_data is not None:
            self.param_data = buffer.param_data[layout.start : layout.end]
            self.local_param_shard = self.param_data.chunk(buffer.num_grad_shards)[buffer.grad_shard_index]
        self.grad_data: Tensor | None = None
        if buffer.grad_data is not None:
            self._hold_grads(buffer.grad_data[layout.start : layout.end])
            for slot in self.slots:
                slot.note_zeros()
        self.separate_shard: Tensor | None = None

    # ---- parameters and their places

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self._slots)

    @property
    def params_list(self) -> list[nn.Parameter]:
        """`params`, by Megatron-LM's name."""
        return self.params

    @property
    def slots(self) -> list[GradSlot]:
        return list(self._slots.values())

    def slot_of(self, param: nn.Parameter) -> GradSlot:
        """Returns the place of a parameter's gradient."""
        return self._slots[param]

    @property
    def param_to_index(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Each parameter's elements, as `range_of` returns them."""
        return {param: (slot.start, slot.end) for param, slot in self._slots.items()}

    def range_of(self, param: nn.Parameter) -> tuple[int, int]:
        """Returns the parameter's elements, ``[start, end)``, counted from the beginning of the bucket."""
        slot = self._slots[param]
        return slot.start, slot.end

    @property
    def numel_unpadded(self) -> int:
        """Elements up to the end of the last parameter, with the gaps between parameters."""
        return max(slot.end for slot in self.slots)

    @property
    def params_with_extra_main_grads(self) -> list[nn.Parameter]:
        """The parameters whose ``main_grad`` is a separate fp32 tensor, by Megatron-LM's name."""
        return [slot.param for slot in self.slots if slot.accumulates_in_fp32]

    @property
    def extra_main_grads(self) -> list[Tensor]:
        """The fp32 ``main_grad`` of `params_with_extra_main_grads`, as far as they are allocated."""
        return [slot.accumulator for slot in self.slots if slot.accumulator is not None]

    # ---- the memory of gradients

    @property
    def releases_grads(self) -> bool:
        """Whether whole gradients are freed once they are reduced (ZeRO-2)."""
        return self.buffer.grad_data is None

    @property
    def local_grad_shard(self) -> Tensor:
        """`[numel / shards]`, this rank's part of the reduced gradient.

        A part of `grad_data`. Where whole gradients are released, it is `separate_shard`, which is allocated at the
        first access after `clear_grads`: until the reduction the whole gradient is enough.
        """
        if not self.releases_grads:
            return self._held_grads().chunk(self.buffer.num_grad_shards)[self.buffer.grad_shard_index]
        if self.separate_shard is None:
            length = self.numel // self.buffer.num_grad_shards
            self.separate_shard = self.buffer.zeros_for_shards(length, self.buffer.shard_grad_dtype)
        return self.separate_shard

    def zero_padding(self, data: Tensor) -> None:
        """Zeros the gaps between parameters in `data` `[numel]`, so that they change no sum, norm or update."""
        if self._gaps:
            torch._foreach_zero_([data[start:end] for start, end in self._gaps])

    def release_grads(self) -> None:
        """Drops the whole gradient. A reduction that still reads it keeps the memory until it has finished."""
        self.grad_data = None
        for slot in self.slots:
            slot.release()

    def _allocate_grads(self) -> None:
        data = self.buffer.grad_memory.take(self.numel)
        self.zero_padding(data)
        self._hold_grads(data)

    def _hold_grads(self, data: Tensor) -> None:
        self.grad_data = data
        for slot in self.slots:
            slot.hold(data)

    def _held_grads(self) -> Tensor:
        if self.grad_data is None:
            raise RuntimeError("the gradients of this bucket are not allocated")
        return self.grad_data

    # ---- all gradients of the bucket

    def clear_grads(self) -> None:
        """Makes every gradient zero without touching its memory: ``main_grad`` is None until one arrives."""
        self.separate_shard = None
        for slot in self.slots:
            slot.clear()
        self.prepare_for_layers()

    def prepare_for_layers(self) -> None:
        """Zeros ``main_grad`` for layers that add into it themselves."""
        for slot in self.slots:
            slot.prepare_for_layer()

    def complete_grads(self) -> Tensor:
        """Returns the whole gradient `[numel]`, with zeros where no gradient has arrived; sets every ``main_grad``."""
        for slot in self.slots:
            slot.complete()
        return self._held_grads()

    def update_accumulators(self) -> None:
        """Copies reduced gradients into each ``main_grad`` that is not a view of the bucket."""
        for slot in self.slots:
            slot.take_reduced()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Scales the gradient shard and the fp32 accumulators."""
        shard = self.local_grad_shard
        shard.mul_(factor.to(shard.device) if isinstance(factor, Tensor) else factor)
        for accumulator in self.extra_main_grads:
            accumulator.mul_(factor)

    def restart_grads(self) -> None:
        """Marks gradients stale: the next ones overwrite them."""
        for slot in self.slots:
            slot.restart()
