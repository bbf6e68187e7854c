"""A training under a wrapper, on this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.dist_checkpointing import load, load_metadata, save
from core.dist_checkpointing.global_view import whole_view
from core.distributed import _BaseDataParallel, finalize_model_grads, wrap_model
from core.distributed.engine.unit import POISONS
from core.distributed.model import offloaded_activations
from core.optimizer import AveragedWeights, MegatronOptimizer, OptimizerParamScheduler, get_megatron_optimizer
from core.training.checkpointing import state_tensors
from core.training.state import TrainingState
from core.training.train_step import train_step
from tests.compositions.composition import Composition
from tests.compositions.data import loaded_batches, micro_batch
from tests.compositions.model import build, expert_parallel_size
from tests.compositions.settings import DECAYS, optimizer_config, parameter_groups, wrapper_config
from tests.compositions.torch_optimizer import TorchOptimizer
from tests.compositions.training import Training
from tests.functional._runs import _whole, in_precision


class Wrapped(Training):
    """A training under a wrapper, on this rank's part of its replica's micro-batches."""

    optimizer: MegatronOptimizer | TorchOptimizer

    def __init__(self, composition: Composition, part: Composition, first: int = 0) -> None:
        """Args:
        composition: the batches and the model.
        part: the layout and the wrapper with its settings.
        first: the step that it begins with.
        """
        super().__init__(composition)
        layout = part.shape
        self.part = part
        self.replica, self._replicas = parallel_state.get_data_parallel_rank(), layout.dp
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        seed = 7 + (group.rank() if composition.start == "ranks differ" else 0)
        model = composition.replaced(experts=part.experts, pipeline=part.pipeline)
        turns = [None] if part.virtual_stages is None else range(part.virtual_stages)
        modules = [build(model, layout, seed, vp_stage=turn) for turn in turns]
        os.environ[POISONS] = "1" if part.idle_slots == "poisoned" else "0"
        self.wrappers = [wrap_model(in_precision(m, _engine(part)), m.config, wrapper_config(part)) for m in modules]
        # With one pipeline stage. `model` is the last of a rank's, whose outputs are losses if any are.
        self.model, self.wrapper = self.wrappers[-1], self.wrappers[0]
        self.module: nn.Module = modules[0] if part.pipeline == "none" else nn.ModuleList(modules)
        config = optimizer_config(composition)
        if composition.steps_by_torch:
            self.optimizer = TorchOptimizer(composition, self.module)
        else:
            self.optimizer = get_megatron_optimizer(config, self.wrappers, **parameter_groups(composition))
            self.scheduler = _scheduler(composition, self.optimizer)
        if composition.averaged != "no":
            self._average = AveragedWeights(self.optimizer, DECAYS[composition.averaged])
        self._loaded: Iterator[Mapping[str, Tensor]] = iter(())
        if composition.loop == "train_step on a loader":
            self._loaded = loaded_batches(composition, first)

    @property
    def models(self) -> Sequence[_BaseDataParallel]:
        return self.wrappers

    @property
    def replicas(self) -> int:
        return self._replicas

    @property
    def number(self) -> int:
        """Micro-batches of this replica in a step."""
        return self.count // self.replicas

    def whole_parameters(self) -> AbstractContextManager[None]:
        stack = ExitStack()
        if self.part.wrapper == "zero3":
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.whole_parameters())
        return stack

    def averaged(self) -> AbstractContextManager[None]:
        return self._average.swapped()

    def begin_step(self) -> None:
        how = self.composition.zeroes
        if how == "optimizer":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "module":
            for wrapper in self.wrappers:
                wrapper.zero_grad()
        else:
            self.zero()
        self.of_step = torch.zeros(2, dtype=torch.float64)

    def zero(self) -> None:
        for wrapper in self.wrappers:
            wrapper.zero_grad_buffer()

    def make_step(self, step: int, between: Any) -> None:
        if self.composition.loop == "written out":
            super().make_step(step, between)
            return
        batches = self._batches(step, between)
        result = train_step(self.wrappers, self.optimizer, self.scheduler, batches, self.number).result()
        self.reported.append(torch.tensor([result.loss, 1.0], dtype=torch.float64))
        self.note(step, result.grad_norm if result.has_update else None)

    def _batches(self, step: int, between: Any) -> Iterator[Mapping[str, Tensor]]:
        """Yields this replica's micro-batches of a step, as `train_step` takes them."""
        for index in range(self.number):
            between.before_micro_batch(step, index)
            number = self._number_of(index)
            self.prepare(step, number)
            if self.composition.loop == "train_step on a loader":
                yield next(self._loaded)
            else:
                yield micro_batch(self.composition, step, number).fields()

    def _number_of(self, index: int) -> int:
        """Returns the global index of a micro-batch; a loader deals them out in turns, as Megatron-LM does."""
        if self.composition.loop == "train_step on a loader":
            return index * self.replicas + self.replica
        return self.replica * self.number + index

    def update(self, step: int) -> None:
        super().update(step)
        if not self.composition.steps_by_torch and self.curve.skipped[-1:] != [step]:
            self.scheduler.step(1)

    def backward(self, step: int, index: int) -> None:
        is_last = index == self.number - 1
        with nullcontext() if is_last else self.wrapper.no_sync():
            if not is_last:
                with self.wrapper.no_sync():
                    pass  # leaving it does not end the outer one
            loss, reported = self.loss(step, self._number_of(index))
            self.optimizer.scale_loss(loss).backward()
        self.of_step += reported

    def finish_gradients(self) -> None:
        finalize_model_grads(self.wrappers, self.of_step[1] if self.composition.loss == "per token" else None)

    def change_gradient(self, parameter: nn.Parameter, factor: float | None) -> None:
        if factor is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.mul_(factor)

    def _weights(self) -> dict[str, Tensor]:
        state, tensors = self.optimizer.state_tensors(), self.module.state_dict(keep_vars=True)
        views = {name: tensor for name, tensor in state.items() if name.startswith("average.")}
        for name, _ in self.module.named_parameters():
            views[name] = state.get(f"master.{name}", whole_view(tensors[name]))
        return _whole(views)

    @property
    def _scale(self) -> float:
        return self.optimizer.get_loss_scale().item()

    def _whole_losses(self) -> list[float]:
        totals = torch.stack(self.reported)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
        return [(total / weight).item() for total, weight in totals]

    def save(self, folder: Path) -> None:
        metadata = {"optimizer": self.optimizer.state_scalars(), "scheduler": self.scheduler.state_dict()}
        save(state_tensors(self._state()), folder, metadata=metadata)

    def load(self, folder: Path) -> None:
        """Continues from what another wrapper, on other ranks, has written."""
        metadata = load_metadata(folder)
        load(state_tensors(self._state()), folder, cast=True)
        self.optimizer.load_state_scalars(metadata["optimizer"])
        self.scheduler.load_state_dict(metadata["scheduler"])

    def _state(self) -> TrainingState:
        first, *later = self.wrappers
        return TrainingState(
            model=first, later_stages=later, optimizer=self.optimizer, scheduler=self.scheduler, vocab_size=64
        )


