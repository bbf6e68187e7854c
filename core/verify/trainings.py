"""A training that stops between backward and update, and returns its gradients and weights as whole tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..adapters.nemo.fsdp2 import ITEMS_OF_CONTAINERS
from ..comm.by_backend import all_reduce_by_backend, broadcast_by_backend
from ..dist_checkpointing.views.flat_range import whole
from ..distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
from ..distributed.data_parallel_base import unwrap_model
from ..optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from .model_under_test import ModelUnderTest, scalar_loss


class Training(ABC):
    """A model, its optimizer, and a step in two halves. All ranks call every method together."""

    model: nn.Module
    optimizer: MegatronOptimizer

    @abstractmethod
    def backward(self, step: int) -> float:
        """Runs the micro-batches of a step, and returns the mean loss over all ranks."""

    def update(self) -> None:
        """Updates the weights with the gradients of `backward`."""
        self.optimizer.step()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole gradient of each parameter, between `backward` and `update`."""
        for name, gradient in self.optimizer.gradient_tensors().items():
            yield name, whole(gradient)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter, whole; frozen ones too."""
        model = unwrap_model(self.model)
        tensors = model.state_dict()  # waits for parameters that are still being gathered
        for name, _ in model.named_parameters():
            yield name, whole(tensors[name])

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each buffer, such as the running statistics of a batch normalisation."""
        for name, buffer in unwrap_model(self.model).named_buffers():
            yield name, whole(buffer)


class WrappedTraining(Training):
    """A training under a wrapper; each rank runs its micro-batches."""

    def __init__(
        self,
        tested: ModelUnderTest,
        ddp_config: DistributedDataParallelConfig,
        optimizer: OptimizerConfig,
        micro_batches: int,
    ) -> None:
        instances = ddp_config.num_distributed_optimizer_instances
        if instances > 1:
            parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        model, self._loss = tested.build()
        items = ITEMS_OF_CONTAINERS if ddp_config.shards_parameters else None
        # No config of the model's: under every wrapper it runs in the precision in which it was built.
        self.model = self._wrapper = wrap_model(
            model,
            SimpleNamespace(),
            ddp_config,
            process_group=None if instances > 1 else dist.group.WORLD,
            sub_modules_to_wrap=items,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])
        self._tested, self._micro_batches = tested, micro_batches

    def backward(self, step: int) -> float:
        model, number = self._wrapper, self._micro_batches
        total = torch.zeros((), dtype=torch.float64)
        model.zero_grad_buffer()
        for micro_batch in range(number):
            index = (step * number + micro_batch) * dist.get_world_size() + dist.get_rank()
            with model.no_sync() if micro_batch < number - 1 else nullcontext():
                loss = scalar_loss(self._tested, self._loss, model, index)
                (loss / number).backward()
            total += loss.detach().double().cpu()
        finalize_model_grads([model])
        return _mean_over_ranks(total / number)


class SerialTraining(Training):
    """A training without a wrapper: every rank runs the micro-batches of all ranks."""

    def __init__(self, tested: ModelUnderTest, optimizer: OptimizerConfig, micro_batches: int) -> None:
        self.model, self._loss = tested.build()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            # As wrappers do: ranks may have built different values.
            broadcast_by_backend(tensor.detach(), what="initial values")
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])
        self._tested, self._micro_batches = tested, micro_batches

    def backward(self, step: int) -> float:
        number = self._micro_batches * dist.get_world_size()
        total = 0.0
        self.optimizer.zero_grad()
        for index in range(step * number, (step + 1) * number):
            loss = scalar_loss(self._tested, self._loss, self.model, index)
            (loss / number).backward()
            total += loss.item() / number
        return total


def _mean_over_ranks(value: Tensor) -> float:
    total = value.to(torch.float64)
    on_device = total.to("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    all_reduce_by_backend(on_device, what="the loss")
    return float(on_device) / dist.get_world_size()
