"""The core of attention, softmax(QK^T / sqrt(d)) V, on torch's fused kernels."""

from __future__ import annotations

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from .. import parallel_state
from ..base.dtypes import LOW_PRECISION
from ..base.errors import ConfigError
from ..base.megatron_names import checks_arguments, refuse
from ..parallel_state import check_same_groups
from ..process_groups_config import ProcessGroupCollection
from ..tensor_parallel.groups import group_size
from ..tensor_parallel.random import get_rng_tracker
from . import document_attention, piecewise_attention
from .attention_backend import (
    KERNELS,
    expand_groups,
    has_flash_kernel,
    has_kernel,
    pick_backend,
    takes_pieces,
    warn_of_slow_pieces,
)
from .document_attention import attend_within_documents
from .enums import AttnMaskType
from .module import MegatronModule
from .piecewise_attention import attend_in_pieces
from .sequences import PackedDocuments, gather_sequence, own_positions, visible_keys
from .transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """Causal attention of this rank's heads. Has no parameters.

    Without an explicit mask no tensor of s x s elements is allocated, unless the backend has no fused kernel; on CPU
    that is so for attention dropout.

    Args:
        layer_number: from 1; a label, which nothing reads.
        attn_mask_type: None or causal, which are the same.
        attention_type: "self".
        attention_dropout: default is the config's.
        softmax_scale: Megatron-LM's argument; only None is allowed, for 1 / sqrt(d).
        cp_comm_type: Megatron-LM's argument; ignored.
        pg_collection: must be the groups of `shardstack.parallel_state`.

    Raises:
        ParallelConfigError: another mask, kind of attention, scale, or other groups are given.
    """

    saved_operations = (piecewise_attention.OPERATION, document_attention.OPERATION)

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType | None = None,
        attention_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        caller = "DotProductAttention"
        check_mask_type(caller, attn_mask_type)
        check_same_groups(caller, pg_collection, ("tp", "cp"))
        super().__init__(config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        documents: PackedDocuments | None = None,
    ) -> Tensor:
        """Computes attention over this rank's heads, for any strides with a contiguous last dim.

        With context parallelism s is the length of this rank's chunks, and queries see the keys of all ranks.

        Args:
            query: `[s, b, heads, d]`.
            key, value: `[s, b, groups, d]`; consecutive heads / groups query heads share a group.
            attention_mask: `[b or 1, 1, s, s]`, True where a query (third dim) must not see a key, in addition to
                the keys after it, which it never sees.
            documents: the documents packed into the batch; None without packing.

        Returns:
            `[s, b, heads * d]`.

        Raises:
            ConfigError: a mask is combined with context parallelism or packed documents; or the config's
            `attention_backend` cannot compute this here.
        """
        dropout = self.dropout if self.training else 0.0
        if documents is not None or parallel_state.get_context_parallel_world_size() > 1:
            if attention_mask is not None:
                raise ConfigError(
                    "an attention_mask of s x s elements cannot be used with context parallelism or packed "
                    "documents; give document_starts, or set context_parallel_size to 1"
                )
            return self._in_pieces(query, key, value, documents, dropout)
        fuses_groups = query.shape[2] != key.shape[2]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, n, s, d], views
        if fuses_groups and not _fuses_groups(query, attention_mask):
            key, value = (expand_groups(tensor, query.shape[1]) for tensor in (key, value))
            fuses_groups = False
        # Megatron's mask (True is hidden) as torch's (True is visible), with later keys hidden.
        visible = None if attention_mask is None else attention_mask.logical_not().tril()
        self._check_backend(query, key, dropout, has_mask=visible is not None)
        backend = self.config.attention_backend
        with (
            nullcontext() if backend == "auto" else sdpa_kernel(KERNELS[backend]),
            get_rng_tracker().fork() if dropout > 0.0 else nullcontext(),
        ):
            context = _attend(query, key, value, visible, dropout, fuses_groups)
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n * d]

    def _check_backend(self, query: Tensor, key: Tensor, dropout: float, *, has_mask: bool = False) -> None:
        """Raises ConfigError where the config's backend has no kernel for `[b, n, s, d]`, or `[s, n, b, d]`."""
        device, backend = query.device, self.config.attention_backend
        if query.is_cuda or backend != "auto":
            heads, groups, channels = query.shape[1], key.shape[1], query.shape[-1]
            drops = dropout > 0.0
            problem = pick_backend(
                backend, device.type, device.index, query.dtype, heads, groups, channels, drops, has_mask
            )
            if problem:
                raise ConfigError(problem)

    def _in_pieces(
        self, query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments | None, dropout: float
    ) -> Tensor:
        backend = self.config.attention_backend
        if not takes_pieces(backend):
            raise ConfigError(
                f"attention_backend is {backend!r}, which takes neither packed documents nor context parallelism; "
                "write 'auto' or 'flash'"
            )
        group = parallel_state.get_context_parallel_group(check_initialized=False)
        if backend != "auto":
            self._check_backend(query.transpose(1, 2), key.transpose(1, 2), dropout)
        with get_rng_tracker().fork() if dropout > 0.0 else nullcontext():
            bounds = None if documents is None or group_size(group) > 1 else documents.bounds
            if documents is not None and bounds is not None and has_flash_kernel(query):
                return attend_within_documents(query, key, value, bounds, documents.counts, dropout).flatten(2)
            warn_of_slow_pieces(
                query.device.type, documents is not None, group_size(group), query.dtype, query.shape[-1]
            )
            starts = None if documents is None else documents.starts
            if has_kernel(query, dropout):
                return attend_in_pieces(query, key, value, starts, dropout, group).flatten(2)
            # Quadratic memory, as without context parallelism on such a device.
            key, value = (gather_sequence(tensor, group).permute(1, 2, 0, 3) for tensor in (key, value))
            key, value = (expand_groups(tensor, query.shape[2]) for tensor in (key, value))
            visible = visible_keys(starts, own_positions(query.shape[0], query.device), key.shape[2])
            context = _attend(query.permute(1, 2, 0, 3), key, value, visible, dropout, False)
        return context.permute(2, 0, 1, 3).flatten(2)


def check_mask_type(caller: str, attn_mask_type: AttnMaskType | None) -> None:
    """Raises ParallelConfigError for a mask that is neither causal nor None, which means causal."""
    only = None if attn_mask_type is None else AttnMaskType.causal
    refuse(caller, attn_mask_type=(attn_mask_type, only, "a token sees none after it; hide more by attention_mask"))


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float, fuses: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, visible, dropout, is_causal=visible is None, enable_gqa=fuses
    )


def _fuses_groups(query: Tensor, attention_mask: Tensor | None) -> bool:
    """Returns whether a fused kernel supports fewer key heads than query heads.

    On CPU it does, and is 5 to 10 % faster than on copies. On CUDA the flash and cuDNN kernels do, which need half
    precision and no mask; otherwise torch would fall back to the kernel that allocates s x s scores.
    """
    return not query.is_cuda or (attention_mask is None and query.dtype in LOW_PRECISION)
