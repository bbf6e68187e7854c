"""Chooses the kernel of whole causal attention, once for each device, dtype and shape of heads.

`attention_backend` of the config has Megatron-LM's values, and "flash3". "auto" leaves the choice to torch, which
tries the fastest kernel of the device first. Another value names one kernel, for every call, and is an error where it
cannot run. "flash3" puts FlashAttention-3 (Shah et al., 2024) in the place of torch's flash kernel, in the whole
process. Attention within packed documents and over context-parallel ranks needs kernels that return the log-sum-exp of
the scores, forward and backward, which are flash's in half precision. With it the attentions of one query to two sets
of keys combine into the attention to both (:func:`combine`), and the backward of each set needs only the combined
output and log-sum-exp (Dao et al., 2022; Liu et al., 2023).

Only this file chooses among torch's kernels. All tensors are `[b, n, s, d]` with any strides and a contiguous last
dim; keys and values may have fewer heads than queries, each shared by consecutive ones.
"""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend

from ..base._torch_compat import called_while_compiled
from ..base.dtypes import LOW_PRECISION, dtype_name
from ..base.errors import warn_once
from ..base.text import first_line

_ALIGNED_CHANNELS = 8
"""CUDA's kernels take heads whose width is a multiple of this."""

_ALIGNED_LOGSUMEXP = 32
"""CUDA's kernel for fp32 pads the queries of its log-sum-exp to a multiple of this."""

MOST_CHANNELS = 256
"""The widest heads that CUDA's kernels take."""


@dataclass(frozen=True)
class PartialAttention:
    """The attention of queries to one set of keys."""

    output: Tensor
    """`[b, n, s, d]`, in the dtype of the queries."""
    logsumexp: Tensor
    """`[b, n, s]`: log of the sum over keys of exp(score), in fp32 or wider."""
    random: tuple[Tensor, ...] = ()
    """The random state that tells the backward kernel which weights were dropped."""


def has_kernel(query: Tensor, dropout: float) -> bool:
    """Returns whether there is a fused kernel: on CPU without dropout, on CUDA in half precision (`has_flash_kernel`)
    and in fp32, up to 256 channels per head."""
    if query.device.type == "cpu":
        return dropout == 0.0 and query.is_floating_point()
    is_fp32 = query.is_cuda and query.dtype is torch.float32 and query.shape[-1] <= MOST_CHANNELS
    return is_fp32 or has_flash_kernel(query)


def has_flash_kernel(query: Tensor) -> bool:
    """Returns whether CUDA's flash kernel takes it: in half precision, up to 256 channels per head, since Ampere."""
    is_fit = query.is_cuda and query.dtype in LOW_PRECISION and query.shape[-1] <= MOST_CHANNELS
    return is_fit and _is_ampere_or_later(query.device.index)


