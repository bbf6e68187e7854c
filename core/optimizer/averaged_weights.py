"""Averages of the weights that an optimizer updates, exponential or equal, on each rank's own shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from ..base.errors import ConfigError, OptimizerError
from ..base.text import choices
from .main_params import MainParam
from .main_ranges import sharing_ranks
from .optimizer import MegatronOptimizer
from .optimizer_config import StateDtype
from .update_rules import MASTER

_AVERAGE = "average"


class AveragedWeights:
    """Keeps an average of a model's trained weights, as torch's ``AveragedModel`` does, for sharded parameters.

    Each rank averages the part that it updates: no communication, and the memory of a shard where updates are sharded.
    ::

        average = AveragedWeights(optimizer, decay=0.999)
        optimizer.step()                   # updates the average too, unless the step is skipped
        with average.swapped():            # between steps; every rank enters
            evaluate(model)

    The values are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, or without a
    decay with ``get_swa_multi_avg_fn()``, to the bit: the first update copies the weights, later ones interpolate.
    Weights in low precision are averaged as their fp32 masters. Tied weights are averaged once. Frozen weights and
    buffers are not averaged: an evaluation reads the model's.

    The average belongs to the optimizer's state: its `state_tensors` have it as ``average.<parameter name>``, so that
    checkpoints hold it, and any wrapper and number of ranks can continue it.

    Args:
        optimizer: updates the weights; every rank of the model gives its own.
        decay: weight of the old average in an update, in ``[0, 1)``; None averages all updates equally.
        dtype: how the average is kept: in the dtype of the masters, or ``"bf16"``, ``"dynamic8"`` or ``"linear8"``,
            rounded stochastically (`OptimizerConfig.exp_avg_dtype`). `swapped` then takes memory for it in fp32.

    Raises:
        ConfigError: a decay outside of its range, a dtype that is none of these, or an optimizer that keeps an average
            already.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, decay: float | None = None, *, dtype: StateDtype = "fp32"
    ) -> None:
        if decay is not None and not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay is {decay}; give a number from 0 to below 1, or None for equal weights")
        if optimizer.average is not None:
            raise ConfigError("the optimizer keeps an average already; build one AveragedWeights for an optimizer")
        if dtype not in get_args(StateDtype):
            raise ConfigError(f"dtype is {dtype!r}; {choices(str(dtype), get_args(StateDtype))}")
        self.decay, self._optimizer = decay, optimizer  # fixed
        self.num_averaged = 0
        """Number of updates of the average. The optimizer counts each step that was not skipped.
        `load_state_scalars` sets it."""
        kept = self._keep_in(dtype) if dtype != "fp32" else set[Tensor]()
        # The averages in fp32, by `MainParam.main`, in its dtype and shape, on its device; the rule's `StoredStates`
        # has the others. `note_update` and loads write them on the current stream; inside of `swapped` they hold the
        # model's weights.
        self._averages = {
            p.main: self._weights(p).detach().clone() for p in optimizer.main_params if p.main not in kept
        }
        # Whether the model holds the average. `swapped` sets and clears it.
        self._is_swapped = False
        optimizer.average = self

    @torch.no_grad()
    def note_update(self, is_made: Tensor) -> None:
        """Takes the weights into the average. The optimizer calls it right after each update, before other code may
        write them, and counts it in `num_averaged` once the host learns that there was one.

        Args:
            is_made: 0-dim, on the device: whether there was an update.
        """
        weight = 1 / (self.num_averaged + 1) if self.decay is None or self.num_averaged == 0 else 1 - self.decay
        stored = self._optimizer.rule.stored
        for p in self._optimizer.main_params:
            values, weights = self._values(p), self._weights(p)
            # As the average itself a weight leaves it as it is, to the bit.
            values.lerp_(torch.where(is_made.to(values.device), weights, values), weight)
            stored.write(p.main, _AVERAGE, values, self.num_averaged)
        stored.settle()

    def _keep_in(self, dtype: StateDtype) -> set[Tensor]:
        """Makes the rule's `StoredStates` keep averages. Returns the main tensors of these."""
        from .low_precision.states import StoredStates  # a plug-in, as in `get_megatron_optimizer`

        params, rule = self._optimizer.main_params, self._optimizer.rule
        stored = rule.stored
        if not isinstance(stored, StoredStates):
            stored = StoredStates(params, sharing_ranks(params, self._optimizer.model_groups))
        kept = stored.add({(p.main, _AVERAGE): dtype for p in params}, round_stochastically=True)
        rule.stored = stored
        for p in params:
            stored.write(p.main, _AVERAGE, self._weights(p), 0)
        stored.settle()
        return {main for main, _ in kept}

    def _weights(self, p: MainParam) -> Tensor:
        """Returns the weights of a parameter in the dtype of its master: that itself, or a copy in fp32."""
        return self._optimizer.rule.stored.read(p.main, MASTER, p.main)

    def _values(self, p: MainParam) -> Tensor:
        """Returns an average in the shape of its main tensor: itself, or a copy in fp32."""
        return self._optimizer.rule.stored.read(p.main, _AVERAGE, self._averages.get(p.main, p.main))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Makes the model hold the average, for evaluation or an export, and afterwards its weights again, to the bit.

        Every rank enters it, between steps. Needs the memory of the largest shard on top. Frees the gathered
        parameters of a wrapper first.

        Raises:
            OptimizerError: nothing has been averaged yet, or the model holds the average already.
        """
        self._optimizer.finish_step()
        if self.num_averaged == 0:
            raise OptimizerError("there is no average before the first step; train first")
        self.check_may_step()
        params = self._optimizer.main_params
        # Copies where the model cannot hold an average in fp32, which would come back rounded.
        values = [
            self._values(p) if p.is_copied or not p.is_low_precision else self._values(p).clone() for p in params
        ]
        self._optimizer.exchange_main_tensors(values)
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._optimizer.exchange_main_tensors(values)

    def check_may_step(self) -> None:
        """Raises while the model holds the average.

        Raises:
            OptimizerError: names what to leave.
        """
        if self._is_swapped:
            raise OptimizerError("the model holds averaged weights; leave `with average.swapped()` first")

    def held(self, params: Sequence[MainParam]) -> list[Tensor]:
        """Returns this rank's part of the averages of some parameters that are in fp32."""
        return [self._averages[p.main] for p in params if p.main in self._averages]

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the average of each parameter by name, as tensors of the whole model that share this rank's, or of
        copies, as `MegatronOptimizer.state_tensors`."""
        self.check_may_step()
        tensors = {}
        for p in self._optimizer.main_params:
            average = self._averages.get(p.main, p.main)
            average = self._optimizer.rule.stored.for_checkpoint(p.main, _AVERAGE, average)
            tensors[f"{_AVERAGE}.{p.name}"] = p.whole(average)
        return tensors
