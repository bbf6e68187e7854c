"""The costs of a run under a wrapper, from a simulated step: memory, bytes on the wire, operations and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import ConfigError
from ..training.config import PretrainConfig
from ..training.config.arguments import parse_arguments
from . import formula
from .hardware import Hardware
from .phantom import HOST, Collective
from .simulation import CATEGORIES, Simulation, pipeline_ranks, simulate
from .step_time import StepTime, step_time

WRAPPERS: dict[str, tuple[str, ...]] = {
    "replicated": ("--data-parallel-sharding-strategy", "no_shard"),
    "ZeRO-1": ("--data-parallel-sharding-strategy", "optim"),
    "ZeRO-2": ("--data-parallel-sharding-strategy", "optim_grads"),
    "ZeRO-3": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    "FSDP2": ("--use-torch-fsdp2",),
}
"""The flags that choose each wrapper."""

_CHOOSING = {"--data-parallel-sharding-strategy": 1, "--use-torch-fsdp2": 0, "--use-distributed-optimizer": 0}
"""Flags that choose a wrapper, with the number of their values."""

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
    """Of `sent_bytes`, those that leave the node, on average over ranks."""


@dataclass(frozen=True)
class Estimate:
    """The costs of a run on each rank."""

    wrapper: str
    config: PretrainConfig
    world_size: int
    simulation: Simulation
    """Of the pipeline rank with the highest peak."""
    num_parameters: int
    """Of the whole model, tied weights once."""
    formula_bytes: Mapping[str, int]
    """Memory by category, in closed formulas."""
    wire: tuple[Wire, ...]
    model_flops: int
    """Of a step, on all ranks, without recomputation."""
    time: StepTime
    hardware: Hardware
    gpu_memory: int

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak.nbytes

    @property
    def fits(self) -> bool:
        return self.simulation.most_bytes + RESERVED_BYTES <= self.gpu_memory

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


def estimate(
    wrapper: str, config: PretrainConfig, world_size: int, hardware: Hardware, gpu_memory: int | None = None
) -> Estimate:
    """Simulates a step and estimates its costs. No process group may exist.

    Args:
        wrapper: a name for tables.
        gpu_memory: bytes of an accelerator; None takes the hardware's.

    Raises:
        ConfigError: what a run with these settings raises; or a setting that is not simulated.
    """
    if config.run.fp32_matmul_precision != "highest":
        hardware = replace(hardware, fp32_flops=hardware.matmul_flops / 2)
    ranks = pipeline_ranks(config)
    simulations = [simulate(config, world_size, pipeline_rank=rank) for rank in ranks]
    fullest = max(range(len(ranks)), key=lambda index: simulations[index].most_bytes)
    simulation, between = simulations[fullest], config.model.pipeline_model_parallel_size - len(ranks)
    return Estimate(
        wrapper=wrapper,
        config=config,
        world_size=world_size,
        simulation=simulation,
        num_parameters=sum(s.num_parameters for s in (*simulations, *simulations[1:2] * between)),
        formula_bytes=formula.memory(
            config, simulation.plans, ranks[fullest], simulation.schedule.get(ranks[fullest], ())
        ),
        wire=_wire(simulation, hardware),
        model_flops=formula.model_flops(config, world_size),
        time=step_time(simulations, hardware),
        hardware=hardware,
        gpu_memory=hardware.memory_bytes if gpu_memory is None else gpu_memory,
    )


def _wire(simulation: Simulation, hardware: Hardware) -> tuple[Wire, ...]:
    collectives: dict[tuple[str, int], list[Collective]] = {}
    for _, event in simulation.events:
        if isinstance(event, Collective) and (event.sent_bytes or event.ranks == HOST):
            collectives.setdefault((event.kind, len(event.ranks)), []).append(event)
    return tuple(
        Wire(
            kind,
            ranks,
            len(found),
            sum(c.sent_bytes or c.nbytes for c in found),
            sum(map(hardware.crossing_bytes, found)),
        )
        for (kind, ranks), found in sorted(collectives.items())
    )


def wrapper_configs(flags: Sequence[str], wrappers: Sequence[str]) -> dict[str, PretrainConfig | ConfigError]:
    """Returns the settings of a command line under each wrapper, or the error with which the run would refuse it.

    Raises:
        ConfigError: the run refuses the command line as it is; or a wrapper is unknown.
    """
    unknown = [name for name in wrappers if name not in WRAPPERS]
    if unknown:
        raise ConfigError(f"wrappers has {unknown[0]!r}; take {', '.join(WRAPPERS)}")
    own = parse_arguments(flags)
    others = without_choice(flags)
    configs: dict[str, PretrainConfig | ConfigError] = {}
    for name in wrappers:
        try:
            configs[name] = own if name == own_wrapper(own) else parse_arguments([*others, *WRAPPERS[name]])
        except ConfigError as error:
            configs[name] = error
    return configs


def own_wrapper(config: PretrainConfig) -> str:
    """Returns the wrapper that a command line has chosen."""
    if config.use_torch_fsdp2:
        return "FSDP2"
    strategy = config.ddp.sharding_strategy
    return next(name for name, flags in WRAPPERS.items() if flags[-1] == strategy)


def without_choice(flags: Sequence[str]) -> list[str]:
    kept, skip = list[str](), 0
    for flag in flags:
        name, has_value, _ = flag.partition("=")
        if skip:
            skip -= 1
        elif name in _CHOOSING:
            skip = 0 if has_value else _CHOOSING[name]
        else:
            kept.append(flag)
    return kept
