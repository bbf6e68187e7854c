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
class ModuleUnitPlan(UnitPlan):
    """A unit of FSDP2: modules whose parameters are whole while one of them runs."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    """Of each module below the model, whose own is empty."""
    reshard_after_forward: Reshard
    """Whether gathered parameters are freed after forward: True, False, or how many neighbours keep them. Readers take
    `is_freed`, `stays_gathered` and `kept_among`."""
    is_needed_in_backward: bool
    """False where no backward of the unit reads a weight, as in an embedding: it is gathered once only."""
    precision: MixedPrecisionPolicy
    is_minority: bool = False
    """Split off another unit, or the model, for its dtype."""
    is_kept: bool = False
    """It stays gathered from one micro-batch of a step to the next."""

    @property
    def is_freed(self) -> bool:
        """Between forward and backward each rank has its shard alone."""
        return self.reshard_after_forward is True

    @property
    def stays_gathered(self) -> bool:
        """Between forward and backward each rank has all of it."""
        return self.reshard_after_forward is False

    @property
    def kept_among(self) -> int | None:
        """Neighbouring ranks that have all of it together between forward and backward; None for one, or for all."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward


@dataclass(frozen=True, kw_only=True)
class FSDP2Plan(GatheringPlan):
    """The plan that `core.distributed.fsdp2` carries out."""

    asked_by: ClassVar[Mapping[str, str]] = {
        **GatheringPlan.asked_by,
        "is_freed": "reshard_after_forward=True, keep_gathered_between_micro_batches='none'",
    }

    units: tuple[ModuleUnitPlan, ...]
    """Children before parents, without `root`."""
    root: ModuleUnitPlan
    """The model, with what is in no unit."""
    collectives: Literal["auto", "torch"]
    adds_gradient_rows: bool
    """Embeddings add gradients row by row, in place."""

    @property
    def casts_parameters(self) -> bool:
        return self.root.precision.param_dtype is not None
