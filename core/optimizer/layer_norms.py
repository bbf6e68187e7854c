"""Norms of gradient, update and weight of each layer, under any wrapper equal to those of one process, to the bit.

The sums are `exact_sums`: they depend on the elements alone, and not on which rank holds which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..base.errors import OptimizerError
from ..dist_checkpointing.agreement import pipeline_ranks
from .distrib_optimizer import groups_of_model
from .exact_sums import ExactStatistics
from .main_ranges import collect_main_params
from .optimizer import MegatronOptimizer

KINDS = ("grad_norm", "update_norm", "weight_norm")


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: its name up to the first number, else the module that holds it."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if numbered is None else parts[: numbered + 1]) or name


class LayerNorms:
    """Measures each layer in the steps of an optimizer while `is_on`, from hooks of its step.

    The gradient is what `step` finds, over all ranks, before clipping and without the loss scale. The weight is the
    value after the step, of an fp32 master where there is one. The update is its difference to the value before, and 0
    in a step that the device skips. Nothing is gathered: ranks add the squares of their own shards. During a step that
    is measured there is a copy of this rank's shards.

    Every rank of the model makes one, and switches it on for the same steps.

    Args:
        optimizer: one of `shardstack.optimizer`, or any of torch for a model that is plain, in torch's
            `DistributedDataParallel`, or sharded by ``fully_shard``.
        model: what the optimizer updates. Not needed for an optimizer of `shardstack.optimizer`.
        layer: maps a parameter's name to the name of its layer.

    Raises:
        OptimizerError: the optimizer has no parameter of the model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Sequence[nn.Module] = (),
        *,
        layer: Callable[[str], str] = layer_of,
    ) -> None:
        self._optimizer, self._layer = optimizer, layer
        chunks = [model] if isinstance(model, nn.Module) else model
        self._chunks = [chunk.module if isinstance(chunk, TorchDDP) else chunk for chunk in chunks]
        self.is_on = True
        """Whether the next steps are measured. The caller sets it."""
        # Norms of the last step, `[kinds * layers]`; None if it was not measured. The step's first hook clears it, the
        # second sets it.
        self._norms: Tensor | None = None
        # Copies of this rank's shards, and the gradient's norms, between both hooks of a step that is measured.
        self._before: tuple[list[Tensor], Tensor] | None = None
        self._find_params()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _find_params(self) -> None:
        """Takes the optimizer's parameters: at construction, and after a group was added."""
        optimizer = self._optimizer
        if isinstance(optimizer, MegatronOptimizer):
            self._params, groups = optimizer.main_params, optimizer.model_groups
        else:
            given = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            self._params = collect_main_params(self._chunks, has_master=False, only=given)
            groups = groups_of_model(self._chunks)
            if not self._params:
                raise OptimizerError(
                    f"{type(optimizer).__name__} updates no parameter of the model whose layers are measured; give "
                    "that model, and the optimizer that shard_optimizer returned if it was called"
                )
        own = [self._layer(p.name) for p in self._params]
        self.layers = list(dict.fromkeys(chain.from_iterable(pipeline_ranks(groups).all_gather(own))))
        """Names of the layers of all pipeline stages, in order."""
        self._statistics = ExactStatistics(self._params, groups)

    def _norms_of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        of_params = [(self._layer(p.name), tensor) for p, tensor in zip(self._params, tensors, strict=True)]
        return self._statistics.norms([[t if of == layer else None for of, t in of_params] for layer in self.layers])

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        self._norms = self._before = None
        if not self.is_on:
            return
        optimizer, scale = self._optimizer, 1.0
        if isinstance(optimizer, MegatronOptimizer):
            if optimizer.main_params is not self._params:
                self._find_params()
            scale = optimizer.grad_scaler.scale if optimizer.grad_scaler is not None else 1.0
        gradient = self._norms_of([p.take_gradient() for p in self._params]) / scale
        self._before = [p.main.clone() for p in self._params], gradient

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self._before is None:
            return
        (copies, gradient), self._before = self._before, None
        weights = [p.main for p in self._params]
        update = self._norms_of([copy.sub_(weight) for copy, weight in zip(copies, weights, strict=True)])
        self._norms = torch.cat([gradient, update, self._norms_of(weights)])

    def take(self) -> dict[str, Tensor]:
        """Returns the norms of the last step by name, such as ``grad_norm/blocks.0``, or none if it was not measured.

        Waits for no device.

        Returns:
            0-dim numbers in double on the device.
        """
        names = (f"{kind}/{layer}" for kind in KINDS for layer in self.layers)
        return {} if self._norms is None else dict(zip(names, self._norms.unbind(), strict=True))
