"""A training under a wrapper over two pipeline stages, on this rank's part of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.pipeline_parallel import get_forward_backward_func
from tests.compositions.data import ROWS, SEQUENCE, MicroBatch, micro_batch
from tests.compositions.training import load
from tests.compositions.wrapped import Wrapped


class Staged(Wrapped):
    """A training whose micro-batches run through pipeline stages, where the loop is written out by Megatron-LM's
    function."""

    module: nn.ModuleList
    """This rank's stages."""

    def make_step(self, step: int, between: Any) -> None:
        if self.composition.loop != "written out":
            super().make_step(step, between)
            return
        self.prepare(step, 0)
        for chunk in self.wrappers:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self.of_step += self._run(
            [micro_batch(self.composition, step, self._number_of(i)) for i in range(self.number)]
        )
        self.finish_gradients()
        between.before_update(step)
        self.update(step)

    def evaluate(self, step: int) -> None:
        self.prepare(step, step % self.count)
        batch = micro_batch(self.composition, step, step % self.count)
        self.reported.append(self._run([batch], forward_only=True))

    def load_values(self, values: dict[str, Tensor]) -> None:
        for index, (wrapper, module) in enumerate(zip(self.wrappers, self.module, strict=True)):
            prefix = f"{index}."
            own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
            load(wrapper, module, own)

    def _run(self, batches: Sequence[MicroBatch], forward_only: bool = False) -> Tensor:
        """Returns sum and weight of the loss of micro-batches, zeros where the last stage is on another rank."""
        reports = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[iter(batches) for _ in self.wrappers],
            model=self.wrappers,
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        return torch.stack([torch.zeros(2, dtype=torch.float64), *reports]).sum(0)

    def _forward_step(self, data: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(data)
        tokens, labels, packed = self.inputs(batch)
        return model(tokens, labels=labels, **packed), partial(self._loss, batch, labels)

    def _loss(self, batch: MicroBatch, labels: Tensor, losses: Tensor) -> tuple[Any, ...]:
        """Returns what a loss function of Megatron-LM's loops returns; these multiply means by the context-parallel
        ranks."""
        total = losses.float().sum()
        if self.composition.loss == "per token":
            number = (labels != -100).sum()
            return total, number, torch.stack([total.detach().double(), number])
        mean, ranks = total / batch.tokens_with_loss, parallel_state.get_context_parallel_world_size()
        return mean, torch.stack([ranks * mean.detach().double(), torch.ones(()).double()])

    @property
    def _modules(self) -> Sequence[nn.Module]:
        return list(self.module)

    def seed(self, step: int, number: int) -> int:
        """Returns what a step's random numbers begin with, from which stages draw for each micro-batch."""
        return 100 * step + self.replica