@called_while_compiled
def _is_ampere_or_later(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: float = 0.0) -> PartialAttention:
    """Computes attention to all keys or, with `causal` and as many keys as queries, to keys up to each query's own."""
    if not query.is_cuda:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return PartialAttention(output, logsumexp)
    channels, scale = query.shape[-1], 1.0 / math.sqrt(query.shape[-1])
    query, key, value = (align_channels(tensor) for tensor in (query, key, value))
    if query.dtype in LOW_PRECISION:
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        output, logsumexp, random = results[0], results[1], (results[6], results[7])
    else:
        key, value = (expand_groups(tensor, query.shape[1]) for tensor in (key, value))
        output, logsumexp, *random = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scale
        )
        logsumexp = logsumexp[..., : query.shape[2]]
    return PartialAttention(output[..., :channels], logsumexp, tuple(random))


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: PartialAttention,
    *,
    causal: bool,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value for one set of keys.

    Args:
        grad: gradient of the combined output.
        whole: the combined output and log-sum-exp, with `random` of :func:`attend` for these keys, which only
            `dropout` needs.
    """
    output, logsumexp = whole.output, whole.logsumexp
    if not query.is_cuda:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, logsumexp, 0.0, causal
        )
        return grads
    random = whole.random or no_random_state(query)
    channels, groups, scale = query.shape[-1], key.shape[1], 1.0 / math.sqrt(query.shape[-1])
    grad, query, key, value, output = (align_channels(tensor) for tensor in (grad, query, key, value, output))
    if query.dtype in LOW_PRECISION:
        grads_of_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, output, logsumexp.contiguous()),
            *(None, None, query.shape[2], key.shape[2], dropout, causal, *random),
            scale=scale,
        )
    else:
        key, value = (expand_groups(tensor, query.shape[1]) for tensor in (key, value))
        aligned_sums = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ALIGNED_LOGSUMEXP), value=math.inf)  # of no weight
        grads_of_kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad, query, key, value, None, output, aligned_sums, *random),
            *(dropout, [True, True, True, False], causal),
            scale=scale,
        )
    grad_query, grad_key, grad_value = (tensor[..., :channels] for tensor in grads_of_kernel[:3])
    return grad_query, _sum_groups(grad_key, groups), _sum_groups(grad_value, groups)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Combines the attentions of the same queries to two sets of keys, without `random`."""
    logsumexp = torch.logaddexp(first.logsumexp, second.logsumexp)
    output = torch.zeros_like(first.output, dtype=logsumexp.dtype)
    for part in (first, second):
        output.addcmul_(part.output.to(output.dtype), (part.logsumexp - logsumexp).exp_().unsqueeze(-1))
    return PartialAttention(output.to(first.output.dtype), logsumexp)


def no_random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a random state for backward kernels on CUDA, which take one but do not read it without dropout."""
    return _zero_state(query.device, query.dtype in LOW_PRECISION)


# Kept as long as the process: all calls on a device share these tensors, which kernels only read.
@cache
def _zero_state(device: torch.device, low_precision: bool) -> tuple[Tensor, Tensor]:
    if low_precision:
        state = torch.zeros(3, dtype=torch.uint64, device=device)
        return state[:2], state[2]
    return torch.zeros((), dtype=torch.long, device=device), torch.zeros((), dtype=torch.long, device=device)


def align_channels(tensor: Tensor) -> Tensor:
    """Pads channels with zeros, which change no score and no output."""
    missing = -tensor.shape[-1] % _ALIGNED_CHANNELS
    return F.pad(tensor, (0, missing)) if missing else tensor


def expand_groups(tensor: Tensor, heads: int) -> Tensor:
    """Repeats `[b, groups, s, d]` to `[b, heads, s, d]`."""
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    """Sums a gradient over the heads that `expand_groups` repeated."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


AttentionBackend = Literal["auto", "flash", "flash3", "fused", "unfused", "local"]
"""Megatron-LM's names of kernels: torch's choice, torch's flash kernel, cuDNN's kernel, and, under two names, separate
products and softmax. "flash3" is FlashAttention-3."""

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
    "local": SDPBackend.MATH,
}
_CAN_USE = {
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
}
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
}

_log = logging.getLogger(__name__)


def takes_pieces(backend: str) -> bool:
    """Returns whether a backend attends within documents and over context-parallel ranks."""
    return backend in ("auto", "flash", "flash3")


@called_while_compiled
def pick_backend(
    backend: str,
    kind: str,
    index: int | None,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    channels: int,
    drops: bool,
    has_mask: bool,
) -> str:
    """Picks the kernel once for each set of arguments, and returns an error message, or "" if the backend works here.

    It returns the message because compiled code calls it while it is compiled: an exception raised in there would
    become an error of the compiler.

    Args:
        kind, index: type and index of the device.
        heads, groups: number of heads of queries, and of keys and values as the kernel gets them.
        drops: whether attention weights are dropped.
        has_mask: whether there is an explicit mask.
    """
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return _choose(backend, device, dtype, (heads, groups), channels, drops, has_mask and backend != "auto")


