"""Compares settings and numbers of ranks, each by steps of a shallow model.

Memory and time of a step grow linearly with depth, but for the first and the last layer: two shallow models give both
for any depth. The error to a plan of the whole model is below a percent where the peak is in the same place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import ConfigError
from ..distributed.plan.layout import default_bucket_size
from ..training.config import PretrainConfig
from ..training.config.arguments import parse_arguments
from ..training.config.build import build_config
from .estimates import NAMES, RESERVED_BYTES, WRAPPERS, Estimate, estimate, layer_weights
from .hardware import Hardware

MOST_RANKS = 16384
"""The end of a sweep over numbers of ranks."""

MICRO_BATCH_SIZES = (1, 2, 4)
"""Micro-batch sizes that a search tries, next to the run's own."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a model, with its costs on each rank."""

    name: str
    world_size: int
    peak_bytes: int
    step_s: float
    exposed_s: float
    latency_s: float
    """Time that all collectives would take without bytes."""
    tokens_per_second: float
    """Tokens per second of one rank."""


@dataclass(frozen=True)
class Scaling:
    """How a wrapper scales when each rank keeps its micro-batches."""

    name: str
    points: tuple[Candidate, ...]

    @property
    def stops_at(self) -> int | None:
        """The smallest number of ranks that reaches less than 90 % of the best throughput of a rank before it."""
        best = 0.0
        for point in self.points:
            if point.tokens_per_second < 0.9 * best:
                return point.world_size
            best = max(best, point.tokens_per_second)
        return None


