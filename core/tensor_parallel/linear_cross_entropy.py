"""Projects to the vocabulary and computes the loss one part of it at a time, never allocating whole logits.

A part is a range of columns of the logits for all tokens, rather than all columns for a range of tokens. The gradient
of the weight's rows of a part is then one matrix product: it is written once, where the data-parallel wrapper keeps it
(`weight_gradients`), and is not rounded between parts in low precision. Two results add up over parts: the gradient of
the input, in fp32, and the log-sum-exp, which is merged in the same way as over tensor-parallel ranks.

Backward computes the logits of a part again, with one more product, because the caller weighs tokens after forward.

On a GPU the operations between the products are compiled (`Fused`): the logits of a part are read twice, and their
gradient is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..base._torch_compat import missing_compiler
from ..base.errors import warn_once
from ..comm.collectives import all_reduce_by_backend
from .cross_entropy import IGNORE_INDEX, gather_sums_over_vocabulary
from .groups import Group, check_ids, gather_first_dim, group_rank, group_size, reduce_scatter_first_dim, resolve_group
from .weight_gradients import borrow_gradient_memory, lender_of

_COMPILED_ON = ["cuda"]
"""Device types to compile on. On a CPU a part of a matrix stays in the cache between operations, and compiling takes
seconds."""


class Fused:
    """A function of a matrix and of vectors over its rows, compiled on a GPU and called directly elsewhere.

    One compilation serves every number of rows; each number of columns has its own, so that its kernels read whole
    words. If torch cannot compile here, warns once and calls the function directly.

    Args:
        function: `(matrix, *vectors) -> tensors`; may write to the matrix.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # The compiled function. The first call on a GPU sets it; never cleared.
        self._compiled: Callable[..., Any] | None = None
        # Whether torch cannot compile on this machine. The first call that fails sets it; never cleared.
        self._cannot_compile = False

    def __call__(self, matrix: Tensor, *vectors: Tensor) -> Any:
        is_traced = torch.compiler.is_compiling()  # the enclosing function's compiler compiles this too
        if is_traced or self._cannot_compile or matrix.device.type not in _COMPILED_ON:
            return self.function(matrix, *vectors)
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True)
        torch._dynamo.mark_static(matrix, 1)
        try:
            return self._compiled(matrix, *vectors)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything ran
            self._cannot_compile = True
            cause, remedy = missing_compiler(error) or (next(iter(str(error).splitlines()), type(error).__name__), "")
            warn_once(
                f"torch cannot compile for {matrix.device.type} ({cause}): the loss in parts reads and writes its "
                f"logits about ten times as often{'; ' * bool(remedy)}{remedy}"
            )
            return self.function(matrix, *vectors)


_GRADIENT = "the input gradient of the output layer"

