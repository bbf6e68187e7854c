"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, from logits or from hidden states.

From hidden states the projection to the vocabulary and the loss are computed one part of the vocabulary at a time, and
whole logits are never allocated. (A GPU with ample memory keeps them: see `linear_cross_entropy`.) A part is a range
of columns of the logits for all tokens, rather than all columns for a range of tokens. The gradient of the weight's
rows of a part is then one matrix product: it is written once, where the data-parallel wrapper keeps it
(`weight_gradients`), and is not rounded between parts in low precision. Two results add up over parts: the gradient of
the input, in fp32, and the log-sum-exp, which is merged in the same way as over tensor-parallel ranks. Backward
computes the logits of a part again, with one more product, because the caller weighs tokens after forward.

On a GPU the operations on logits are compiled (`Fused`): logits are read once in forward and once in backward, and
their gradient is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..base.device import is_on_gpu, memory_bytes
from ..base.errors import ConfigError
from ..base.fused import Fused
from ..comm.collectives import all_reduce_by_backend
from .groups import Group, check_ids, gather_first_dim, group_rank, group_size, reduce_scatter_first_dim, resolve_group
from .mappings import column_parallel_linear
from .weight_gradients import borrow_gradient_memory, lender_of

IGNORE_INDEX = -100
"""A target that is no token: its loss and its gradient are zero. The value is torch's."""

# Elements of logits at a time in `Fused`, whose functions allocate as many in fp32: on a CPU few enough for its cache,
# on a GPU enough to keep launches few. Compiled functions allocate none, and index elements in 32 bits.
_CHUNK_ELEMENTS = 2**20
_GPU_CHUNK_ELEMENTS = 2**25
_COMPILED_CHUNK_ELEMENTS = 2**28

_GRADIENT = "the input gradient of the output layer"

# Elements of a part of the logits on a CPU: few enough for its cache.
_PART_ELEMENTS = 2**20
_LEAST_COLUMNS = 64

# Shares of a GPU's total memory, and not of what is free, so that a machine always computes the same numbers. Logits
# up to the first are kept: with their gradient that is a sixteenth at the peak, where parts would take a hundredth,
# for a product less. On 141 GB it is 4.4 GB, which 16k tokens of a vocabulary of 128k in bf16 are below. Others are in
# parts up to the second: large, because each part is added to the gradient of the input.
_KEPT_SHARE = 32
_PART_SHARE = 128


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group = None
) -> Tensor:
    """Returns the loss of each token, in fp32, from logits `[..., v / tp]` and targets `[...]` that all ranks share.

    With `label_smoothing` e the target is 1 - e of its token and e / (v - 1) of every other (Szegedy et al., 2016),
    over the whole vocabulary of v. (Megatron-LM's formula at one rank; with several, it smooths over each rank's part
    by itself, so that their losses differ.)

    Communicates in one all-gather of two numbers per token, with smoothing three: the log-sum-exp of this rank's
    logits, the logit of the target, and the logits' sum. Saves only the given logits for backward; the softmax, of
    which torch's loss saves an fp32 copy, is computed again in fp32, a chunk of tokens at a time. On a GPU compiled
    kernels do so without memory of their own.

    Raises:
        DataError: a target is neither a token nor -100, which torch ignores too. Not checked on a GPU, where the check
            would synchronize: the loss of such a target is the log-sum-exp there.
        ConfigError: `label_smoothing` is outside 0 to below 1, or a process group is given in its place.
    """
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(
            f"label_smoothing is {label_smoothing!r}; it takes a number from 0 to below 1, and groups go to tp_group"
        )
    group = resolve_group(tp_group)
    size, vocab = group_size(group), vocab_parallel_logits.shape[-1]
    check_ids(target, vocab * size, "target", exception=IGNORE_INDEX)
    logits, flat = vocab_parallel_logits.reshape(-1, vocab), target.reshape(-1)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, flat, float(label_smoothing), group)
    return losses.view_as(target)


