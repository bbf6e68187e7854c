"""Memory, parameters and operations of a run in closed formulas, next to which the simulation is shown.

The formulas of memory follow Korthikanti et al., 2022 (activations) and Rajbhandari et al., 2020 (ZeRO), with the
tensors that this library keeps. They leave out what lives for moments, such as the inputs of collectives.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..distributed.plan import Plan
from ..tensor_parallel.vocab import pad_vocab_size
from ..training.config import PretrainConfig


def memory(config: PretrainConfig, plan: Plan) -> Mapping[str, int]:
    """Returns bytes by category when the loss has been computed, about the moment with the most memory."""
    gathered = [unit.gathered_bytes for unit in plan.units if unit.is_gathered and unit is not plan.root]
    is_freed = any(unit.is_freed for unit in plan.units)
    most_gathered = sum(sorted(gathered)[-2:]) if is_freed else sum(gathered)
    root = plan.root.gathered_bytes if plan.root.is_gathered else 0
    trained = [piece for unit in plan.units for piece in unit.pieces if piece.is_trained]
    masters = sum(p.numel * 4 // p.params[0].num_parts for p in trained if p.param_dtype.itemsize < 4)
    states = {"adam": 8, "sgd": 4}.get(config.optimizer.optimizer, 4)
    moments = sum(piece.numel * states // piece.params[0].num_parts for piece in trained)
    return {
        "parameters": sum(unit.kept_bytes for unit in plan.units),
        "gathered units": most_gathered + root,
        "gradients": sum(unit.gradient_bytes for unit in plan.units),
        "optimizer state": masters + moments,
        "activations": _activations(config),
        "logits and loss": _logits(config),
    }


def _tokens(config: PretrainConfig) -> int:
    """Returns the tokens of a micro-batch on one rank."""
    return config.data.micro_batch_size * config.data.seq_length // config.model.context_parallel_size


def _activations(config: PretrainConfig) -> int:
    model, tokens = config.model, _tokens(config)
    itemsize = 2 if model.bf16 or model.fp16 else 4
    tp = model.tensor_model_parallel_size
    rows = tokens // tp if model.sequence_parallel else tokens  # of what is outside of products
    width, query, key = model.hidden_size, _query_width(config), _key_width(config)
    ffn = (model.ffn_hidden_size or 0) * (2 if model.gated_linear_unit else 1)
    products = {  # results, in elements
        "qkv": tokens * (query + 2 * key) // tp,
        "attention": tokens * query // tp,
        "projection": rows * width,
        "fc1": tokens * ffn // tp,
        "activation": tokens * (model.ffn_hidden_size or 0) // tp,
        "fc2": rows * width,
    }
    layer = sum(products.values()) + 2 * rows * width  # with the results of two norms
    recomputes = config.ddp.activation_checkpointing
    if recomputes == "none":
        return model.num_layers * layer * itemsize
    kept = rows * width + (products["attention"] + products["projection"] + products["fc2"]) * (recomputes != "full")
    recomputed = len(range(0, model.num_layers, config.ddp.activation_checkpointing_interval))
    return (recomputed * kept + (model.num_layers - recomputed) * layer + layer) * itemsize


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
    model, length = config.model, config.data.seq_length
    width, query, key = model.hidden_size, _query_width(config), _key_width(config)
    mlp = width * (model.ffn_hidden_size or 0) * (3 if model.gated_linear_unit else 2)
    weights = model.num_layers * (width * (2 * query + 2 * key) + mlp) + width * _vocab_size(config)
    pairs = length * (length + 1) // 2
    attention = model.num_layers * 2 * 2 * pairs * query
    return 3 * config.global_batch_size(world_size) * (2 * length * weights + attention)