# Elements of the logits at a time: on a CPU few enough for its cache, on a GPU enough for products of full speed.
_PART_ELEMENTS = 2**20
_GPU_PART_ELEMENTS = 2**26
_LEAST_COLUMNS = 64


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

    Args:
        input_: `[s, b, h]`, the same on every rank; with `sequence_parallel` this rank's `[s / tp, b, h]`.
        weight: `[v / tp, h]`.
        target: `[s, b]`, tokens or -100, whose loss is zero; the same on every rank.
        vocab_chunk_size: columns of a part. None means 2^20 elements a part on a CPU, 2^26 on a GPU.

    Raises:
        DataError: a target is neither a token nor -100. Checked on a CPU only, as in `vocab_parallel_cross_entropy`.
    """
    group = resolve_group(tp_group)
    check_ids(target, weight.shape[0] * group_size(group), "target", allowed=IGNORE_INDEX)
    kind = input_.device.type
    if torch.is_autocast_enabled(kind):  # backward runs outside autocast: cast here, where autograd sees it
        dtype = torch.get_autocast_dtype(kind)
        input_, weight = input_.to(dtype), weight.to(dtype)
    columns = vocab_chunk_size or _columns(target.numel(), input_.is_cuda)
    loss: Tensor = _LinearCrossEntropy.apply(target.reshape(-1), columns, group, sequence_parallel, input_, weight)
    return loss.view_as(target)


def _columns(tokens: int, is_cuda: bool) -> int:
    if is_cuda:  # a power of two: code is compiled for each number of columns, and so there are few
        return max(_LEAST_COLUMNS, 1 << max(0, (_GPU_PART_ELEMENTS // max(1, tokens)).bit_length() - 1))
    return max(_LEAST_COLUMNS, _PART_ELEMENTS // max(1, tokens) // _LEAST_COLUMNS * _LEAST_COLUMNS)


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
            part_sum, target_logits = _log_sum_exp(_logits(whole, weight[part], scratch), *_column(local, part))
            mine[0, 1] += target_logits
            part_sums.append(part_sum)
        mine[0, 0] = torch.logsumexp(torch.stack(part_sums), dim=0)
        everyone = gather_sums_over_vocabulary(mine, group)  # [tp, 2, n]
        log_sum_exp = torch.logsumexp(everyone[:, 0], dim=0)  # [n]
        ctx.save_for_backward(input_, weight, log_sum_exp, target)
        return (log_sum_exp - everyone[:, 1].sum(0)).masked_fill_(target == IGNORE_INDEX, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight, log_sum_exp, target = ctx.saved_tensors
        *_, needs_input, needs_weight = ctx.needs_input_grad
        whole = _whole_input(input_, ctx.group, ctx.sequence_parallel)
        vocab, dtype = weight.shape[0], weight.dtype
        local = target - group_rank(ctx.group) * vocab
        scale = grad.masked_fill(target == IGNORE_INDEX, 0.0).unsqueeze(1)  # [n, 1]
        total = torch.zeros_like(whole, dtype=_wide(dtype)) if needs_input else None  # [n, h], summed over parts
        grad_weight = None
        if needs_weight:  # [v / tp, h], whose rows parts fill
            lent = borrow_gradient_memory(ctx, ctx.lender)
            grad_weight = weight.new_empty(weight.shape) if lent is None else lent
        scratch = input_.new_empty(len(target) * min(ctx.columns, vocab), dtype=dtype)
        for part in _parts(vocab, ctx.columns):
            logits = _logits(whole, weight[part], scratch)
            grad_logits = _gradient_of_logits(logits, *_column(local, part), log_sum_exp.unsqueeze(1), scale)
            if total is not None:
                _add_product(total, grad_logits, weight[part])
            if grad_weight is not None:
                torch.mm(grad_logits.t(), whole, out=grad_weight[part])
        grad_input = None if total is None else _over_ranks(total.to(dtype), input_.shape, ctx)
        return None, None, None, None, grad_input, grad_weight


def _whole_input(input_: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Returns the activations of whole sequences, `[n, h]`, gathered where ranks split them."""
    if sequence_parallel and group is not None:
        input_ = gather_first_dim(input_, group, what="the input of the output layer")[0]
    return input_.reshape(-1, input_.shape[-1])


def _parts(vocab: int, columns: int) -> Iterator[slice]:
    for start in range(0, vocab, columns):
        yield slice(start, min(start + columns, vocab))


def _logits(whole: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    """Computes the logits of a part in the scratch, `[n, c]`, rounded as a layer rounds them."""
    tokens, columns = len(whole), len(rows)
    return torch.mm(whole, rows.t(), out=scratch[: tokens * columns].view(tokens, columns))


def _column(local: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Returns each token's column in a part `[n, 1]`, 0 where it has none, and whether it has one `[n]`."""
    here = (local >= part.start) & (local < part.stop)
    return (local - part.start).masked_fill_(~here, 0).unsqueeze(1), here


@Fused
def _log_sum_exp(logits: Tensor, column: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp `[n]` of a part's logits, and the logits of targets `[n]`, 0 for targets elsewhere.

    May write to the logits, `[n, c]`.
    """
    wide = logits.to(_wide(logits.dtype))
    of_targets = wide.gather(1, column).squeeze(1).masked_fill_(~here, 0.0)
    largest = wide.amax(dim=1)  # [n]
    return wide.sub_(largest.unsqueeze(1)).exp_().sum(dim=1).log_().add_(largest), of_targets


@Fused
def _gradient_of_logits(logits: Tensor, column: Tensor, here: Tensor, log_sum_exp: Tensor, scale: Tensor) -> Tensor:
    """Returns (softmax - target) * scale of a part, `[n, c]`. May write to the logits.

    Args:
        log_sum_exp: `[n, 1]`, over the whole vocabulary.
        scale: `[n, 1]`, gradient of each token's loss.
    """
    softmax = logits.to(_wide(logits.dtype)).sub_(log_sum_exp).exp_()
    if torch.compiler.is_compiling():  # a comparison is fused with the rest, and a scatter is not
        is_target = torch.arange(softmax.shape[1], device=softmax.device) == torch.where(here.unsqueeze(1), column, -1)
        softmax = softmax - is_target.to(softmax.dtype)
    else:
        softmax.scatter_add_(1, column, -here.to(softmax.dtype).unsqueeze(1))
    return softmax.mul_(scale).to(logits.dtype)


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
