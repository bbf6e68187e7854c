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
from core.dist_checkpointing import load_training, save_training
from core.dist_checkpointing.global_view import global_view, whole_view
from core.distributed import _BaseDataParallel, finalize_model_grads, wrap_model
from core.distributed.flat.unit import POISONS
from core.distributed.model import offloaded_activations
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from core.training.train_step import train_step
from core.weights import WeightStream
from tests.compositions.composition import Composition
from tests.compositions.data import loaded_batches, micro_batch
from tests.compositions.model import build, expert_parallel_size
from tests.compositions.settings import DECAYS, optimizer_config, parameter_groups, scheduler_of, wrapper_config
from tests.compositions.torch_optimizer import TorchOptimizer
from tests.compositions.training import Training
from tests.unit._gpt import in_precision
from tests.unit._runs import Curve
from tests.unit._whole import assembled


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
            self.scheduler = scheduler_of(composition, self.optimizer)
        if composition.averaged != "no":
            self._average = AveragedWeights(self.optimizer, DECAYS[composition.averaged])
        self._stream = WeightStream(self.wrappers, "module") if part.streams != "no" else None
        self._gradients: dict[str, Tensor] = {}
        """Whole gradients of the last step, before its update, as `global_view` shows them."""
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

    @contextmanager
    def averaged_inside(self) -> Iterator[None]:
        """Does the same inside `whole_parameters` of every wrapper."""
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.whole_parameters())
            with self.averaged():
                yield

    def averaged(self) -> AbstractContextManager[None]:
        return self._average.swapped()

    def begin_step(self) -> None:
        how = self.composition.zeroes
        if how == "optimizer":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "module":
            for wrapper in self.wrappers:
                wrapper.zero_grad()
        elif how == "wrapper":
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
        numbers = [self._number_of(i) for i in self.together(index)]
        if not numbers:
            return
        is_last = index == self.number - 1
        with nullcontext() if is_last else self.wrapper.no_sync():
            if not is_last:
                with self.wrapper.no_sync():
                    pass  # leaving it does not end the outer one
            losses, reports = zip(*(self.loss(step, number) for number in numbers), strict=True)
            self.optimizer.scale_loss(torch.stack(losses).sum()).backward()
        self.of_step += torch.stack(reports).sum(0)

    def finish_gradients(self) -> None:
        num_tokens = self.of_step[1] if self.composition.loss == "per token" else None
        is_whole = self.part.whole_gradients == "yes"
        finalize_model_grads(self.wrappers, num_tokens, force_all_reduce=is_whole)
        if is_whole:
            named = {name: p for module in self._modules for name, p in module.named_parameters()}
            whole = {name: (p, p.main_grad) for name, p in named.items() if p.requires_grad}  # type: ignore
            self._gradients = {name: global_view(p, gradient.clone()) for name, (p, gradient) in whole.items()}

    def change_gradient(self, parameter: nn.Parameter, factor: float | None) -> None:
        if factor is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.mul_(factor)

    @property
    def _modules(self) -> Sequence[nn.Module]:
        """The model, or this rank's stages, whose parameters have the names of the whole model."""
        return [self.module]

    def finish(self) -> Curve:
        """Does the same with whole gradients, and with a check of the stream of weights."""
        super().finish()
        self.curve.gradients = assembled(self._gradients)
        if self._stream is not None:
            self._check_stream(self._stream)
        return self.curve

    def _check_stream(self, stream: WeightStream) -> None:
        sent = {name: tensor.clone() for name, tensor in stream}
        for wrapper in self.wrappers:
            wrapper.engine.parameters.settle()
        held = {name: t for m in self._modules for name, t in m.state_dict(keep_vars=True).items()}
        held = assembled({name: whole_view(t) for name, t in held.items() if t.is_floating_point()})
        wrong = [name for name in held.keys() & sent.keys() if not torch.equal(held[name], sent[name].to(held[name]))]
        assert not wrong, f"a stream that was kept over steps sends other values of {sorted(wrong)}"
        known = {name for name in held if name in self.curve.masters or name in self.curve.buffers}
        assert known <= sent.keys(), f"a stream that was kept over steps sends nothing of {known - sent.keys()}"

    def _weights(self) -> dict[str, Tensor]:
        if not self.composition.steps_by_torch:
            self.optimizer.finish_step()  # type: ignore[union-attr]
        state = self.optimizer.state_tensors()
        views = {name: tensor for name, tensor in state.items() if name.startswith("average.")}
        for module in self._modules:
            tensors = module.state_dict(keep_vars=True)
            for name, _ in module.named_parameters():
                views[name] = state.get(f"master.{name}", whole_view(tensors[name]))
        return assembled(views)

    def _buffers(self) -> dict[str, Tensor]:
        found = {}
        for module in self._modules:
            tensors, names = module.state_dict(), {name for name, _ in module.named_buffers()}
            found |= {name: whole_view(tensor) for name, tensor in tensors.items() if name in names}
        return assembled(found)

    @property
    def _scale(self) -> float:
        return self.optimizer.get_loss_scale().item()

    def _whole_losses(self) -> list[float]:
        totals = torch.stack(self.reported)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
        return [(total / weight).item() for total, weight in totals]

    def save(self, folder: Path) -> None:
        assert isinstance(self.optimizer, MegatronOptimizer)
        save_training(folder, self.wrappers, self.optimizer, self.scheduler)

    def load(self, folder: Path) -> None:
        """Continues from what another wrapper, on other ranks, has written."""
        assert isinstance(self.optimizer, MegatronOptimizer)
        load_training(folder, self.wrappers, self.optimizer, self.scheduler)


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
