"""Memory, parameters and operations of a run in closed formulas, next to which the simulation is shown.

The formulas of memory follow Korthikanti et al., 2022 (activations) and Rajbhandari et al., 2020 (ZeRO), with the
tensors that this library keeps. They leave out what lives for moments, such as the inputs of collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ..distributed.plan import Plan
from ..tensor_parallel.groups import pad_vocab_size
from ..training.config import PretrainConfig
from .simulation import Pass


def memory(
    config: PretrainConfig, plans: Sequence[Plan], pipeline_rank: int, schedule: Sequence[Pass]
) -> Mapping[str, int]:
    """Returns bytes by category when the loss has been computed, about the moment with the most memory.

    Args:
        plans: of the stages of one pipeline rank.
        schedule: the passes of that rank; empty without pipeline stages.
    """
    units = [unit for plan in plans for unit in plan.units]
    roots = [plan.root for plan in plans]
    gathered = [unit.gathered_bytes for unit in units if unit.is_gathered and unit not in roots]
    most_gathered = sum(sorted(gathered)[-2:]) if any(unit.is_freed for unit in units) else sum(gathered)
    root = sum(unit.gathered_bytes for unit in roots if unit.is_gathered)
    trained = [piece for unit in units for piece in unit.pieces if piece.is_trained]
    stages = config.model.pipeline_model_parallel_size
    # Micro-batches of one of the rank's stages whose backward is to come, at most.
    under_way = max(itertools.accumulate(1 if is_forward else -1 for _, is_forward, _ in schedule), default=1)
    masters = sum(p.numel * 4 // p.params[0].num_parts for p in trained if p.param_dtype.itemsize < 4)
    states = {"adam": 8, "sgd": 4}.get(config.optimizer.optimizer, 4)
    moments = sum(piece.numel * states // piece.params[0].num_parts for piece in trained)
    return {
        "parameters": sum(unit.kept_bytes for unit in units),
        "gathered units": most_gathered + root,
        "gradients": sum(unit.gradient_bytes for unit in units),
        "optimizer state": masters + moments,
        "activations": _activations(config) * under_way // (stages * len(plans)),
        "logits and loss": _logits(config) if pipeline_rank == stages - 1 else 0,
    }


def _tokens(config: PretrainConfig) -> int:
    """Returns the tokens of a micro-batch on one rank."""
    return config.data.micro_batch_size * config.data.seq_length // config.model.context_parallel_size


def _activations(config: PretrainConfig) -> int:
    model, tokens = config.model, _tokens(config)
    itemsize = 2 if model.bf16 or model.fp16 else 4
    tp = model.tensor_model_parallel_size
    rows = tokens // tp if model.sequence_parallel else tokens  # of what is outside of products
    outside, attention = rows * model.hidden_size, tokens * _query_width(config) // tp
    qkv = attention + 2 * tokens * _key_width(config) // tp
    inside = 2 + model.gated_linear_unit  # tensors of the width inside an MLP
    mlp = tokens * (model.ffn_hidden_size or 0) * inside // tp + outside
    expert = model.moe_router_topk * tokens * (2 * model.hidden_size + model.expert_ffn_size * inside)
    layer = 3 * outside + qkv + attention + mlp  # with two norms and the projection
    whole = model.num_layers * layer + model.num_expert_layers * max(expert - mlp, 0)
    recomputes = config.ddp.activation_checkpointing
    if recomputes == "none":
        return whole * itemsize
    kept = outside + (attention + 2 * outside) * (recomputes != "full")
    recomputed = len(range(0, model.num_layers, config.ddp.activation_checkpointing_interval))
    return (recomputed * kept + whole // model.num_layers * (model.num_layers - recomputed + 1)) * itemsize


def _logits(config: PretrainConfig) -> int:
    """Returns the bytes of logits, of the same in fp32, and of their gradient."""
    itemsize = 2 if config.model.bf16 or config.model.fp16 else 4
    columns = _vocab_size(config) // config.model.tensor_model_parallel_size
    return _tokens(config) * columns * (4 + 4 + (itemsize if itemsize < 4 else 0))


def _vocab_size(config: PretrainConfig) -> int:
    return pad_vocab_size(config.data.vocab_size or 0, config.gpt.make_vocab_size_divisible_by)


def _query_width(config: PretrainConfig) -> int:
    return config.model.num_attention_heads * (config.model.kv_channels or 0)


def _key_width(config: PretrainConfig) -> int:
    return (config.model.num_query_groups or config.model.num_attention_heads) * (config.model.kv_channels or 0)


def model_flops(config: PretrainConfig, world_size: int) -> int:
    """Returns the floating-point operations that a step needs on all ranks, without recomputation.

    Two for each multiplication and addition of a matrix product, the output projection included and the embedding's
    lookup not. Attention is causal and exact: a token attends to itself and the tokens before it. Backward takes twice
    as many as forward.
    """
    length = config.data.seq_length
    weights = layer_weights(config) + config.model.hidden_size * _vocab_size(config)
    pairs = length * (length + 1) // 2
    attention = config.model.num_layers * 2 * 2 * pairs * _query_width(config)
    return 3 * config.global_batch_size(world_size) * (2 * length * weights + attention)


def layer_weights(config: PretrainConfig) -> int:
    """Returns the elements of the matrices of all layers that a token is multiplied by: of experts, its own."""
    model = config.model
    width, query, key = model.hidden_size, _query_width(config), _key_width(config)
    matrices = 3 if model.gated_linear_unit else 2
    of_experts = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    experts = model.num_expert_layers
    mlps = width * matrices * ((model.num_layers - experts) * (model.ffn_hidden_size or 0) + experts * of_experts)
    routers = experts * width * (model.num_moe_experts or 0)
    return model.num_layers * width * (2 * query + 2 * key) + mlps + routers