def _scheduler(composition: Composition, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds the schedule: constant rates of the optimizer's config, or `plain_optimizer.SCHEDULE`."""
    config = optimizer_config(composition)
    lr, decay = config.lr or 0.0, config.weight_decay
    if composition.schedule == "constant":
        fields: dict[str, Any] = {"init_lr": lr, "min_lr": lr, "lr_warmup_steps": 0, "lr_decay_style": "constant"}
        fields |= {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}
    else:
        fields = {"init_lr": 0.25 * lr, "min_lr": 0.1 * lr, "lr_warmup_steps": 1, "lr_decay_style": "linear"}
        fields |= {"start_wd": 0.5 * decay, "end_wd": 1.5 * decay, "wd_incr_style": "linear"}
    return OptimizerParamScheduler(optimizer, max_lr=lr, lr_decay_steps=4, wd_incr_steps=4, **fields)


def _engine(composition: Composition) -> str:
    return "fsdp2" if composition.is_fsdp2 else composition.wrapper


@contextmanager
def parallel_groups(composition: Composition) -> Iterator[None]:
    """Initializes the groups of a layout; every rank calls it."""
    layout = composition.shape
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        composition.virtual_stages,
        context_parallel_size=layout.cp,
        num_distributed_optimizer_instances=2 if composition.is_hybrid else 1,
        **expert_parallel_size(composition),
    )
    try:
        with mock.patch.object(offloaded_activations, "LEAST_BYTES", 1):  # the model's tensors are tiny
            yield
    finally:
        parallel_state.destroy_model_parallel()
