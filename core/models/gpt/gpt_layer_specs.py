"""Specs of a GPT's layers, under the names of Megatron-LM."""

from __future__ import annotations

from ...base.megatron_names import absent_names, checks_arguments, refuse
from ...tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from ...transformer.attention import SelfAttention, SelfAttentionSubmodules
from ...transformer.dot_product_attention import DotProductAttention
from ...transformer.enums import AttnMaskType
from ...transformer.mlp import MLP, MLPSubmodules
from ...transformer.moe.moe_layer import MoELayer
from ...transformer.norms import LayerNorm, RMSNorm, build_norm
from ...transformer.spec_utils import Builder, ModuleSpec
from ...transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_NORMS: dict[str | None, Builder] = {None: build_norm, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


@checks_arguments
def get_gpt_layer_local_spec(
    num_experts: int | None = None, qk_layernorm: bool | None = False, normalization: str | None = None
) -> ModuleSpec:
    """Returns the spec of a layer of this package's modules.

    Args:
        qk_layernorm: norm queries and keys, as the config's `qk_layernorm` does.
        normalization: "LayerNorm" or "RMSNorm"; None means the config's.
        num_experts: experts of the layer, which the config has to say too; None or 0 means an MLP.
        moe_grouped_gemm: ignored; the config's decides.
        multi_latent_attention, fp8, qk_l2_norm, use_kitchen: Megatron-LM's arguments; refused unless at their
            defaults, together with the arguments that depend on them.

    Raises:
        ParallelConfigError: a refused argument, or another norm.
    """
    if normalization not in _NORMS:
        remedy = 'or give "LayerNorm" or "RMSNorm"'
        refuse("get_gpt_layer_local_spec", normalization=(normalization, None, remedy))
    norm = _NORMS[normalization]
    of_heads = norm if qk_layernorm else None
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=of_heads,
            k_layernorm=of_heads,
        ),
    )
    mlp = ModuleSpec(MoELayer)
    if not num_experts:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=attention, pre_mlp_layernorm=norm, mlp=mlp
        ),
    )


__getattr__ = absent_names(__name__)
