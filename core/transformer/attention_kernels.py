"""Calls torch's fused attention kernels that also return the log-sum-exp of the scores, forward and backward.

With it the attentions of one query to two sets of keys combine into the attention to both (:func:`combine`), and the
backward of each set needs only the combined output and log-sum-exp (Dao et al., 2022; Liu et al., 2023). Only this
file and `attention_backend`, of attention without pieces, choose among torch's kernels. All tensors are `[b, n, s, d]`
with any strides and a contiguous last dim; keys and values may have fewer heads than queries, each shared by
consecutive ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from .._torch_compat import called_while_compiled
from ..dtypes import LOW_PRECISION

_ALIGNED_CHANNELS = 8
"""CUDA's kernels take heads whose width is a multiple of this."""

_ALIGNED_LOGSUMEXP = 32
"""CUDA's kernel for fp32 pads the queries of its log-sum-exp to a multiple of this."""

MOST_CHANNELS = 256
"""The widest heads that CUDA's kernels take."""


@dataclass(frozen=True)
class PartialAttention:
    """The attention of queries to one set of keys."""

    output: torch.Tensor
    """`[b, n, s, d]`, in the dtype of the queries."""
    logsumexp: torch.Tensor
    """`[b, n, s]`: log of the sum over keys of exp(score), in fp32 or wider."""
    random: tuple[torch.Tensor, ...] = ()
    """The random state that tells the backward kernel which weights were dropped."""


def has_kernel(query: torch.Tensor, dropout: float) -> bool:
    """Returns whether there is a fused kernel: on CPU without dropout, on CUDA in half precision (`has_flash_kernel`)
    and in fp32, up to 256 channels per head."""
    if query.device.type == "cpu":
        return dropout == 0.0 and query.is_floating_point()
    is_fp32 = query.is_cuda and query.dtype is torch.float32 and query.shape[-1] <= MOST_CHANNELS
    return is_fp32 or has_flash_kernel(query)


def has_flash_kernel(query: torch.Tensor) -> bool:
    """Returns whether CUDA's flash kernel takes it: in half precision, up to 256 channels per head, since Ampere."""
    is_fit = query.is_cuda and query.dtype in LOW_PRECISION and query.shape[-1] <= MOST_CHANNELS
    return is_fit and _is_ampere_or_later(query.device.index)


@called_while_compiled
def _is_ampere_or_later(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, dropout: float = 0.0
) -> PartialAttention:
    """Computes attention to all keys; with `causal`, to keys up to each query's own, with as many keys as queries."""
    if not query.is_cuda:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return PartialAttention(output, logsumexp)
    channels, scale = query.shape[-1], 1.0 / math.sqrt(query.shape[-1])
    query, key, value = (aligned(tensor) for tensor in (query, key, value))
    if query.dtype in LOW_PRECISION:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        output, logsumexp, random = found[0], found[1], (found[6], found[7])
    else:
        key, value = (_expanded(tensor, query.shape[1]) for tensor in (key, value))
        output, logsumexp, *random = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scale
        )
        logsumexp = logsumexp[..., : query.shape[2]]
    return PartialAttention(output[..., :channels], logsumexp, tuple(random))


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: PartialAttention,
    *,
    causal: bool,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the gradients of query, key and value for one set of keys.

    Args:
        grad: gradient of the combined output.
        attended: the combined output and log-sum-exp, with `random` of :func:`attend` for these keys, which only
            `dropout` needs.
    """
    output, logsumexp = attended.output, attended.logsumexp
    if not query.is_cuda:
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output, logsumexp, 0.0, causal
            )
        )
        return grads
    random = attended.random or no_random_state(query)
    channels, groups, scale = query.shape[-1], key.shape[1], 1.0 / math.sqrt(query.shape[-1])
    grad, query, key, value, output = (aligned(tensor) for tensor in (grad, query, key, value, output))
    if query.dtype in LOW_PRECISION:
        found: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, output, logsumexp.contiguous()),
            *(None, None, query.shape[2], key.shape[2], dropout, causal, *random),
            scale=scale,
        )
    else:
        key, value = (_expanded(tensor, query.shape[1]) for tensor in (key, value))
        padded = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ALIGNED_LOGSUMEXP), value=math.inf)  # of no weight
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad, query, key, value, None, output, padded, *random),
            *(dropout, [True, True, True, False], causal),
            scale=scale,
        )
    grad_query, grad_key, grad_value = (tensor[..., :channels] for tensor in found[:3])
    return grad_query, _summed(grad_key, groups), _summed(grad_value, groups)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Combines the attentions of the same queries to two sets of keys; drops `random`."""
    logsumexp = torch.logaddexp(first.logsumexp, second.logsumexp)
    output = torch.zeros_like(first.output, dtype=logsumexp.dtype)
    for part in (first, second):
        output.addcmul_(part.output.to(output.dtype), (part.logsumexp - logsumexp).exp_().unsqueeze(-1))
    return PartialAttention(output.to(first.output.dtype), logsumexp)


def no_random_state(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the random state that a backward kernel on CUDA takes as an argument; without dropout it is not read."""
    return _zero_state(query.device, query.dtype in LOW_PRECISION)


# Kept as long as the process: all calls on a device share these tensors, which kernels only read.
@cache
def _zero_state(device: torch.device, low_precision: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if low_precision:
        state = torch.zeros(3, dtype=torch.uint64, device=device)
        return state[:2], state[2]
    return torch.zeros((), dtype=torch.long, device=device), torch.zeros((), dtype=torch.long, device=device)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Pads channels with zeros, which change no score and no output."""
    missing = -tensor.shape[-1] % _ALIGNED_CHANNELS
    return F.pad(tensor, (0, missing)) if missing else tensor


def _expanded(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats `[b, groups, s, d]` to `[b, heads, s, d]`."""
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=1)


def _summed(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """Sums a gradient over the heads that `_expanded` repeated."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)