def linear_cross_entropy(
    input_: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_chunk_size: int | None = None,
    sequence_parallel: bool = False,
    tp_group: Group = None,
) -> Tensor:
    """Returns the loss of each token, `[s, b]` in fp32, from `[s, b, h]` and this rank's rows of the projection.

    Equals `vocab_parallel_cross_entropy` of a column-parallel product, but for the order of additions over the
    vocabulary. In backward, tensor-parallel ranks sum the input's gradient after the products.

    A GPU computes just that, and keeps this rank's logits for backward, if they take at most 1/32 of its total memory
    in the weight's dtype: three products instead of four, and no sum over parts. Logits live from their forward to
    their backward: those of one micro-batch without pipeline stages and in the last stage of 1F1B, of all
    micro-batches under GPipe. Schedules that defer weight gradients keep the logits' gradient until then.
    `vocab_chunk_size` avoids both.

    Args:
        input_: `[s, b, h]`, the same on every rank; with `sequence_parallel` this rank's `[s / tp, b, h]`.
        weight: `[v / tp, h]`.
        target: `[s, b]`, tokens or -100, whose loss is zero; the same on every rank.
        vocab_chunk_size: columns of a part. None means 2^20 elements a part on a CPU; on a GPU whole logits, or parts
            of up to 1/128 of its total memory.

    Raises:
        DataError: a target is neither a token nor -100. Checked on a CPU only, as in `vocab_parallel_cross_entropy`.
    """
    group = resolve_group(tp_group)
    check_ids(target, weight.shape[0] * group_size(group), "target", exception=IGNORE_INDEX)
    kind = input_.device.type
    if torch.is_autocast_enabled(kind):  # backward runs outside autocast: cast here, where autograd sees it
        dtype = torch.get_autocast_dtype(kind)
        input_, weight = input_.to(dtype), weight.to(dtype)
    # Ranks whose GPUs differ may decide differently. The two make the same calls, but for this case.
    gathers_alike = weight.requires_grad or not sequence_parallel
    tokens, may_keep = target.numel(), vocab_chunk_size is None and is_on_gpu(input_) and gathers_alike
    if may_keep and _KEPT_SHARE * tokens * weight.shape[0] * weight.itemsize <= memory_bytes():
        logits = column_parallel_linear(input_, weight, None, group, sequence_parallel)
        return vocab_parallel_cross_entropy(logits, target, tp_group=group)
    columns = vocab_chunk_size or _columns(tokens, weight.itemsize, is_on_gpu(input_))
    loss: Tensor = _LinearCrossEntropy.apply(target.reshape(-1), columns, group, sequence_parallel, input_, weight)
    return loss.view_as(target)


