"""Self-attention: fused projection, rotation by positions (Su et al., 2021), core, projection back."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..base.megatron_names import checks_arguments
from ..base.module_protocol import FusedRows
from ..base.recomputation import recompute
from ..parallel_state import check_same_groups
from ..process_groups_config import ProcessGroupCollection
from ..tensor_parallel.groups import group_rank, group_size, resolve_group
from ..tensor_parallel.initialization import mark_parameter
from ..tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.mappings import gather_from_sequence_parallel_region
from .dot_product_attention import DotProductAttention, check_mask_type
from .enums import AttnMaskType
from .module import MegatronModule
from .norms import build_norm
from .sequences import PackedDocuments
from .spec_utils import Builder, IdentityOp, ModuleSpec, build_module
from .transformer_config import TransformerConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every angle, `[s, b or 1, 1, r]` each, in fp32. Channels i and i + r / 2 have one angle."""


def apply_rotary_pos_emb(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates the first r of the d channels of `tensor` `[s, b, ..., d]`, and leaves the others unchanged.

    Channel i is rotated together with channel i + r / 2. Angles are in fp32; products are in the tensor's dtype, as in
    Megatron-LM.
    """
    cos, sin = (part.to(tensor.dtype) for part in rotation)
    while cos.dim() < tensor.dim():
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    size = cos.shape[-1]
    if size == tensor.shape[-1]:
        return tensor * cos + _quarter_turn(tensor) * sin
    head, rest = tensor[..., :size], tensor[..., size:]
    return torch.cat((head * cos + _quarter_turn(head) * sin, rest), dim=-1)


def _quarter_turn(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@dataclass
class SelfAttentionSubmodules:
    """The modules of self-attention."""

    linear_qkv: ModuleSpec | Builder = ColumnParallelLinear
    core_attention: ModuleSpec | Builder = DotProductAttention
    linear_proj: ModuleSpec | Builder = RowParallelLinear
    q_layernorm: ModuleSpec | Builder | None = None
    """Norm of each head's query. None or `IdentityOp` means the config's `qk_layernorm`."""
    k_layernorm: ModuleSpec | Builder | None = None
    """Norm of each head's key. None or `IdentityOp` means the config's `qk_layernorm`."""


class SelfAttention(MegatronModule):
    """Causal multi-head or grouped-query attention, with heads split over tensor-parallel ranks.

    The rows of the fused projection's weight are ordered by query group, `[q ... q k v]` for each group in turn, so
    that a split between groups keeps every query with its key and value. With fewer groups than ranks the weight is
    still split evenly, through groups; the product is gathered, and each rank takes its heads and their group's key
    and value from it (as Megatron-LM does).

    Args:
        submodules: other classes, constructed as these are.
        layer_number: from 1; given to the core of attention.
        attn_mask_type: None or causal, which are the same.
        cp_comm_type: Megatron-LM's argument; ignored.
        pg_collection: must be the groups of `shardstack.parallel_state`.
        pp_layer_offset: Megatron-LM's argument; ignored, as `layer_number` counts the layers of the whole model.
        name: a label, which nothing reads.

    Raises:
        ConfigError: the config leaves a size at 0.
        ParallelConfigError: another mask or other groups are given.
    """

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules | None = None,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        config.check_sizes_given("num_layers", "hidden_size", "num_attention_heads")
        check_mask_type("SelfAttention", attn_mask_type)
        check_same_groups("SelfAttention", pg_collection, ("tp", "cp"))
        submodules = submodules or SelfAttentionSubmodules()
        super().__init__(config)
        self.layer_number = layer_number
        heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
        ranks = group_size(resolve_group(None))
        config.check_split(ranks)
        self.ranks_per_group = max(1, ranks // groups)
        self.heads_per_group = heads // groups // self.ranks_per_group  # of this rank
        width, has_bias = config.hidden_size, config.add_bias_linear
        options = {"config": config, "init_method": config.init_method, "bias": has_bias or config.add_qkv_bias}
        self.linear_qkv = build_module(submodules.linear_qkv, width, (heads + 2 * groups) * channels, **options)
        queries = heads // groups * channels
        fused = FusedRows((("q", queries), ("k", channels), ("v", channels)), head_rows=channels)
        mark_parameter(self.linear_qkv, fused_rows=fused)
        # Each tensor-parallel rank norms its own heads with the whole weight.
        partial = ranks > 1
        own = build_norm if config.qk_layernorm else None
        norms = (own if n in (None, IdentityOp) else n for n in (submodules.q_layernorm, submodules.k_layernorm))
        self.q_layernorm, self.k_layernorm = (
            None if norm is None else build_module(norm, config, channels, partial_gradients=partial) for norm in norms
        )
        self.core_attention = build_module(submodules.core_attention, config=config, layer_number=layer_number)
        options = {"config": config, "init_method": config.output_layer_init_method, "bias": has_bias}
        self.linear_proj = build_module(submodules.linear_proj, heads * channels, width, **options)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: Rotation | None = None,
        documents: PackedDocuments | None = None,
    ) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`, or this rank's `[s / tp, b, h]` each with sequence parallelism.

        Args:
            attention_mask, documents: arguments of `DotProductAttention`.
            rotary_pos_emb: rotates queries and keys.
        """
        query, key, value = self._query_key_value(hidden_states, rotary_pos_emb)
        if self.config.recompute_granularity == "selective" and self.training:
            core = functools.partial(self.core_attention, **packing(documents))
            context = recompute(core, query, key, value, attention_mask)
        else:
            context = self.core_attention(query, key, value, attention_mask, **packing(documents))
        output: torch.Tensor = self.linear_proj(context)[0]
        return output

    def _query_key_value(
        self, hidden_states: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query `[s, b, heads / tp, d]`, key and value `[s, b, groups / tp, d]`: views if nothing changed
        them.

        Ranks that share a group each have its whole key and value.
        """
        per_group = self.heads_per_group
        projection = self.linear_qkv(hidden_states)[0]  # [s, b, (heads + 2 groups) / tp * d]
        if self.ranks_per_group > 1:
            projection = self._own_heads(projection)
        of_groups = projection.unflatten(-1, (-1, per_group + 2, self.config.kv_channels))
        if self.q_layernorm is None or self.k_layernorm is None:
            turning, value = of_groups.split([per_group + 1, 1], dim=3)  # rotate queries and their key together
            if rotation is not None:
                turning = apply_rotary_pos_emb(turning, rotation)
            query, key = turning.split([per_group, 1], dim=3)
        else:
            query, key, value = of_groups.split([per_group, 1, 1], dim=3)
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            if rotation is not None:
                query, key = apply_rotary_pos_emb(query, rotation), apply_rotary_pos_emb(key, rotation)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)

    def _own_heads(self, projection: torch.Tensor) -> torch.Tensor:
        """Returns this rank's heads with their group's key and value, `[s, b, (q ... q k v) * d]`, from its slice."""
        tp_group, channels = self.linear_qkv.tp_group, self.config.kv_channels
        group, part = divmod(group_rank(tp_group), self.ranks_per_group)
        # Gather the slices along the first dim; backward adds the gradients of all ranks that used one.
        whole = gather_from_sequence_parallel_region(projection.movedim(-1, 0), group=tp_group)
        of_group = whole.unflatten(0, (self.config.num_query_groups, -1))[group]  # [(q ... q k v) * d, s, b]
        queries = self.heads_per_group * channels
        own = torch.cat((of_group[part * queries : (part + 1) * queries], of_group[-2 * channels :]))
        return own.movedim(0, -1).contiguous()


def packing(documents: PackedDocuments | None) -> dict[str, PackedDocuments]:
    """Returns `documents` as a keyword argument if there are any: modules of a spec may not support them."""
    return {} if documents is None else {"documents": documents}