def shallow_estimate(name: str, config: PretrainConfig, world_size: int, hardware: Hardware) -> Candidate:
    """Estimates a run from models of two depths, each a multiple of what repeats: layers, stages and buckets.

    Raises:
        ConfigError: what a run with these settings raises; or a setting that is not simulated.
    """
    model = config.model
    depth, frequency = model.num_layers, model.moe_layer_freq
    step = 2 * (model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1))
    step *= frequency if isinstance(frequency, int) else depth
    if model.num_layers_in_first_pipeline_stage or model.num_layers_in_last_pipeline_stage:
        step = depth
    if not config.ddp.shards_parameters:
        model_ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
        bucket = (config.ddp.bucket_size or default_bucket_size(world_size // model_ranks)) * model_ranks
        step *= -(-bucket * depth // layer_weights(config))
    shallow, deep = (step, 2 * step) if 2 * step < depth else (depth, depth)

    def at(layers: int) -> tuple[Estimate, tuple[float, ...]]:
        result = estimate(name, replace(config, model=replace(config.model, num_layers=layers)), world_size, hardware)
        time = result.time
        return result, (result.simulation.most_bytes, time.step_s, time.exposed_s, time.latency_s)

    result, first = at(shallow)
    second = at(deep)[1] if deep > shallow else first
    more = (depth - shallow) / max(deep - shallow, 1)
    peak, step_s, exposed_s, latency_s = (a + more * (b - a) for a, b in zip(first, second, strict=True))
    tokens = result.tokens_per_second * result.time.step_s
    return Candidate(name, world_size, int(peak), step_s, exposed_s, latency_s, tokens / step_s)


def candidates(
    values: Mapping[str, Any], variants: Mapping[str, Sequence[str]], world_size: int, hardware: Hardware
) -> list[Candidate]:
    """Returns the variants of a run that fit, the fastest first. Leaves out what the run would refuse.

    Args:
        values: settings of the run, as `parse_values` returns them.
        variants: flags that change them, by name.
    """
    estimates = []
    for name, flags in variants.items():
        with suppress(ConfigError):
            estimates.append(shallow_estimate(name, parse_arguments(flags, values), world_size, hardware))
    return _fastest_first(estimates, hardware)


def _fits(candidate: Candidate, hardware: Hardware) -> bool:
    return candidate.peak_bytes + RESERVED_BYTES <= hardware.memory_bytes


def _fastest_first(several: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Returns those that fit."""
    return sorted((each for each in several if _fits(each, hardware)), key=lambda each: -each.tokens_per_second)


def single_changes(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns flags that change a run's settings in one place, which saves memory, by the change."""
    config = build_config(values)
    changes = {f"wrapper {name}": [*flags] for name, flags in WRAPPERS.items()}
    changes.pop(f"wrapper {NAMES[config.ddp.strategy]}")
    extra = ["--activation-checkpointing selective", "--activation-checkpointing full"]
    if (size := config.data.micro_batch_size) > 1:
        extra.append(f"--micro-batch-size {size // 2}")
    extra.append(f"--tensor-model-parallel-size {2 * config.model.tensor_model_parallel_size} --sequence-parallel")
    return changes | {more: more.split() for more in extra}


def search(values: Mapping[str, Any], wrappers: Sequence[str], world_size: int, hardware: Hardware) -> list[Candidate]:
    """Looks for the fastest way to run a model, and returns what fits of all that was planned, the fastest first.

    One setting changes at a time: the wrapper, the size of a parallel group, or of a micro-batch. Sizes double until
    that is slower. Each is planned with the least recomputation that fits. The best value stays, until no change of
    one setting is faster. While nothing fits, the best has the lowest peak. What only several changes would gain is
    missed.
    """
    own = build_config(values)
    most = {
        "tensor": hardware.node_size,
        "pipeline": min(own.model.num_layers, world_size, hardware.node_size),
        "expert": min(own.model.num_moe_experts or 1, world_size),
    }
    choices: list[list[tuple[str, str]]] = [
        [(name, " ".join(WRAPPERS[name])) for name in wrappers],
        *(
            [(f"{kind}-parallel {n}", f"--{kind}-model-parallel-size {n}") for n in _powers(1, last)]
            for kind, last in most.items()
        ),
        [
            (f"micro-batch {n}", f"--micro-batch-size {n}")
            for n in sorted({*MICRO_BATCH_SIZES, own.data.micro_batch_size})
        ],
    ]
    candidates_so_far: list[Candidate] = []

    @functools.cache
    def score(*settings: tuple[str, str]) -> tuple[bool, float]:
        """Plans a run. Better ones have higher scores."""
        lowest = math.inf
        for recomputes in ("none", "selective", "full"):
            name = ", ".join(label for label, _ in settings if not label.endswith("-parallel 1"))
            line = [*" ".join(flag for _, flag in settings).split(), "--activation-checkpointing", recomputes]
            line += [] if settings[1] == choices[1][0] else ["--sequence-parallel"]
            try:
                config = parse_arguments(line, values)
                candidates_so_far.append(
                    shallow_estimate(f"{name}, recomputes {recomputes}", config, world_size, hardware)
                )
            except ConfigError:
                break
            if _fits(candidates_so_far[-1], hardware):
                return True, candidates_so_far[-1].tokens_per_second
            lowest = min(lowest, candidates_so_far[-1].peak_bytes)
        return False, -lowest

    best, before = tuple(options[0] for options in choices), None
    while best != before:
        before = best
        for index, options in enumerate(choices):
            neighbours = [best]
            for value in options:
                neighbours.append((*best[:index], value, *best[index + 1 :]))
                if index and score(*neighbours[-1]) < max(score(*each) for each in neighbours[1:]):
                    break
            best = max(neighbours, key=lambda settings: score(*settings))
    return _fastest_first(candidates_so_far, hardware)


def scalings(configs: Mapping[str, PretrainConfig], world_size: int, hardware: Hardware) -> Iterator[Scaling]:
    """Plans each wrapper on more and more ranks, which keep their micro-batches. Those that shard parameters are
    also planned with shards inside a node, replicated over nodes."""
    for name, config in configs.items():
        own = world_size // config.data_parallel_size(world_size)
        number = config.num_microbatches(world_size) * config.data.micro_batch_size
        ways = {name: False, **({f"hybrid {name}": True} if config.ddp.shards_parameters else {})}
        for way, is_hybrid in ways.items():
            points = []
            for ranks in _powers(own * max(hardware.node_size // own, 1), MOST_RANKS):
                replicas = ranks // own
                inside = max(hardware.node_size // own, 1)
                instances = replicas // inside if is_hybrid else config.ddp.num_distributed_optimizer_instances
                if replicas % instances:
                    continue
                size = replace(
                    config,
                    ddp=replace(config.ddp, num_distributed_optimizer_instances=instances),
                    data=replace(config.data, global_batch_size=number * replicas),
                )
                with suppress(ConfigError):  # so many ranks do not divide, into groups of experts for example
                    points.append(shallow_estimate(way, size, ranks, hardware))
            if points:
                yield Scaling(way, tuple(points))


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
