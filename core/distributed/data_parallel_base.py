"""The contract that every data-parallel wrapper keeps, so that a training script can swap one for another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardstackError
from ..transformer.module import Float16Module
from .describe import ModelFacts, describe
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .expert_parameters import reject_expert_parameters
from .explain import raise_explained
from .explain.rewrapping import reject_wrapped
from .explain.stale_optimizers import watch_optimizers
from .explain.structure import reject_different_models
from .gradient_checks import GradientChecks
from .units import Unit


class _BaseDataParallel(nn.Module, ABC):
    """A module whose gradients are made global over a data-parallel group.

    One optimizer step over ``n`` micro-batches is::

        model.zero_grad_buffer()
        for i, batch in enumerate(micro_batches):
            with model.no_sync() if i < n - 1 else nullcontext():
                model(batch).backward()
        finalize_model_grads([model], num_tokens)
        optimizer.step()

    Only the last micro-batch communicates. Gradients of replicas are averaged, once; under
    ``config.calculate_per_token_loss`` they are summed and `finalize_model_grads` divides by the token count. The
    optimizer reads ``param.main_grad`` where there is one, else ``param.grad``.

    Args:
        config: the model's config. Any object will do: an absent field takes its default.
        module: the model, wrapped in place.
        ddp_config: the wrapper's settings.
        process_group: the ranks that hold replicas; data parallel times context parallel.
    """

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        ddp_config: DistributedDataParallelConfig,
        process_group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        reject_wrapped(module, (_BaseDataParallel,))
        reject_expert_parameters(module, config)
        watch_optimizers()
        self.config = config
        self.module = module
        self.ddp_config = ddp_config
        self.process_group = process_group
        self._syncs_gradients = True
        self._gradient_checks = GradientChecks(ddp_config.check_for_nan_in_grad, ddp_config.check_for_large_grads)
        self._step = 0

    def _reject_different_models(self, units: Sequence[Unit] = (), **settings: Any) -> None:
        """Raises WrapError, on every rank, unless all of the group are about to wrap the same model alike.

        Args:
            settings: what the constructor was given beside the config that has to agree too.
        """
        reject_different_models(
            self.module,
            self.process_group,
            wrapper=type(self).__name__,
            config=self.config,
            ddp_config=self.ddp_config,
            units=[unit.names for unit in units],
            settings=settings,
        )

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, for `finalize_model_grads` to divide by the token count."""
        return bool(getattr(self.config, "calculate_per_token_loss", False))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; `explain` says what fails in it."""
        try:
            return self.module(*inputs, **kwargs)
        except Exception as error:
            raise_explained(error, self)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, backward accumulates on this rank alone: no gradient crosses ranks. Nests; restored on errors."""
        before = self._syncs_gradients
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(before)

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._syncs_gradients = enabled

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts what `finish_grad_sync` completes; a wrapper that overlaps nothing has nothing to start."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """After it, every rank's shard of every gradient is the global one.

        Args:
            force_all_reduce: leave every rank with the whole gradient where the wrapper would have left it a shard;
                as in Megatron-LM, only wrappers that keep whole gradients have such a form.

        Raises:
            ShardstackError: inside `no_sync`, or on a gradient that ``check_for_nan_in_grad`` or
                ``check_for_large_grads`` objects to.
        """
        if not self._syncs_gradients:
            raise ShardstackError("finish_grad_sync was called inside no_sync; leave the context first")
        self._finish_grad_sync(force_all_reduce)
        self._step += 1

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient that the optimizer reads, in whatever shape it has; it may be empty."""
        return local_gradient(parameter)

    @abstractmethod
    def _finish_grad_sync(self, force_all_reduce: bool) -> None: ...

    @abstractmethod
    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient that the optimizer will read by a number or a 0-dim tensor."""

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """After it, every gradient is zero or None."""

    @abstractmethod
    def broadcast_params(self) -> None:
        """After it, all replicas hold data-parallel rank 0's parameters and buffers."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped module's, with the names that it has without a wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Megatron-LM's name for what a checkpoint holds of this model."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies into the wrapped module's parameters and buffers."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def describe(self, format: str = "text", num_microbatches: int = 1) -> str:
        """What the wrapper made of the model, by unit (of FSDP2) or bucket: what a rank keeps, gathers and sends.

        It talks to no other rank: any may call it alone. Bytes are this rank's; what a step sends is the least that
        its collectives can, as in a ring, and of the wrapper alone: neither tensor parallelism nor the optimizer's
        norm is in it.

        Args:
            format: ``text``, a table of 119 columns at most, in which equal layers are one line; or ``html``, a page
                that needs nothing beside itself, with a picture.
            num_microbatches: of a step.

        Raises:
            ConfigError: another format.
        """
        return describe(self._facts(num_microbatches), format)

    @abstractmethod
    def _facts(self, num_microbatches: int) -> ModelFacts: ...

    @abstractmethod
    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this rank holds at this moment: ``parameters``, ``gathered parameters`` and ``gradients``.

        Of these, ``gradients not reduced yet`` are the whole ones that a reduction will free.

        Tensors may share memory, also between categories: it belongs to the first.
        """

    def gradient_receivers(self) -> list[nn.Parameter]:
        """The parameters into whose ``grad`` backward adds at this moment."""
        return list(self.module.parameters())

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and local part of every gradient that the optimizer will read."""
        for name, parameter in unwrap_model(self).named_parameters():
            gradient = self.local_gradient(parameter)
            if gradient is not None:
                yield name, gradient


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient that the optimizer reads: ``main_grad`` where present, else ``grad``."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def unwrap_model(module: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers and `Float16Module`, whose parameter names checkpoints use."""
    while isinstance(module, (_BaseDataParallel, Float16Module)):
        module = module.module
    return module
