"""The plan of a model under FSDP2, as data; see `values`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..fully_sharded_data_parallel_config import Reshard
from .values import GatheringPlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class FSDP2UnitPlan(UnitPlan):
    """A unit of FSDP2: modules whose parameters are whole while one of them runs."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    """Name of each module in the model; empty for the model itself."""
    reshard_after_forward: Reshard
    """Whether gathered parameters are freed after forward: True, False, or how many neighbours keep them. Readers take
    `is_freed`, `stays_gathered` and `kept_among`."""
    is_needed_in_backward: bool
    """False if the unit's backward reads no weight, as in an embedding: the unit is gathered only once."""
    precision: MixedPrecisionPolicy
    is_minority: bool = False
    """Split off from another unit, or the model, because of its dtype."""
    is_kept: bool = False
    """The unit stays gathered from one micro-batch of a step to the next."""

    @property
    def is_freed(self) -> bool:
        """Whether each rank keeps only its shard between forward and backward."""
        return self.reshard_after_forward is True

    @property
    def stays_gathered(self) -> bool:
        """Whether each rank keeps the whole unit between forward and backward."""
        return self.reshard_after_forward is False

    @property
    def kept_among(self) -> int | None:
        """Number of neighbouring ranks that together keep the unit between forward and backward; None for one or
        all."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward


@dataclass(frozen=True, kw_only=True)
class FSDP2Plan(GatheringPlan):
    """The plan that `core.distributed.fsdp2` carries out."""

    asked_by: ClassVar[Mapping[str, str]] = {
        **GatheringPlan.asked_by,
        "is_freed": "reshard_after_forward=True, keep_gathered_between_micro_batches='none'",
    }

    units: tuple[FSDP2UnitPlan, ...]
    """Children before parents, without `root`."""
    root: FSDP2UnitPlan
    """The model, with the parameters that are in no unit."""
    collectives: Literal["auto", "torch"]
    adds_gradient_rows: bool
    """Embeddings add gradients row by row, in place."""

    @property
    def casts_parameters(self) -> bool:
        return self.root.precision.param_dtype is not None
