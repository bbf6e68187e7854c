"""The user's function to verify, which builds a model and its loss, and trainings of that model."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..base.device import current_device
from ..base.errors import ConfigError
from ..base.module_protocol import unwrap_model
from ..comm.collectives import all_reduce_by_backend, broadcast_by_backend
from ..dist_checkpointing.gathering import TensorStream
from ..distributed import DistributedDataParallelConfig, _BaseDataParallel, finalize_model_grads, wrap_model
from ..distributed.plan.units import CONTAINERS
from ..optimizer import OptimizerConfig, get_megatron_optimizer

Loss = Callable[[nn.Module, int], torch.Tensor]
"""Takes the model, wrapped or not, and the number of a micro-batch. Returns its mean loss, a scalar."""

SEED = 1234
_SEQUENCES, _LENGTH = 2, 16


@dataclass(frozen=True)
class ModelUnderTest:
    """Builds the same model any number of times.

    Args:
        name: name of the function, ``my_module:build``.
        make: the user's function. It returns a model and its loss, or only a model that takes ``input_ids`` and
            ``labels`` as Hugging Face's do.
    """

    name: str
    make: Callable[[], Any]

    def build(self) -> tuple[nn.Module, Loss]:
        """Returns a model on this process's device, and its loss, after seeding every generator.

        Raises:
            ConfigError: the function raises, returns something else, or a model with nothing to train.
        """
        _seed_everything(SEED)
        try:
            result = self.make()
        except Exception as error:
            raise ConfigError(
                f"{self.name} raised {type(error).__name__}: {error}; it is called without arguments"
            ) from error
        if isinstance(result, nn.Module):
            model, loss = result, self._loss_of_tokens(result)
        elif (
            isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and callable(result[1])
        ):
            model, loss = result
        else:
            raise ConfigError(
                f"{self.name} returned {_describe(result)}; let it return a model and a function loss(model, index), "
                "or a model that takes input_ids and labels"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            what = "only frozen parameters" if any(True for _ in model.parameters()) else "no parameters"
            raise ConfigError(f"{self.name} built a {type(model).__name__} with {what}; there is nothing to train")
        if (meta := next((name for name, p in model.named_parameters() if p.is_meta), None)) is not None:
            raise ConfigError(f"{self.name} built a model whose {meta} is on the meta device; let it have values")
        return model.to(current_device()).train(), loss

    def check(self) -> nn.Module:
        """Builds twice, and returns the first model.

        Raises:
            ConfigError: two builds differ, in the names, shapes or values of parameters or buffers.
        """
        model = self.build()[0]
        once, again = model.state_dict(), self.build()[0].state_dict()
        for name in sorted(once.keys() ^ again.keys()):
            raise ConfigError(f"{self.name} is not the same from one build to the next: {name} is there only once")
        for name, value in once.items():
            other = again[name]
            if isinstance(value, torch.Tensor) and not (value.dtype == other.dtype and torch.equal(value, other)):
                raise ConfigError(
                    f"{self.name} is not the same from one build to the next: {name} differs, although torch, numpy "
                    "and random were seeded; draw from their generators alone"
                )
        return model

    def _loss_of_tokens(self, model: nn.Module) -> Loss:
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        if (
            not isinstance(vocabulary, int)
            or not {"input_ids", "labels"} <= inspect.signature(model.forward).parameters.keys()
        ):
            raise ConfigError(
                f"{self.name} returned a {type(model).__name__} alone, whose forward does not take input_ids and "
                "labels, or whose config has no vocab_size; return the model and a function loss(model, index)"
            )

        def loss(wrapper: nn.Module, index: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, vocabulary, (_SEQUENCES, _LENGTH), generator=generator).to(current_device())
            return cast(torch.Tensor, wrapper(input_ids=tokens, labels=tokens).loss)

        return loss


def load_model_under_test(name: str) -> ModelUnderTest:
    """Imports the function that ``my_module:build`` names.

    Raises:
        ConfigError: the name is not of this form, cannot be imported, or is no function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} names no function; write module:function, as my_module:build")
    try:
        function: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{module_name} does not import ({type(error).__name__}: {error}); run the command where "
            f"`python -c 'import {module_name}'` works"
        ) from error
    for part in attribute.split("."):
        if not hasattr(function, part):
            raise ConfigError(f"{module_name} has no {attribute}; write module:function, as {module_name}:build")
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(f"{name} is {_describe(function)}; it has to be a function that builds a model")
    return ModelUnderTest(name, function)


