"""Which layers each pipeline stage has: arithmetic on a config, without memory or communication.

Stages are numbered along the pipeline: stage 0 embeds tokens, the last one computes the loss. A rank has one stage, or
one for each of its virtual stages. Schedules place these: interleaving gives rank r of P the stages r, r + P, ...
(Narayanan et al., 2021), and ZBV the stages r and 2P - 1 - r, in the shape of a V (Qi et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from .. import parallel_state
from ..base.errors import ParallelConfigError


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline."""

    index: int
    """The stage's place in the pipeline."""
    count: int
    """Stages of the pipeline, over all ranks."""
    layers: range
    """The stage's layers, counted from 0 in the whole model."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.index == self.count - 1

    def __str__(self) -> str:
        return f"pipeline stage {self.index} of {self.count} (layers {self.layers.start} to {self.layers.stop - 1})"


def pipeline_stage(config: Any, vp_stage: int | None = None) -> PipelineStage:
    """Returns the stage of this rank.

    Args:
        config: a `TransformerConfig`; with one pipeline stage it is the whole model.
        vp_stage: which of the rank's virtual stages; None where it has one stage.

    Raises:
        ParallelConfigError: `vp_stage` is not one of the config's virtual stages, or layers do not divide.
    """
    ranks, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if (vp_stage is None) != (virtual is None) or not 0 <= (vp_stage or 0) < (virtual or 1):
        raise ParallelConfigError(
            f"vp_stage is {vp_stage} and virtual_pipeline_model_parallel_size {virtual}; give each model of a rank "
            "its virtual stage, counted from 0, and none where that size is None"
        )
    rank = 0 if ranks == 1 else parallel_state.get_pipeline_model_parallel_rank()
    return stages_of(config)[stage_index(config, rank, vp_stage or 0)]


def stage_index(config: Any, rank: int, vp_stage: int) -> int:
    """Returns the place in the pipeline of a rank's virtual stage."""
    ranks = config.pipeline_model_parallel_size
    if vp_stage and config.pipeline_schedule == "ZBVZeroBubble":
        return int(2 * ranks - 1 - rank)
    return int(vp_stage * ranks + rank)


def stages_of(config: Any) -> list[PipelineStage]:
    """Returns all stages of the pipeline, in order.

    Raises:
        ParallelConfigError: the layers do not divide among them.
    """
    ranks, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    of_rank = _layers_of_ranks(config, ranks)
    if odd := [number for number in of_rank if number < virtual or number % virtual]:
        raise ParallelConfigError(
            f"a rank has {odd[0]} of num_layers {config.num_layers}, which do not divide among its "
            f"{virtual} virtual pipeline stages; take another number of layers or of stages"
        )
    rank_of = {stage_index(config, rank, turn): rank for rank in range(ranks) for turn in range(virtual)}
    counts = [of_rank[rank_of[index]] // virtual for index in range(ranks * virtual)]
    ends = list(accumulate(counts))
    return [
        PipelineStage(index, len(counts), range(end - number, end))
        for index, (number, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _layers_of_ranks(config: Any, ranks: int) -> list[int]:
    """Returns the number of layers of each rank. The first and the last may have a number of their own."""
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    layers_of_ends = {0: first} if first is not None else {}
    layers_of_ends |= {ranks - 1: last} if last is not None else {}
    rest, others = config.num_layers - sum(layers_of_ends.values()), ranks - len(layers_of_ends)
    if min(layers_of_ends.values(), default=1) < 1 or (rest if not others else rest < others or rest % others):
        uneven = f", of which the first and last have {first} and {last}" if layers_of_ends else ""
        raise ParallelConfigError(
            f"num_layers {config.num_layers} do not divide among pipeline_model_parallel_size {ranks}{uneven}; take a "
            "multiple, or give num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage what is left"
        )
    return [layers_of_ends.get(rank, rest // max(others, 1)) for rank in range(ranks)]


def check_rounds(config: Any, num_microbatches: int) -> None:
    """Raises ParallelConfigError if a step's micro-batches do not divide among the rounds of interleaved stages."""
    ranks = config.pipeline_model_parallel_size
    if config.pipeline_schedule == "Interleaved1F1B" and num_microbatches % max(1, num_microbatches // ranks):
        raise ParallelConfigError(
            f"{num_microbatches} micro-batches do not divide into rounds of the {ranks} pipeline ranks; interleaved "
            f"stages take fewer than {2 * ranks}, or a multiple of {ranks}: change global_batch_size"
        )


class StageLayers(nn.ModuleList):
    """The layers of a pipeline stage, under the names that they have in the whole model.

    Initial values, checkpoints and messages, which go by names, are therefore those of one stage.

    Args:
        layers: modules, in order.
        first: number of the first one in the whole model, from 0.
    """

    def __init__(self, layers: Any = (), first: int = 0) -> None:
        super().__init__()
        self._first = first
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def _get_abs_string_index(self, idx: Any) -> str:
        """Returns a layer's name for its index in this stage: torch's method, which `[index]` calls."""
        return str(int(super()._get_abs_string_index(idx)) + self._first)
