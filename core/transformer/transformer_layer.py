"""One pre-norm transformer layer, and dropout of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from .. import parallel_state
from ..base.errors import ConfigError
from ..base.megatron_names import checks_arguments, refuse
from ..parallel_state import check_same_groups
from ..process_groups_config import ProcessGroupCollection
from ..tensor_parallel.random import CONTEXT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker
from .attention import Rotation, SelfAttention, packing
from .mlp import MLP
from .module import MegatronModule
from .moe.moe_layer import MoELayer
from .norms import build_norm
from .sequences import PackedDocuments
from .spec_utils import Builder, IdentityOp, ModuleSpec, build_module
from .transformer_config import TransformerConfig

_OWN_RESIDUAL = "the layer adds the branch, after dropout, itself; leave it out"
_NO_CROSS_ATTENTION = "there is no cross-attention"


@dataclass
class TransformerLayerSubmodules:
    """The modules of a layer. Those left out do nothing, as in Megatron-LM."""

    input_layernorm: ModuleSpec | Builder = IdentityOp
    self_attention: ModuleSpec | Builder = IdentityOp
    self_attn_bda: None = None
    """Megatron-LM's module that adds a branch. Refused, because the layer adds it."""
    pre_cross_attn_layernorm: ModuleSpec | Builder = IdentityOp
    cross_attention: ModuleSpec | Builder = IdentityOp
    cross_attn_bda: None = None
    pre_mlp_layernorm: ModuleSpec | Builder = IdentityOp
    mlp: ModuleSpec | Builder = IdentityOp
    mlp_bda: None = None
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)
    """Megatron-LM's names in checkpoints, which nothing here reads."""


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches.

    Args:
        submodules: norms, attention and MLP; by default those of this package. An attention or an MLP may return its
            output with a bias to add, as Megatron-LM's do.
        layer_number: from 1, given to the attention.
        hidden_dropout: default is the config's.
        pg_collection: must be the groups of `shardstack.parallel_state`.
        is_mtp_layer: Megatron-LM's argument; refused unless at its default.
        vp_stage, add_layer_offset, pp_layer_offset: Megatron-LM's arguments for pipeline stages; ignored, as
            `layer_number` counts the layers of the whole model.
        name: a label, which nothing reads.

    Raises:
        ConfigError: the config leaves a size at 0, or the spec and the config disagree about experts.
        ParallelConfigError: other groups are given, or an argument or a submodule is refused.
    """

    is_unit = True

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules | None = None,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        submodules = submodules or TransformerLayerSubmodules(
            input_layernorm=build_norm,
            self_attention=SelfAttention,
            pre_mlp_layernorm=build_norm,
            mlp=MoELayer if config.has_experts(layer_number) else MLP,
        )
        refuse(
            "TransformerLayerSubmodules",
            **{name: (getattr(submodules, name), None, _OWN_RESIDUAL) for name in ("self_attn_bda", "mlp_bda")},
            cross_attn_bda=(submodules.cross_attn_bda, None, _NO_CROSS_ATTENTION),
            cross_attention=(submodules.cross_attention, IdentityOp, _NO_CROSS_ATTENTION),
            pre_cross_attn_layernorm=(submodules.pre_cross_attn_layernorm, IdentityOp, _NO_CROSS_ATTENTION),
        )
        check_same_groups("TransformerLayer", pg_collection, ("tp", "cp", "pp"))
        config.check_sizes_given("num_layers", "hidden_size")
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.input_layernorm = build_module(submodules.input_layernorm, config=config, hidden_size=width, eps=eps)
        self.self_attention = build_module(submodules.self_attention, config=config, layer_number=layer_number)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config=config, hidden_size=width, eps=eps)
        self.mlp = build_module(submodules.mlp, config=config)
        if isinstance(self.mlp, MoELayer):
            self.mlp.set_layer_number(layer_number)
        if isinstance(self.mlp, (MLP, MoELayer)) and isinstance(self.mlp, MLP) == config.has_experts(layer_number):
            raise ConfigError(
                f"layer {layer_number} is to have {'' if config.has_experts(layer_number) else 'no '}experts "
                f"(num_moe_experts {config.num_moe_experts}, moe_layer_freq {config.moe_layer_freq!r}), and its spec "
                f"has a {type(self.mlp).__name__}; give get_gpt_layer_local_spec its num_experts, or no spec"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: Rotation | None = None,
        documents: PackedDocuments | None = None,
    ) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`, or this rank's `[s / tp, b, h]` each with sequence parallelism."""
        norm_output = self.input_layernorm(hidden_states)
        attention_output = self.self_attention(
            norm_output, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, **packing(documents)
        )
        hidden_states = hidden_states + self._dropout(attention_output)
        return hidden_states + self._dropout(self.mlp(self.pre_mlp_layernorm(hidden_states)))

    def _dropout(self, branch: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        if isinstance(branch, tuple):
            output, bias = branch
            branch = output if bias is None else output + bias
        return hidden_dropout(
            branch, self.hidden_dropout, training=self.training, sequence_parallel=self.config.sequence_parallel
        )


def hidden_dropout(input_: torch.Tensor, p: float, *, training: bool, sequence_parallel: bool) -> torch.Tensor:
    """Applies dropout to a residual stream `[s, b, h]`, or to this rank's part of the sequence `[s / tp, b, h]`.

    Tensor-parallel ranks with the same activations drop the same elements; ranks with parts of the sequence, by
    sequence or context parallelism, draw from their own streams.
    """
    if p == 0.0 or not training:
        return input_
    if not sequence_parallel and parallel_state.get_context_parallel_world_size() == 1:
        return F.dropout(input_, p)
    with get_rng_tracker().fork(MODEL_PARALLEL_RNG if sequence_parallel else CONTEXT_PARALLEL_RNG):
        return F.dropout(input_, p)