def _gather_sums(mine: Tensor, group: Group) -> Tensor:
    """Gathers `[1, k, n]`, k sums over this rank's part of the vocabulary for n tokens, to `[tp, k, n]`."""
    if group is None or group_size(group) == 1:
        return mine
    return gather_first_dim(mine, group, what="the sums over the vocabulary")[0]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float, group: Group) -> Tensor:
        vocab = logits.shape[1]
        column, here = _column(target - group_rank(group) * vocab, slice(0, vocab))
        # The probability taken from the target, divided over the other tokens of the vocabulary.
        whole = vocab * group_size(group)
        smoothing = label_smoothing * whole / (whole - 1) if label_smoothing else 0.0
        mine = torch.stack(_log_sum_exp(logits, column, here, bool(smoothing))).float()  # [2 or 3, n]
        everyone = _gather_sums(mine.unsqueeze(0), group)  # [tp, 2 or 3, n]
        log_sum_exp = torch.logsumexp(everyone[:, 0], dim=0)  # [n]
        is_ignored = target == IGNORE_INDEX
        ctx.save_for_backward(logits, log_sum_exp, column, here, is_ignored)
        ctx.smoothing, ctx.vocab_size = smoothing, whole
        if not smoothing:  # ignored tokens not in place: traced by torch 2.11, backward would get a gradient of zero
            return (log_sum_exp - everyone[:, 1].sum(0)).masked_fill(is_ignored, 0.0)
        mean_logit = (1.0 - smoothing) * everyone[:, 1].sum(0) + (smoothing / whole) * everyone[:, 2].sum(0)
        return (log_sum_exp - mean_logit).masked_fill(is_ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum_exp, column, here, is_ignored = ctx.saved_tensors
        scale = grad.masked_fill(is_ignored, 0.0)  # [n]
        share = here.float().mul_(1.0 - ctx.smoothing)
        uniform = torch.full_like(scale, ctx.smoothing / ctx.vocab_size) if ctx.smoothing else None
        grad_logits = torch.empty_like(logits)
        _gradient_of_logits(logits, column, share, log_sum_exp, scale, uniform, grad_logits)
        return grad_logits, None, None, None


def _parts(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class _FusedRows(Fused):
    """A function of the rows of a matrix, called for a chunk of rows at a time.

    Args:
        function: `(matrix, *others) -> tensors`, each with as many rows as the matrix, those among the others too.
            It may write to any of them.
    """

    def __call__(self, matrix: Tensor, *others: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(matrix, *others)
        compiles = self.compiles_on(matrix.device)
        most = _COMPILED_CHUNK_ELEMENTS if compiles else _GPU_CHUNK_ELEMENTS if is_on_gpu(matrix) else _CHUNK_ELEMENTS
        step = max(1, most // max(1, matrix.shape[1]))
        step = _power_of_two(step) if compiles else step  # so that kernels read whole words
        results = [
            super(_FusedRows, self).__call__(*(x[rows] if isinstance(x, Tensor) else x for x in (matrix, *others)))
            for rows in _parts(len(matrix) or 1, step)
        ]
        return results[0] if len(results) == 1 else tuple(map(torch.cat, zip(*results, strict=True)))


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss of each token from parts of the logits.

    Forward: gather the sequence if it is split; each part's logits, their log-sum-exp, the targets' logits; merge over
    parts and ranks. Backward: gather again; each part's logits, their gradient, its products; sum the input's gradient
    over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, target: Tensor, columns: int, group: Group, sequence_parallel: bool, input_: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.columns, ctx.group, ctx.lender = columns, group, lender_of(weight)
        ctx.sequence_parallel = sequence_parallel
        whole = _whole_input(input_, group, sequence_parallel)
        vocab, tokens = weight.shape[0], len(target)
        local = target - group_rank(group) * vocab  # [n], this rank's column where it has one
        part_sums = []  # log-sum-exp [n] of each part
        mine = torch.zeros(1, 2, tokens, dtype=torch.float32, device=input_.device)
        scratch = input_.new_empty(tokens * min(columns, vocab), dtype=weight.dtype)
        for part in _parts(vocab, columns):
            logits = _logits(whole, weight[part], scratch)
            part_sum, target_logits = _log_sum_exp(logits, *_column(local, part), False, True)
            mine[0, 1] += target_logits
            part_sums.append(part_sum)
        mine[0, 0] = torch.logsumexp(torch.stack(part_sums), dim=0)
        everyone = _gather_sums(mine, group)  # [tp, 2, n]
        log_sum_exp = torch.logsumexp(everyone[:, 0], dim=0)  # [n]
        ctx.save_for_backward(input_, weight, log_sum_exp, target)
        return (log_sum_exp - everyone[:, 1].sum(0)).masked_fill(target == IGNORE_INDEX, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight, log_sum_exp, target = ctx.saved_tensors
        *_, needs_input, needs_weight = ctx.needs_input_grad
        whole = _whole_input(input_, ctx.group, ctx.sequence_parallel)
        vocab, dtype = weight.shape[0], weight.dtype
        local = target - group_rank(ctx.group) * vocab
        scale = grad.masked_fill(target == IGNORE_INDEX, 0.0)  # [n]
        total = torch.zeros_like(whole, dtype=_wide(dtype)) if needs_input else None  # [n, h], summed over parts
        grad_weight = None
        if needs_weight:  # [v / tp, h], whose rows parts fill
            memory = borrow_gradient_memory(ctx, ctx.lender)
            grad_weight = weight.new_empty(weight.shape) if memory is None else memory
        scratch = input_.new_empty(len(target) * min(ctx.columns, vocab), dtype=dtype)
        for part in _parts(vocab, ctx.columns):
            grad_logits = _logits(whole, weight[part], scratch)
            _gradient_of_logits(grad_logits, *_column(local, part), log_sum_exp, scale)
            if total is not None:
                _add_product(total, grad_logits, weight[part])
            if grad_weight is not None:
                torch.mm(grad_logits.t(), whole, out=grad_weight[part])
        grad_input = None if total is None else _over_ranks(total.to(dtype), input_.shape, ctx)
        return None, None, None, None, grad_input, grad_weight


def _columns(tokens: int, itemsize: int, on_gpu: bool) -> int:
    if on_gpu:  # code is compiled for each number of columns, and so there are few
        return max(_LEAST_COLUMNS, _power_of_two(memory_bytes() // _PART_SHARE // max(1, tokens * itemsize)))
    return max(_LEAST_COLUMNS, _PART_ELEMENTS // max(1, tokens) // _LEAST_COLUMNS * _LEAST_COLUMNS)


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def _whole_input(input_: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Returns the activations of whole sequences, `[n, h]`, gathered where ranks split them."""
    if sequence_parallel and group is not None:
        input_ = gather_first_dim(input_, group, what="the input of the output layer")[0]
    return input_.reshape(-1, input_.shape[-1])


def _logits(whole: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    """Computes the logits of a part in the scratch, `[n, c]`, rounded as a layer rounds them."""
    tokens, columns = len(whole), len(rows)
    return torch.mm(whole, rows.t(), out=scratch[: tokens * columns].view(tokens, columns))


def _column(local: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Returns each token's column in a part `[n, 1]`, 0 where it has none, and whether it has one `[n]`."""
    here = (local >= part.start) & (local < part.stop)
    return (local - part.start).masked_fill_(~here, 0).unsqueeze(1), here


@_FusedRows
def _log_sum_exp(
    logits: Tensor, column: Tensor, here: Tensor, adds: bool = False, overwrites: bool = False
) -> tuple[Tensor, ...]:
    """Returns the log-sum-exp `[n]` of logits `[n, c]`, the logits of targets `[n]`, 0 for targets elsewhere, and with
    `adds` the sum of logits `[n]`.

    Args:
        overwrites: whether it may write to the logits.
    """
    wide = logits.to(_wide(logits.dtype))
    sums = (wide.sum(dim=1),) if adds else ()
    of_targets = wide.gather(1, column).squeeze(1).masked_fill_(~here, 0.0)
    largest = wide.amax(dim=1, keepdim=True)  # torch's compiler knows a sum of this form, and reads once for both
    is_scratch = wide.dtype is not logits.dtype or (overwrites and not torch.compiler.is_compiling())
    shifted = wide.sub_(largest) if is_scratch else wide - largest
    log_sum = shifted.exp_().sum(dim=1, keepdim=True).log_().add_(largest)
    return torch.where(largest.isinf(), largest, log_sum).squeeze(1), of_targets, *sums


@_FusedRows
def _gradient_of_logits(
    logits: Tensor, column: Tensor, share: Tensor, log_sum: Tensor, scale: Tensor, uniform: Any = None, out: Any = None
) -> tuple[()]:
    """Writes (softmax - target) * scale of a part to `out` `[n, c]`, or to the logits if it is None.

    Args:
        share: `[n]`, the target's probability of the token, 0 for tokens elsewhere.
        log_sum: `[n]`, log-sum-exp over the whole vocabulary.
        scale: `[n]`, gradient of each token's loss.
        uniform: `[n]`, the target's probability of each token in addition, or None.
    """
    out = logits if out is None else out
    is_wide = out.dtype is _wide(out.dtype)
    softmax = (out.copy_(logits) if is_wide else logits.to(_wide(out.dtype))).sub_(log_sum.unsqueeze(1)).exp_()
    if uniform is not None:
        softmax.sub_(uniform.unsqueeze(1))
    if torch.compiler.is_compiling():  # a comparison is fused with the rest, and a scatter is not
        columns = torch.arange(softmax.shape[1], device=softmax.device)
        softmax.sub_(torch.where(columns == column, share.to(softmax.dtype).unsqueeze(1), 0.0))
    else:
        softmax.scatter_add_(1, column, -share.to(softmax.dtype).unsqueeze(1))
    softmax.mul_(scale.unsqueeze(1))
    if not is_wide:
        out.copy_(softmax)
    return ()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total += left.mm(right)


def _over_ranks(grad: Tensor, shape: torch.Size, ctx: Any) -> Tensor:
    """Sums a gradient `[n, k]` over tensor-parallel ranks, and keeps this rank's part if the sequence is split."""
    if group_size(ctx.group) == 1:
        return grad.view(shape)
    if not ctx.sequence_parallel:
        all_reduce_by_backend(grad, ctx.group, what=_GRADIENT)
        return grad.view(shape)
    whole = grad.view(shape[0] * group_size(ctx.group), *shape[1:])
    return reduce_scatter_first_dim(whole, ctx.group, what=_GRADIENT)[0]
