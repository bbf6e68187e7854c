"""A training under a wrapper or in one process; what happens in between means the same in both."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.dist_checkpointing import load, load_metadata, load_model_state_dict, save
from core.distributed import finalize_model_grads, wrap_model
from core.distributed.fully_sharded.unit import POISONS
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from core.training.checkpointing.run_checkpoint import state_tensors
from core.training.state import TrainingState
from core.transformer import Float16Module
from tests.compositions.composition import Composition
from tests.compositions.data import MicroBatch, micro_batch
from tests.compositions.model import Gated, build
from tests.compositions.plain_optimizer import PlainOptimizer
from tests.compositions.settings import optimizer_config, parameter_groups, wrapper_config
from tests.functional._parallel_runs import Layout, _masters
from tests.functional._runs import Curve, in_precision


class Training(ABC):
    """A model and its optimizer, in calls that a wrapped and a plain model have in common."""

    model: nn.Module
    """What is called."""
    module: nn.Module
    """What holds the parameters."""
    optimizer: MegatronOptimizer | PlainOptimizer

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.curve = Curve()
        self.reported: list[Tensor] = []
        """Sum and weight of the loss of each step and each evaluation, on this rank."""
        self.of_step = torch.zeros(2, dtype=torch.float64)
        """The same of the step so far."""

    @property
    def count(self) -> int:
        """Micro-batches of all replicas in a step."""
        return self.composition.shape.dp * self.composition.number

    def loss(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """What a micro-batch adds to the gradient, and its sum and weight for the report."""
        batch = micro_batch(self.composition, step, number)
        for module in self.module.modules():
            if isinstance(module, Gated):
                module.is_used = self._uses_gain(step, number)
        tokens, labels, packed = batch.own()
        losses = self.model(tokens, labels=labels, **packed)  # [b, s / cp]
        return self._shares(losses, labels, batch)

    def evaluate(self, step: int) -> None:
        """A forward of the same micro-batch on all replicas, whose loss is reported."""
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
        """Forgets the gradients of the step before."""
        self.of_step = torch.zeros(2, dtype=torch.float64)
        how = self.composition.zeroes
        if how == "optimizer":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "module":
            self.model.zero_grad()
        if how == "wrapper" or not isinstance(self, Wrapped):
            self.zero()

    def update(self, step: int) -> None:
        """Makes the step, and notes what it did."""
        self.reported.append(self.of_step)
        succeeded, norm, _ = self.optimizer.step()
        if succeeded:
            assert norm is not None
            self.curve.grad_norms.append(norm)
        else:
            self.curve.skipped.append(step)
        self.curve.scales.append(self._scale)

    def finish(self) -> Curve:
        """Notes where the steps have led, and returns all; collective."""
        self.curve.masters = self._weights()
        self.curve.losses = self._whole_losses()
        return self.curve

    def load_values(self, values: dict[str, Tensor]) -> None:
        """Overwrites the weights, as the users of each wrapper do."""
        if any(isinstance(value, DTensor) for value in values.values()):
            load_model_state_dict(self.module, values)
        else:
            self.model.load_state_dict(values)

    @property
    @abstractmethod
    def replicas(self) -> int:
        """Over which the wrapper averages."""

    @property
    @abstractmethod
    def number(self) -> int:
        """Calls of `backward` in a step."""

    @abstractmethod
    def whole_parameters(self) -> AbstractContextManager[None]:
        """Inside it parameters may be written."""

    @abstractmethod
    def zero(self) -> None: ...

    @abstractmethod
    def backward(self, step: int, index: int, factor: float = 1.0) -> None:
        """One micro-batch of each replica."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """After the last micro-batch: gradients are those of all replicas."""

    @abstractmethod
    def _weights(self) -> dict[str, Tensor]:
        """Weights of the whole model, in fp32; collective."""

    @property
    @abstractmethod
    def _scale(self) -> float:
        """Of the loss of the next step."""

    @abstractmethod
    def _whole_losses(self) -> list[float]: ...


class Wrapped(Training):
    """On this rank's part of its replica's micro-batches."""

    optimizer: MegatronOptimizer

    def __init__(self, composition: Composition, part: Composition) -> None:
        """Args:
        composition: the batches and the model.
        part: the layout and the wrapper with its settings.
        """
        super().__init__(composition)
        layout = part.shape
        self.replica, self._replicas = parallel_state.get_data_parallel_rank(), layout.dp
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        seed = 7 + (group.rank() if composition.start == "ranks differ" else 0)
        module = build(composition, layout, seed)
        os.environ[POISONS] = "1" if part.idle_slots == "poisoned" else "0"
        self.wrapper = wrap_model(in_precision(module, _engine(part)), module.config, wrapper_config(part))
        self.model, self.module = self.wrapper, module
        self.optimizer = get_megatron_optimizer(
            optimizer_config(composition), [self.model], **parameter_groups(composition)
        )

    @property
    def replicas(self) -> int:
        return self._replicas

    @property
    def number(self) -> int:
        """Micro-batches of this replica in a step."""
        return self.count // self.replicas

    def whole_parameters(self) -> AbstractContextManager[None]:
        return self.wrapper.whole_parameters()

    def zero(self) -> None:
        self.wrapper.zero_grad_buffer()

    def backward(self, step: int, index: int, factor: float = 1.0) -> None:
        with nullcontext() if index == self.number - 1 else self.wrapper.no_sync():
            loss, reported = self.loss(step, self.replica * self.number + index)
            self.optimizer.scale_loss(loss * factor).backward()
        self.of_step += reported

    def finish_gradients(self) -> None:
        finalize_model_grads([self.wrapper], self.of_step[1] if self.composition.loss == "per token" else None)

    def _weights(self) -> dict[str, Tensor]:
        return _masters(self.module, self.optimizer)

    @property
    def _scale(self) -> float:
        return self.optimizer.get_loss_scale().item()

    def _whole_losses(self) -> list[float]:
        totals = torch.stack(self.reported)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return [(total / weight).item() for total, weight in totals]

    def save(self, folder: Path) -> None:
        """Writes model and optimizer, whole."""
        metadata = {"optimizer": self.optimizer.state_scalars()}
        save(state_tensors(self._state()), folder, metadata=metadata)

    def load(self, folder: Path) -> None:
        """Continues from what another wrapper, on other ranks, has written."""
        scalars = load_metadata(folder)["optimizer"]
        load(state_tensors(self._state()), folder, cast=True)
        self.optimizer.load_state_scalars(scalars)

    def _state(self) -> TrainingState:
        return TrainingState(model=self.wrapper, optimizer=self.optimizer, scheduler=None, vocab_size=64)  # type: ignore


class Serial(Training):
    """In one process, without a wrapper, over the micro-batches of all replicas."""

    optimizer: PlainOptimizer

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        module = build(composition, Layout(), is_serial=True)
        self.model, self.module = module, module
        if composition.precision != "fp32":
            in_precision(module, "ddp")
            self.model = Float16Module(module.config, module)
        self.optimizer = PlainOptimizer(composition, module)
        self.start = self._weights()
        self.sums: dict[nn.Parameter, Tensor] = {}

    @property
    def replicas(self) -> int:
        return 1

    @property
    def number(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.composition.number

    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zero(self) -> None:
        self.sums = {}
        for parameter in self.module.parameters():
            parameter.grad = parameter.main_grad = None  # type: ignore[attr-defined]

    def backward(self, step: int, index: int, factor: float = 1.0) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for number in range(index, self.count, self.number):
            loss, reported = self.loss(step, number)
            loss = self.optimizer.scale_loss(loss * factor)
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    wide = gradient.double()
                    self.sums[parameter] = self.sums[parameter] + wide if parameter in self.sums else wide
            self.of_step += reported

    def finish_gradients(self) -> None:
        divisor = float(self.of_step[1]) if self.composition.loss == "per token" else 1.0
        for parameter in self.module.parameters():
            if parameter.requires_grad:  # one that no backward reached has a gradient of zeros, as under a wrapper
                total = self.sums.get(parameter, torch.zeros_like(parameter, dtype=torch.float64))
                parameter.main_grad = (total / divisor).float()  # type: ignore[attr-defined]

    def _weights(self) -> dict[str, Tensor]:
        masters = self.optimizer.masters
        return {name: masters.get(name, p).detach().float().clone() for name, p in self.module.named_parameters()}

    @property
    def _scale(self) -> float:
        return self.optimizer.scale

    def _whole_losses(self) -> list[float]:
        return [(total / weight).item() for total, weight in self.reported]


def _engine(composition: Composition) -> str:
    return "fsdp2" if composition.is_fsdp2 else composition.wrapper


@contextmanager
def parallel_groups(composition: Composition) -> Iterator[None]:
    """The groups of its layout; every rank calls it."""
    layout = composition.shape
    parallel_state.initialize_model_parallel(
        layout.tp,
        context_parallel_size=layout.cp,
        num_distributed_optimizer_instances=2 if composition.layout == "hybrid" else 1,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