def scalar_loss(under_test: ModelUnderTest, loss: Loss, model: nn.Module, index: int) -> torch.Tensor:
    """Returns the loss of a micro-batch. Its random draws depend only on its number.

    Raises:
        ConfigError: the loss is no scalar with a gradient.
    """
    _seed_everything(SEED + 1 + index)
    total = loss(model, index)
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.requires_grad:
        raise ConfigError(
            f"the loss of {under_test.name} is {_describe(total)}; let loss(model, index) return a scalar tensor "
            "that depends on the model's parameters"
        )
    return total.reshape(())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Training:
    """A model, its optimizer, and a step in two halves. All ranks call every method together.

    Args:
        ddp_config: each rank runs its micro-batches under this wrapper. None: every rank runs those of all ranks,
            without a wrapper.
        micro_batches: of a step, on each rank under a wrapper.
    """

    def __init__(
        self,
        under_test: ModelUnderTest,
        ddp_config: DistributedDataParallelConfig | None,
        optimizer: OptimizerConfig,
        micro_batches: int,
    ) -> None:
        self._under_test, self._micro_batches = under_test, micro_batches
        self._wrapper: _BaseDataParallel | None = None
        if ddp_config is None:
            model, self._loss = under_test.build()
            for tensor in (*model.parameters(), *model.buffers()):
                # As wrappers do: ranks may have built different values.
                broadcast_by_backend(tensor.detach(), what="initial values")
            self.model = model
        else:
            instances = ddp_config.num_distributed_optimizer_instances
            if instances > 1:
                parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
            model, self._loss = under_test.build()
            # No config of the model's: under every wrapper it runs in the precision in which it was built.
            self.model = self._wrapper = wrap_model(
                model,
                SimpleNamespace(),
                ddp_config,
                process_group=None if instances > 1 else dist.group.WORLD,
                sub_modules_to_wrap=CONTAINERS if ddp_config.shards_parameters else None,
            )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])

    def backward(self, step: int) -> float:
        """Runs the micro-batches of a step, and returns the mean loss over all ranks."""
        wrapper, num_ranks = self._wrapper, dist.get_world_size()
        first = step * self._micro_batches * num_ranks
        indices = range(first, first + self._micro_batches * num_ranks)
        if wrapper is None:
            self.optimizer.zero_grad()
        else:
            indices = indices[dist.get_rank() :: num_ranks]
            wrapper.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64, device=current_device())
        for index in indices:
            with nullcontext() if wrapper is None or index == indices[-1] else wrapper.no_sync():
                loss = scalar_loss(self._under_test, self._loss, self.model, index)
                (loss / len(indices)).backward()
            total += loss.detach().double() / len(indices)
        if wrapper is not None:
            finalize_model_grads([wrapper])
            all_reduce_by_backend(total, what="the loss")
            total /= num_ranks
        return float(total)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole gradient of each parameter, between `backward` and the step of `optimizer`."""
        yield from TensorStream(self.optimizer.gradient_tensors())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter, whole, frozen ones too."""
        model = unwrap_model(self.model)
        tensors = model.state_dict()  # waits for parameters that are still being gathered
        yield from TensorStream({name: tensors[name] for name, _ in model.named_parameters()})

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each buffer, such as the running statistics of a batch normalisation."""
        yield from TensorStream(dict(unwrap_model(self.model).named_buffers()))
