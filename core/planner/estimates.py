"""The costs of a run under a wrapper, from a simulated step: memory, bytes on the wire, operations and time.

Next to the simulated memory a closed formula is shown. It follows Korthikanti et al., 2022 (activations) and
Rajbhandari et al., 2020 (ZeRO), with the tensors that this library keeps. It leaves out what lives for moments, such
as the inputs of collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import ConfigError
from ..base.memory_categories import GATHERED, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ..distributed.fully_sharded_data_parallel_config import FSDP2, STRATEGIES
from ..distributed.plan import Plan
from ..tensor_parallel.groups import pad_vocab_size
from ..training.config import PretrainConfig
from ..training.config.arguments import parse_arguments
from ..training.config.build import build_config
from .hardware import Hardware
from .recorder import HOST, Transfer
from .simulation import CATEGORIES, Pass, Simulation, pipeline_ranks, simulate
from .step_time import StepTime, step_time

NAMES = dict(zip(STRATEGIES, ("replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"), strict=True))
"""What the tables call each strategy."""

WRAPPERS: dict[str, tuple[str, ...]] = {
    name: ("--use-torch-fsdp2",) if strategy == FSDP2 else ("--data-parallel-sharding-strategy", strategy)
    for strategy, name in NAMES.items()
}
"""The flags that choose each wrapper."""

RESERVED_BYTES = 2 * 2**30
"""Memory of an accelerator that is left to its driver, the buffers of NCCL, workspaces and fragmentation."""


@dataclass(frozen=True)
class Wire:
    """What this rank sends in a step, in collectives of one kind and group."""

    kind: str
    ranks: int
    calls: int
    sent_bytes: int
    crossing_bytes: int
    """The part of `sent_bytes` that leaves the node, on average over ranks."""


@dataclass(frozen=True)
class Estimate:
    """The costs of a run on each rank."""

    wrapper: str
    config: PretrainConfig
    world_size: int
    simulation: Simulation
    """Simulation of the pipeline rank with the highest peak."""
    num_parameters: int
    """Parameters of the whole model, tied weights counted once."""
    formula_bytes: Mapping[str, int]
    """Memory by category, in closed formulas."""
    wire: tuple[Wire, ...]
    model_flops: int
    """FLOPs of a step on all ranks, without recomputation."""
    time: StepTime
    hardware: Hardware

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak.nbytes

    @property
    def spare_bytes(self) -> int:
        """Memory that is left of what a run may use. Negative if it does not fit."""
        return self.hardware.memory_bytes - RESERVED_BYTES - self.simulation.most_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the needed operations a second, over the datasheet's 16-bit operations."""
        return self.model_flops / self.world_size / self.time.step_s / self.hardware.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a rank a second."""
        tokens = self.config.global_batch_size(self.world_size) * self.config.data.seq_length
        return tokens / self.world_size / self.time.step_s

    def as_json(self) -> dict[str, Any]:
        """Returns the estimate as JSON values, in bytes and seconds."""
        simulation = self.simulation
        return {
            "wrapper": self.wrapper,
            "world_size": self.world_size,
            "micro_batches": simulation.num_microbatches,
            "parameters": self.num_parameters,
            "peak_bytes": self.peak_bytes,
            "peak_at": simulation.peak.where,
            "bytes_at_peak": dict(zip(CATEGORIES, simulation.peak.held, strict=True)),
            "formula_bytes": dict(self.formula_bytes),
            "construction_peak_bytes": simulation.construction_peak,
            "fits": self.fits,
            "wire": [vars(entry) for entry in self.wire],
            "model_flops": self.model_flops,
            "hardware_flops_per_rank": simulation.hardware_flops,
            **{
                name: getattr(self.time, name) for name in ("step_s", "compute_s", "exposed_s", "hidden_s", "bubble_s")
            },
            "mfu": self.mfu,
            "tokens_per_second_per_rank": self.tokens_per_second,
        }


def estimate(wrapper: str, config: PretrainConfig, world_size: int, hardware: Hardware) -> Estimate:
    """Simulates a step and estimates its costs. No process group may exist.

    Args:
        wrapper: a name for tables.

    Raises:
        ConfigError: what a run with these settings raises; or a setting that is not simulated.
    """
    if config.run.fp32_matmul_precision != "highest":
        hardware = replace(hardware, fp32_flops=hardware.matmul_flops / 2)
    ranks = pipeline_ranks(config)
    simulations = [simulate(config, world_size, pipeline_rank=rank, memory=hardware.memory_bytes) for rank in ranks]
    fullest = max(range(len(ranks)), key=lambda index: simulations[index].most_bytes)
    simulation, between = simulations[fullest], config.model.pipeline_model_parallel_size - len(ranks)
    return Estimate(
        wrapper=wrapper,
        config=config,
        world_size=world_size,
        simulation=simulation,
        num_parameters=sum(s.num_parameters for s in (*simulations, *simulations[1:2] * between)),
        formula_bytes=formula_memory(
            config, simulation.plans, ranks[fullest], simulation.schedule.get(ranks[fullest], ())
        ),
        wire=_wire(simulation, hardware),
        model_flops=model_flops(config, world_size),
        time=step_time(simulations, hardware),
        hardware=hardware,
    )


def _wire(simulation: Simulation, hardware: Hardware) -> tuple[Wire, ...]:
    collectives: dict[tuple[str, int], list[Transfer]] = {}
    for _, event in simulation.events:
        if isinstance(event, Transfer) and (event.sent_bytes or event.ranks == HOST):
            collectives.setdefault((event.kind, len(event.ranks)), []).append(event)
    return tuple(
        Wire(
            kind,
            ranks,
            len(calls),
            sum(c.sent_bytes or c.nbytes for c in calls),
            sum(map(hardware.crossing_bytes, calls)),
        )
        for (kind, ranks), calls in sorted(collectives.items())
    )


def wrapper_configs(values: Mapping[str, Any], wrappers: Sequence[str]) -> dict[str, PretrainConfig | ConfigError]:
    """Returns the settings of a run under each wrapper, or the error with which the run would refuse it.

    Args:
        values: of the run, as `parse_values` returns them.

    Raises:
        ConfigError: the run refuses the settings as they are; or a wrapper is unknown.
    """
    if strays := [name for name in wrappers if name not in WRAPPERS]:
        raise ConfigError(f"wrappers has {strays[0]!r}; take {', '.join(WRAPPERS)}")
    own = build_config(values)
    configs: dict[str, PretrainConfig | ConfigError] = {}
    for name in wrappers:
        try:
            configs[name] = own if name == NAMES[own.ddp.strategy] else parse_arguments(WRAPPERS[name], values)
        except ConfigError as error:
            configs[name] = error
    return configs


_BYTES = {"fp32": 4, "bf16": 2, "dynamic8": 1 + 4 / 256, "linear8": 1 + 4 / 256}
"""Bytes of an element of optimizer state by its format."""


def formula_memory(
    config: PretrainConfig, plans: Sequence[Plan], pipeline_rank: int, schedule: Sequence[Pass]
) -> Mapping[str, int]:
    """Returns bytes by category when the loss has been computed, about the moment with the most memory.

    Args:
        plans: of the stages of one pipeline rank.
        schedule: the passes of that rank; empty without pipeline stages.
    """
    units = [unit for plan in plans for unit in plan.units]
    roots = [plan.root for plan in plans]
    sizes = [unit.gathered_bytes for unit in units if unit.is_gathered and unit not in roots]
    most_gathered = sum(sorted(sizes)[-2:]) if any(unit.is_freed for unit in units) else sum(sizes)
    root = sum(unit.gathered_bytes for unit in roots if unit.is_gathered)
    pieces = [piece for unit in units for piece in unit.pieces if piece.is_trained]
    stages = config.model.pipeline_model_parallel_size
    # Micro-batches of one of the rank's stages whose backward is to come, at most.
    under_way = max(itertools.accumulate(1 if is_forward else -1 for _, is_forward, _ in schedule), default=1)
    of_master = {"fp32": 4, "bf16_with_rest": 2, "bf16": 0}[config.optimizer.main_params_dtype]
    masters = sum(int(p.numel * of_master) // p.params[0].num_parts for p in pieces if p.param_dtype.itemsize < 4)
    states = _BYTES[config.optimizer.exp_avg_dtype] + (
        _BYTES[config.optimizer.exp_avg_sq_dtype] if config.optimizer.optimizer == "adam" else 0
    )
    moments = sum(int(piece.numel * states) // piece.params[0].num_parts for piece in pieces)
    return {
        PARAMETERS: sum(unit.kept_bytes for unit in units),
        GATHERED: most_gathered + root,
        GRADIENTS: sum(unit.gradient_bytes for unit in units),
        OPTIMIZER_STATE: masters + moments,
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
    per_layer = outside + (attention + 2 * outside) * (recomputes != "full")
    return (model.num_layers * per_layer + whole // model.num_layers) * itemsize  # one layer is computed again


def _logits(config: PretrainConfig) -> int:
    """Returns the bytes of logits, of their fp32 copy, and of their gradient."""
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
