"""A training under a wrapper or in one process; what happens in between means the same in both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.dist_checkpointing import load_model_state_dict
from core.distributed import TorchFullyShardedDataParallel
from core.optimizer import MegatronOptimizer
from tests.compositions.composition import Composition
from tests.compositions.data import MicroBatch, micro_batch
from tests.compositions.model import Counted, Gated
from tests.compositions.plain_optimizer import PlainOptimizer
from tests.compositions.torch_optimizer import TorchOptimizer
from tests.unit._runs import Curve


def load(model: nn.Module, module: nn.Module, values: dict[str, Tensor]) -> None:
    """Loads values into a model, and the module in it, as the users of each wrapper do."""
    in_place = isinstance(model, TorchFullyShardedDataParallel)  # whose `load_state_dict` does nothing
    if in_place or any(isinstance(value, DTensor) for value in values.values()):
        load_model_state_dict(module, values)
    else:
        model.load_state_dict(values)


class Training(ABC):
    """A model and its optimizer, in calls that a wrapped and a plain model have in common."""

    model: nn.Module
    """What is called."""
    module: nn.Module
    """What holds the parameters."""
    optimizer: MegatronOptimizer | TorchOptimizer | PlainOptimizer

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.curve = Curve()
        self.reported: list[Tensor] = []
        """Sum and weight of the loss of each step and each evaluation, on this rank."""
        self.of_step = torch.zeros(2, dtype=torch.float64)
        """The same of the step so far."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """`model`, or all of this rank's pipeline stages."""
        return [self.model]

    @property
    def count(self) -> int:
        """Micro-batches of all replicas in a step."""
        return self.composition.shape.dp * self.composition.number

    def loss(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch's loss for backward, and its sum and weight for the report."""
        batch = micro_batch(self.composition, step, number)
        self.prepare(step, number)
        tokens, labels, packed = self.inputs(batch)
        losses = self.model(tokens, labels=labels, **packed)  # [b, s / cp]
        return self._shares(losses, labels, batch)

    def inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return batch.own()

    def prepare(self, step: int, number: int) -> None:
        """Sets what a micro-batch's dropout draws, whether it uses the parameter that only some use, and whether it
        moves running means."""
        torch.manual_seed(self.seed(step, number))
        for module in self.module.modules():
            if isinstance(module, Gated):
                module.is_used = self._uses_gain(step, number)
            elif isinstance(module, Counted):
                module.is_counting = self.counts(number)

    def seed(self, step: int, number: int) -> int:
        return 100 * step + number

    def counts(self, number: int) -> bool:
        """Whether the next forward, of a micro-batch, moves running means: each rank's own do."""
        return True

    def together(self, index: int) -> range:
        """Returns the micro-batches of a replica that the call of `backward` with this index runs."""
        if self.composition.forwards == "one by one":
            return range(index, index + 1)
        return range(index - 1, index + 1) if index % 2 else range(0)

    def evaluate(self, step: int) -> None:
        """Runs the forward of one micro-batch on all replicas, and reports its loss."""
        self.reported.append(self.loss(step, step % self.count)[1].clone())

    def _shares(self, losses: Tensor, labels: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        total = losses.float().sum()
        if self.composition.loss == "per token":
            return total, torch.stack([total.detach().double(), (labels != -100).sum()])
        mean = total * parallel_state.get_context_parallel_world_size() / batch.tokens_with_loss
        return mean / self.count * self.replicas, torch.stack([mean.detach().double(), torch.ones(()).double()])

    def _uses_gain(self, step: int, number: int) -> bool:
        unused = self.composition.unused
        return not (
            unused == "ever"
            or (unused == "in some steps" and step == 1)
            or (unused == "on some ranks" and number >= self.composition.number)
        )

    def begin_step(self) -> None:
        self.of_step = torch.zeros(2, dtype=torch.float64)
        if self.composition.zeroes != "never":
            self.zero()

    def make_step(self, step: int, between: Any) -> None:
        for index in range(self.number):
            between.before_micro_batch(step, index)
            self.backward(step, index)
        self.finish_gradients()
        between.before_update(step)
        self.update(step)

    def update(self, step: int) -> None:
        self.reported.append(self.of_step)
        succeeded, norm, _ = self.optimizer.step()
        self.note(step, norm if succeeded else None)

    def note(self, step: int, norm: float | None) -> None:
        """Records a step; it was skipped if `norm` is None."""
        if norm is None:
            self.curve.skipped.append(step)
        else:
            self.curve.grad_norms.append(norm)
        self.curve.scales.append(self._scale)

    def finish(self) -> Curve:
        """Records weights, buffers and losses, and returns the curve; collective."""
        self.curve.masters = self._weights()
        self.curve.buffers = self._buffers()
        self.curve.losses = self._whole_losses()
        return self.curve

    def load_values(self, values: dict[str, Tensor]) -> None:
        """Overwrites the weights, as the users of each wrapper do."""
        load(self.model, self.module, values)

    @property
    @abstractmethod
    def replicas(self) -> int:
        """Replicas that the wrapper averages over."""

    @property
    @abstractmethod
    def number(self) -> int:
        """Calls of `backward` in a step."""

    @abstractmethod
    def whole_parameters(self) -> AbstractContextManager[None]:
        """Lets parameters be written inside the context."""

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """Lets the model hold the average of its weights inside the context."""

    @abstractmethod
    def averaged_inside(self) -> AbstractContextManager[None]:
        """Does the same inside `whole_parameters` of every wrapper."""

    @abstractmethod
    def zero(self) -> None: ...

    @abstractmethod
    def backward(self, step: int, index: int) -> None:
        """Runs one micro-batch of each replica."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Reduces gradients over replicas, after the last micro-batch."""

    @abstractmethod
    def change_gradient(self, parameter: nn.Parameter, factor: float | None) -> None:
        """Multiplies a gradient between `finish_gradients` and the update, or sets it to None."""

    @abstractmethod
    def _weights(self) -> dict[str, Tensor]:
        """Returns the weights of the whole model, in fp32; collective."""

    @abstractmethod
    def _buffers(self) -> dict[str, Tensor]:
        """Returns the buffers of the whole model that checkpoints have; collective."""

    @property
    @abstractmethod
    def _scale(self) -> float:
        """Scale of the next loss."""

    @abstractmethod
    def _whole_losses(self) -> list[float]: ...