@called_while_compiled
def warn_of_slow_pieces(kind: str, has_documents: bool, ranks: int, dtype: torch.dtype, channels: int) -> None:
    """Warns once, with a remedy, if packed documents or context parallelism use a slow attention path on a GPU.

    Args:
        kind: type of the device.
        has_documents: whether documents are packed.
        ranks: number of ranks that share a sequence.
        channels: channels of a head.
    """
    if kind != "cuda":
        return
    if dtype not in (*LOW_PRECISION, torch.float32) or channels > MOST_CHANNELS:
        warn_once(
            f"heads of {channels} channels in {dtype_name(dtype)} have no fused attention kernel on a GPU: its memory "
            f"is quadratic in the length of a sequence; use bf16 or fp16, and heads of up to {MOST_CHANNELS} channels"
        )
    elif has_documents and ranks > 1:
        warn_once(
            f"packed documents over {ranks} context-parallel ranks take one call of the attention kernel for each "
            "piece of a document, and one of all documents without; set context_parallel_size to 1 if sequences fit"
        )
    elif has_documents and dtype not in LOW_PRECISION:
        warn_once(
            f"packed documents in {dtype_name(dtype)} take one call of the attention kernel for each document, and "
            "one of all in low precision; use bf16 or fp16"
        )


# Runs once in a process for the same arguments. On CUDA it logs the choice.
@cache
def _choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    channels: int,
    drops: bool,
    has_mask: bool,
) -> str:
    call = f"{device.type}, {dtype_name(dtype)}, heads of {channels} channels"
    call += ", dropout" * drops + ", a mask" * has_mask
    refusal = f"attention_backend is {backend!r}, which torch does not have here ({call}%s); write 'auto'"
    if backend == "flash3" and (reason := _why_not_flash3(device, drops)):
        return refusal % f": {reason}"
    if device.type != "cuda":
        return refusal % "" if backend == "fused" or (backend == "flash" and drops) else ""
    kernels = [kernel for kernel in _CAN_USE if backend == "auto" or kernel is KERNELS[backend]]
    probe = _probe(device, dtype, heads, channels, drops, has_mask)
    reasons = {_NAMES[kernel]: _why_not(kernel, probe) for kernel in kernels}
    if usable := [name for name, reason in reasons.items() if not reason]:
        _log.info("attention: %s kernel (%s)", " or ".join(usable), call)
    elif backend == "auto":
        warn_once(
            f"no fused attention kernel here ({call}: {reasons['flash']}): its memory is quadratic in the length of a "
            f"sequence; use bf16 or fp16, and heads of up to {MOST_CHANNELS} channels"
        )
    elif reasons:
        return refusal % f": {reasons.popitem()[1]}"
    return ""


def _why_not_flash3(device: torch.device, drops: bool) -> str:
    """Puts FlashAttention-3 in the place of torch's flash kernel, and returns "", or why that is not possible."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a GPU of capability 9.0"
    if drops:
        return "it drops no attention weights"
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return "it needs torch 2.11 or newer"
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        return f"it needs FlashAttention-3's package flash_attn_interface, and torch says: {first_line(error)}"
    return ""


def _probe(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], channels: int, drops: bool, has_mask: bool
) -> SDPAParams:
    """Returns the parameters of a small attention call, to ask torch which kernels can run it."""
    query, key, value = (
        torch.empty(128, 1, n, channels, device=device, dtype=dtype, requires_grad=True).permute(1, 2, 0, 3)
        for n in (heads[0], heads[1], heads[1])
    )
    mask = torch.ones(1, 1, 128, 128, device=device, dtype=torch.bool) if has_mask else None
    return SDPAParams(query, key, value, mask, 0.1 if drops else 0.0, not has_mask, heads[0] != heads[1])


def _why_not(kernel: SDPBackend, probe: SDPAParams) -> str:
    """Returns torch's reason why a kernel cannot take a call, or "" if it can."""
    if _CAN_USE[kernel](probe, False):
        return ""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        _CAN_USE[kernel](probe, True)
    messages = [str(reason.message).splitlines()[0].partition(" (Triggered")[0] for reason in reasons]
    return messages[0] if messages else "torch gives no reason"
