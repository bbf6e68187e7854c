"""Counts the bytes that a step moves outside of its products: in a layer, in the loss, in the update.

The model runs forward and backward on torch's meta device, in its real size and without values, and `CountedBytes`
adds up what its operators read and write. Three kernels that a GPU has and meta has not stand in for themselves, with
what they read and write: RMSNorm, attention, and functions that are compiled (`Fused`). Products and attention are
left out, because their time is that of their operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import Mock, patch

import torch
from _llama import Preset, build_on_device
from _llama_training import Training, model_config
from _passes import CountedBytes, count_update
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

PRODUCTS = ("mm", "addmm", "bmm", "attention")
"""Operators whose bytes are not counted."""

FUSED_LOSS: dict[str, Any] = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
"""Fields of the model's config for the loss that is computed with its projection."""

HALF = 2
"""Bytes of a number in bf16."""

_UPDATED = Preset(1, 256, 4, 2, 1024, vocabulary=1024, sequence=16, samples=1)
"""A model whose update is counted: its matrices are large enough to be treated as those of a large model."""


class _StepBytes(CountedBytes):
    """Counts launches too: operators that read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.flops = 0

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        before = self.total
        super()._count(func, args, kwargs, result)
        self.launches += self.total > before
        if func._schema.name in ("aten::mm", "aten::addmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[1]

    def kernel(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Counts one kernel that reads and writes these tensors, each once."""
        self.read[name] += sum(tensor.nbytes for tensor in reads)
        self.written[name] += sum(tensor.nbytes for tensor in writes)
        self.launches += 1

    def compiled(self, function: Any, matrix: Tensor, *others: Any) -> Any:
        """Calls a function as one kernel, which may write to its tensors: the matrix is read, and what is written of
        the others is not."""
        results, kept, written = self._call(function, matrix, *others)
        is_written = any(tensor is matrix for tensor in written)
        self.kernel("compiled", [matrix, *kept] if is_written else kept, [*results, *written])
        return results

    def updated(self, function: Any, *tensors: Tensor) -> None:
        """Calls an update as one kernel: of what it writes, weights in low precision are not read."""
        _, kept, written = self._call(function, *tensors)
        if _get_current_dispatch_mode() is self:
            updated = [tensor for tensor in written if tensor.element_size() != HALF]
            self.kernel("compiled", [*kept, *updated], written)

    def _call(self, function: Any, *args: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Calls a function without counting its operators. Returns its results, and of the tensors that it is called
        with those that it does not write to, and those that it does."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        versions = [tensor._version for tensor in tensors]
        self._is_in_graph = True
        try:
            results = function(*args)
        finally:
            self._is_in_graph = False
        kept, written = list[Tensor](), list[Tensor]()
        for tensor, version in zip(tensors, versions, strict=True):
            (written if tensor._version > version else kept).append(tensor)
        return results, kept, written

    @property
    def moved(self) -> Moved:
        """Everything but products."""
        counted = self.read + self.written
        return Moved(counted.total() - sum(counted[name] for name in PRODUCTS), self.launches, self.flops)


@dataclass(frozen=True)
class Moved:
    """What a part of a micro-batch's forward and backward moves in memory."""

    nbytes: int
    """Read and written, without what products and attention read and write."""
    launches: int
    """Kernels, those of products among them."""
    flops: int = 0
    """Operations of its products, where they are counted."""


@dataclass(frozen=True)
class Counts:
    """What one micro-batch moves, from counts of the model as it is."""

    layer: Moved
    """An eager layer."""
    ends: Moved
    """The embedding, the last norm, and the gradient of the embedding."""
    losses: dict[str, Moved]
    """What is in addition to `ends`: in the "plain" loss, in the "fused" one, and in this where it is "in parts"."""


class _Norm(torch.autograd.Function):
    """RMSNorm of CUDA: backward reads its inputs once for the gradient of x, and once for that of the weight."""

    @staticmethod
    def forward(ctx: Any, counted: _StepBytes, x: Tensor, weight: Tensor) -> Tensor:
        ctx.counted = counted
        ctx.save_for_backward(x, weight)
        output = torch.empty_like(x)
        counted.kernel("rms_norm", [x, weight], [output])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        ctx.counted.kernel("rms_norm", [grad, x, weight], [of_x])
        ctx.counted.kernel("rms_norm", [grad, x], [of_weight])
        return None, of_x, of_weight


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counted: _StepBytes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.counted = counted
        ctx.save_for_backward(query, key, value)
        output = query.new_empty(query.shape)  # [s, b, heads, d]
        counted.kernel("attention", [query, key, value], [output])
        return output.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [tensor.new_empty(tensor.shape) for tensor in ctx.saved_tensors]
        ctx.counted.kernel("attention", [grad, grad, *ctx.saved_tensors], grads)
        return None, *grads


@cache
def count(preset: Preset, memory: int = 80 * 2**30) -> Counts:
    """Counts a micro-batch of a preset. Starts a process group of one rank if there is none.

    Args:
        memory: bytes of the GPU, by which the fused loss keeps its logits, or computes them in parts of some size.
    """
    from core.base.device import MEMORY_BYTES
    from core.tensor_parallel.cross_entropy import _columns

    _start()
    with MEMORY_BYTES.replaced(memory):
        columns = _columns(preset.samples * preset.sequence, HALF, True)
        return _counts(preset, {"cross_entropy_fusion_vocab_chunk_size": columns})


def _counts(preset: Preset, parts: dict[str, Any]) -> Counts:
    with _count(preset, {}) as (counted, model, _):
        layer, hidden = model.decoder.layers[0], _activations(preset, preset.hidden)
        rotation = model.rotary_pos_emb(preset.sequence, device=hidden.device)
        with counted:
            layer(hidden, rotary_pos_emb=rotation).backward(hidden.detach())
    of_layer = counted.moved
    ends, losses = _without_layers(preset, {}, has_loss=False), {}
    for name, fields in {"plain": {}, "fused": FUSED_LOSS, "in parts": FUSED_LOSS | parts}.items():
        whole = _without_layers(preset, fields, has_loss=True)
        losses[name] = Moved(whole.nbytes - ends.nbytes, whole.launches - ends.launches, whole.flops)
    return Counts(of_layer, ends, losses)


def _without_layers(preset: Preset, fields: dict[str, Any], *, has_loss: bool) -> Moved:
    """Counts the model without its layers, to its loss or to the hidden states before it."""
    with _count(preset, fields) as (counted, model, tokens):
        model.decoder.layers[0].forward = lambda hidden, *unused, **also_unused: hidden
        if not has_loss:
            model.output_layer = None
        with counted:
            output = model(tokens, None, labels=tokens if has_loss else None)
            output.backward(torch.empty_like(output))
    return counted.moved


@contextmanager
def _count(preset: Preset, fields: dict[str, Any]) -> Iterator[tuple[_StepBytes, Any, Tensor]]:
    """Builds a model of one layer on meta, whose kernels are those of a GPU; yields it and a micro-batch."""
    from core.base.device import CPU_STANDS_FOR_GPU
    from core.tensor_parallel.cross_entropy import _FusedRows
    from core.transformer.dot_product_attention import DotProductAttention
    from core.transformer.norms import RMSNorm

    counted, meta = _StepBytes(), torch.device("meta")
    model = build_on_device(
        replace(preset, layers=1), model_config(replace(preset, layers=1), fields), meta
    ).bfloat16()
    tokens = torch.empty(preset.samples, preset.sequence, dtype=torch.int64, device=meta)
    with (
        CPU_STANDS_FOR_GPU.replaced(True),
        patch.object(torch, "is_autocast_enabled", lambda *kind: False),  # which meta is no kind of
        patch.object(_FusedRows, "__call__", lambda fused, *tensors: counted.compiled(fused.function, *tensors)),
        patch.object(RMSNorm, "forward", lambda norm, x: _Norm.apply(counted, x, norm.weight)),
        patch.object(
            DotProductAttention, "forward", lambda core, q, k, v, mask=None: _Attention.apply(counted, q, k, v)
        ),
    ):
        yield counted, model, tokens


def _activations(preset: Preset, width: int) -> Tensor:
    shape = (preset.sequence, preset.samples, width)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


@cache
def count_update_bytes(wrapper: str, *, compiles: bool = True) -> float:
    """Returns the bytes a parameter that an update of the optimizer reads and writes, as on a GPU.

    Args:
        compiles: whether torch can compile there.
    """
    from core.base.device import CPU_STANDS_FOR_GPU
    from core.optimizer import adamw_in_one_pass

    _start()
    counted, function = _StepBytes(), adamw_in_one_pass._adamw.function
    compiled = Mock(side_effect=partial(counted.updated, function), compiles_on=lambda device: compiles)
    with CPU_STANDS_FOR_GPU.replaced(True), patch.object(adamw_in_one_pass, "_adamw", compiled):
        training = Training(_UPDATED, {}, {}, wrapper)
        training.step()
        count_update(training, counted)
    return counted.total / training.parameters


@cache
def count_gradient_bytes(*, are_lent: bool) -> tuple[float, float]:
    """Returns the bytes a parameter that DDP moves to accumulate gradients: in the first micro-batch, and in others.

    Of tied weights each micro-batch is moved, because their two gradients are added before.

    Args:
        are_lent: whether products write gradients into the wrapper's memory, where this holds none.
    """
    from core.base.device import CPU_STANDS_FOR_GPU
    from core.distributed.flat.grad_slot import GradSlot

    _start()
    add, totals = GradSlot.add, []

    def counted_add(slot: GradSlot, gradient: Tensor) -> None:
        with counted:
            add(slot, gradient)

    with CPU_STANDS_FOR_GPU.replaced(True), patch.object(GradSlot, "add", counted_add):
        for micro_batches in (1, 2):
            counted = CountedBytes()
            fields = FUSED_LOSS | {"gradient_accumulation_fusion": are_lent}
            training = Training(replace(_UPDATED, micro_batches=micro_batches), fields, {})
            training.step()
            totals.append(counted.total / training.parameters)
    return totals[0], totals[1] - totals[0]


def _start() -> None:
    from core import parallel_state
    from core.rendezvous import default_group

    default_group.init_process_group()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()


def parameters(preset: Preset) -> int:
    """Returns the number of parameters, norms and an untied embedding included."""
    from _llama import matrix_parameters

    untied = 0 if preset.is_tied else preset.vocabulary * preset.hidden
    return matrix_parameters(preset) + untied + (2 * preset.layers + 1) * preset.hidden


def compiled_layer(preset: Preset) -> Moved:
    """Returns what a compiled layer moves, as the scheduler of torch's compiler counts it.

    In tensors of a token's hidden state, forward and backward: norms and sums 22, the gated activation 8 a, the
    rotation of queries and keys 16 (1 + g), with a the width of the MLP and g the share of key heads in query heads.
    A test compares it with the count of a compiled layer on a CPU. A rotation of one kernel each way would have
    2 (1 + g) + 2 (1 + 2 g).
    """
    g, a = preset.groups / preset.heads, preset.ffn / preset.hidden
    tensors = 22 + 8 * a + 16 * (1 + g)
    launches = 4 * 3 + 3 + 20  # linear layers, attention, and the scheduler's kernels
    return Moved(int(tensors * preset.samples * preset.sequence * preset.hidden * HALF), launches)
