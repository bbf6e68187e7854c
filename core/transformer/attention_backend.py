"""Chooses the kernel of whole causal attention, once for each device, dtype and shape of heads.

`attention_backend` of the config has Megatron-LM's values. "auto" sets the order in which torch tries its kernels, the
fastest of the device first, and leaves what a call cannot use to torch; another value names one kernel, for every
call, and is an error where it cannot run. Attention within packed documents and over context-parallel ranks needs
kernels that return the log-sum-exp (`attention_kernels`), which are flash's in half precision.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cache
from typing import Any, Literal

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch_compat import called_while_compiled, set_attention_order
from ..dtypes import LOW_PRECISION, dtype_name
from ..errors import warn_once
from .attention_kernels import MOST_CHANNELS

AttentionBackend = Literal["auto", "flash", "fused", "unfused", "local"]
"""Megatron-LM's names: torch's choice; its flash kernel; cuDNN's; products and softmax one after the other; the
same."""

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
    "local": SDPBackend.MATH,
}
_CAN_USE = {
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
}
_NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
}
_LEAST_CUDNN = 91500
"""The version from which torch itself prefers cuDNN's kernel."""

_log = logging.getLogger(__name__)


def backend_name(value: Any) -> Any:
    """Returns the name of a member of Megatron-LM's enum `AttnBackend`, and anything else as it is."""
    return value.name if isinstance(value, Enum) else value


def takes_pieces(backend: str) -> bool:
    """Returns whether a backend attends within documents and over context-parallel ranks."""
    return backend in ("auto", "flash")


@called_while_compiled
def why_not_backend(
    backend: str,
    kind: str,
    index: int | None,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    channels: int,
    drops: bool,
    masked: bool,
) -> str:
    """Chooses, at the first call with these arguments; compiled code calls it while it is compiled.

    Returns why the backend cannot compute this here, and empty text if it can: in code that is being compiled an error
    of a function that this calls would be the compiler's.

    Args:
        kind, index: of the device.
        heads, groups: of queries, and of keys and values as the kernel gets them.
        drops: whether attention weights are dropped.
        masked: whether there is an explicit mask.
    """
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return _choose(backend, device, dtype, (heads, groups), channels, drops, masked and backend != "auto")


def only_backend(backend: str) -> AbstractContextManager[Any]:
    """Returns a context in which torch's attention takes this backend alone; with "auto" torch's choice."""
    return nullcontext() if backend == "auto" else sdpa_kernel(_KERNELS[backend])


@called_while_compiled
def warn_of_slow_pieces(kind: str, packed: bool, ranks: int, dtype: torch.dtype, channels: int) -> None:
    """Warns once if packed documents or context parallelism use a slow attention path on a GPU; says how to avoid it.

    Args:
        kind: of the device.
        packed: whether documents are packed.
        ranks: that share a sequence.
        channels: of a head.
    """
    if kind != "cuda":
        return
    if dtype not in (*LOW_PRECISION, torch.float32) or channels > MOST_CHANNELS:
        warn_once(
            f"heads of {channels} channels in {dtype_name(dtype)} have no fused attention kernel on a GPU: its memory "
            f"is quadratic in the length of a sequence; use bf16 or fp16, and heads of up to {MOST_CHANNELS} channels"
        )
    elif packed and ranks > 1:
        warn_once(
            f"packed documents over {ranks} context-parallel ranks take one call of the attention kernel for each "
            "piece of a document, and one of all documents without; set context_parallel_size to 1 if sequences fit"
        )
    elif packed and dtype not in LOW_PRECISION:
        warn_once(
            f"packed documents in {dtype_name(dtype)} take one call of the attention kernel for each document, and "
            "one of all in low precision; use bf16 or fp16"
        )


# Runs once in a process for the same arguments. On CUDA it logs the choice, and with "auto" sets the order in which
# torch tries its kernels, for the whole process.
@cache
def _choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    channels: int,
    drops: bool,
    masked: bool,
) -> str:
    asked = f"{device.type}, {dtype_name(dtype)}, heads of {channels} channels"
    asked += ", dropout" * drops + ", a mask" * masked
    refusal = f"attention_backend is {backend!r}, which torch does not have here ({asked}%s); write 'auto'"
    if device.type != "cuda":
        return refusal % "" if backend == "fused" or (backend == "flash" and drops) else ""
    if backend == "auto":
        _prefer_the_fastest(device, dtype, heads, channels, drops, asked)
    elif (kernel := _KERNELS[backend]) in _CAN_USE:
        if reason := _why_not(kernel, _probe(device, dtype, heads, channels, drops, masked)):
            return refusal % f": {reason}"
        _log.info("attention: %s kernel, as asked (%s)", _NAMES[kernel], asked)
    return ""


def _prefer_the_fastest(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], channels: int, drops: bool, asked: str
) -> None:
    probe = _probe(device, dtype, heads, channels, drops, masked=False)
    order = _order(device)
    usable = [kernel for kernel in order if not _why_not(kernel, probe)]
    if usable:
        set_attention_order([*order, SDPBackend.MATH])
        _log.info("attention: %s kernel (%s)", ", else ".join(_NAMES[kernel] for kernel in usable), asked)
        return
    warn_once(
        f"no fused attention kernel here ({asked}: {_why_not(order[0], probe)}): its memory is quadratic in the "
        f"length of a sequence; use bf16 or fp16, and heads of up to {MOST_CHANNELS} channels"
    )


def _order(device: torch.device) -> list[SDPBackend]:
    """Returns the fused kernels, the fastest on this device first; torch's order, made independent of its version."""
    prefers_cudnn = (
        torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
        and (torch.backends.cudnn.version() or 0) >= _LEAST_CUDNN
        and "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    )
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return [SDPBackend.CUDNN_ATTENTION, *others] if prefers_cudnn else [*others, SDPBackend.CUDNN_ATTENTION]


def _probe(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], channels: int, drops: bool, masked: bool
) -> SDPAParams:
    """Returns a call in miniature, as torch's questions take it."""
    query, key, value = (
        torch.empty(128, 1, n, channels, device=device, dtype=dtype, requires_grad=True).permute(1, 2, 0, 3)
        for n in (heads[0], heads[1], heads[1])
    )
    mask = torch.ones(1, 1, 128, 128, device=device, dtype=torch.bool) if masked else None
    return SDPAParams(query, key, value, mask, 0.1 if drops else 0.0, not masked, heads[0] != heads[1])


def _why_not(kernel: SDPBackend, probe: SDPAParams) -> str:
    """Returns torch's reason why a kernel cannot take a call; empty if it can."""
    if _CAN_USE[kernel](probe, False):
        return ""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        _CAN_USE[kernel](probe, True)
    said = [str(reason.message).splitlines()[0].partition(" (Triggered")[0] for reason in reasons]
    return said[0] if said else "torch gives no reason"
