"""The contract that every data-parallel wrapper keeps, so that a training script can swap one for another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from ..absent_names import MODEL_STATE_DICT, absent_method
from ..diagnostics import raise_explained
from ..errors import ConfigError, ShardstackError
from ..transformer.module import Float16Module
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .gradient_state import GradientState, Phase
from .gradient_tree import GradientTree
from .model.expert_parameters import reject_expert_parameters
from .model.gradient_checks import GradientChecks
from .model.rewrapping import reject_wrapped
from .parameter_owner import local_gradient, own_parameters
from .plan import GradientReduction, ShardingPlan
from .report import describe, model_facts


class _BaseDataParallel(nn.Module, ABC):
    """A module whose gradients are made global over a data-parallel group.

    The rule that every wrapper keeps: **what works on a plain module in one process either gives that result, or
    raises at once and says what to do.** `docs/contract.md` lists what does which.

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
        plan: what `ddp_config` means for this model on these ranks.

    Attributes:
        plan: as given; the library reads this in place of `ddp_config`, which is kept for users.
        process_group: the ranks that hold replicas; data parallel times context parallel.
        gradient_state: the phase of this wrapper's gradients. The wrapper, `finalize_model_grads` and optimizers
            report events to it, and ask it whether they may act.
    """

    checks_placement = False  # whether `check_may_step` raises where a parameter is no longer what was wrapped

    def __init__(
        self, config: Any, module: nn.Module, ddp_config: DistributedDataParallelConfig, plan: ShardingPlan
    ) -> None:
        super().__init__()
        self.config = config
        self.module = module
        self.ddp_config = ddp_config
        self.plan = plan
        self.process_group = plan.groups.whole
        # False inside `no_sync`, which sets and restores it by `_set_gradient_sync`; read in each backward.
        self._syncs_gradients = True
        # Remembers the largest norm of each gradient, with ``check_for_large_grads``; otherwise without state.
        self._gradient_checks = GradientChecks(plan.checks_for_nan, plan.checks_for_large)
        # Steps whose gradients were reduced, for messages. Counted by `finish_grad_sync`, never reset.
        self._step = 0
        self.gradient_state = GradientState()
        # Where a backward is in the tree of a step, with ``reproducible_across_ranks``; else None.
        # `expect_micro_batches` configures it, each backward moves it on, `zero_grad_buffer` restarts it.
        self._tree: GradientTree | None = None
        if plan.tree is not None:
            self._tree = GradientTree(plan.tree, 1 if self.sums_gradients else self.process_group.size())

    @staticmethod
    def _reject_unwrappable(module: nn.Module, config: Any) -> None:
        """Raises on a model that is wrapped already, or has experts; to be called before it is planned."""
        reject_wrapped(module, (_BaseDataParallel,))
        reject_expert_parameters(module, config)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, for `finalize_model_grads` to divide by the token count."""
        return self.plan.reduction is GradientReduction.SUM

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; `raise_explained` explains its errors."""
        try:
            return self.module(*inputs, **kwargs)
        except Exception as error:
            raise_explained(error, self)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward accumulate on this rank alone: no gradient crosses ranks. Nests; restored on errors."""
        before = self._syncs_gradients
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(before)

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._syncs_gradients = enabled

    def expect_micro_batches(self, count: int, *, divides_by_ranks: bool = True) -> None:
        """Sets how many backwards each step that follows has; read with ``reproducible_across_ranks``, where 1 is
        the default.

        Args:
            divides_by_ranks: gradients are divided by the number of ranks when they are summed, exactly. False: each
                loss is divided by it instead, so that backward computes with the same numbers on any number of ranks,
                which matters where small ones vanish, in fp16.

        Raises:
            ConfigError: no positive number; or losses divided by ranks, and no ``reproducible_across_ranks``.
            ShardstackError: a step has begun.
        """
        if self._tree is not None:
            self._tree.expect(count, divides_by_ranks)
        elif not divides_by_ranks:
            raise ConfigError(
                "expect_micro_batches was given divides_by_ranks=False without reproducible_across_ranks, where "
                "gradients are averaged over ranks in any case; leave it out"
            )

    def micro_batch_index(self, number: int) -> int:
        """Returns the index, in the global batch, of this rank's micro-batch `number`, which counts from 0.

        With ``reproducible_across_ranks`` a rank has to run the micro-batches of these indices, in this order: choose
        samples by it, and seed dropout.
        """
        rank = self.process_group.rank() // self.plan.context_parallel_size
        if self._tree is None:
            return number * (self.process_group.size() // self.plan.context_parallel_size) + rank
        return self._tree.shape.index(rank, number, self._tree.count)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts what `finish_grad_sync` completes; a wrapper that overlaps nothing has nothing to start."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Makes every rank's shard of every gradient the global one.

        Args:
            force_all_reduce: leave every rank with the whole gradient where the wrapper would have left it a shard;
                as in Megatron-LM, only wrappers that keep whole gradients have such a form.

        Raises:
            ShardstackError: inside `no_sync`, or on a gradient that ``check_for_nan_in_grad`` or
                ``check_for_large_grads`` objects to.
        """
        if not self._syncs_gradients:
            raise ShardstackError("finish_grad_sync was called inside no_sync; leave the context first")
        self._look_for_failures()
        self.gradient_state.check_may_reduce()
        if self._tree is not None:
            self._tree.check_complete()
        self._finish_grad_sync(force_all_reduce)
        self.gradient_state.note_reduced()
        self._step += 1

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads; it may be empty."""
        return local_gradient(parameter)

    sharded_state_dict = absent_method("sharded_state_dict", MODEL_STATE_DICT)

    @abstractmethod
    def _finish_grad_sync(self, force_all_reduce: bool) -> None: ...

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient that the optimizer will read by a number or a 0-dim tensor.

        Raises:
            ShardstackError: gradients have not been reduced, by `finish_grad_sync`.
        """
        if not self.gradient_state.is_reduced:
            raise ShardstackError(
                f"scale_gradients was called while gradients are {self.gradient_state.phase.value}; call "
                "finish_grad_sync first"
            )
        self._scale_gradients(scaling_factor)

    @abstractmethod
    def _scale_gradients(self, scaling_factor: float | torch.Tensor) -> None: ...

    def zero_grad_buffer(self) -> None:
        """Makes every gradient zero or None, and drops what an exception left of a step."""
        self._zero_gradients()
        if self._tree is not None:
            self._tree.restart()
        self.gradient_state.note_zeroed()

    @abstractmethod
    def _zero_gradients(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad_buffer`, by torch's name; gradients are None or unused memory in both forms."""
        self.zero_grad_buffer()

    def note_backward(self) -> None:
        """Records in `gradient_state` that a backward began; called when its first gradient arrives."""
        state = self.gradient_state
        if state.phase is Phase.ZEROED:
            state.note_backward(may_add=True)
        elif state.is_reduced:
            state.note_backward(may_add=self._open_reduced_gradients())
        elif state.phase is Phase.UNSCALED:
            state.note_backward(may_add=False)

    @abstractmethod
    def _open_reduced_gradients(self) -> bool:
        """Lets a backward add to gradients that were reduced, as it would to those of a plain module.

        Where the user has set them to None since, the backward starts from zero.

        Returns:
            False where that is impossible: what is added is then dropped, and the next use of gradients raises.
        """

    @property
    def _adds_exactly(self) -> bool:
        """Whether reducing again leaves what was reduced as it is: a mean of equal values does, a sum does not."""
        marked = (getattr(parameter, "sequence_parallel", False) for parameter in self.module.parameters())
        return not self.sums_gradients and self._tree is None and not any(marked)

    def check_may_step(self, optimizer: str) -> None:
        """Raises unless an optimizer of `core.optimizer` may read this wrapper's gradients.

        Args:
            optimizer: its name, for the message.

        Raises:
            ShardstackError: they were not reduced, or are useless.
        """
        self._look_for_failures()
        self.gradient_state.check_may_step(optimizer)

    def _look_for_failures(self) -> None:
        """Notes in `gradient_state` a backward that raised, where that left something begun."""

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may step: it reads ``param.grad`` and writes the parameters.

        Raises:
            ShardstackError: as `check_may_step`; or ``param.grad`` is not all that an optimizer has to read.
        """
        self.check_may_step(optimizer)

    @abstractmethod
    def settle_parameters(self) -> None:
        """Makes `module` show the parameters that an optimizer has to update; outside of a forward."""

    @abstractmethod
    def note_step(self) -> None:
        """Drops what was gathered; called when an optimizer has written the parameters."""

    @abstractmethod
    def broadcast_params(self) -> None:
        """Gives all replicas data-parallel rank 0's parameters and buffers."""

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Lets any function of a tensor read and write parameters; what is written counts.

        Every rank enters it, outside of a forward and a backward, and writes the same. Wrappers whose parameters are
        always whole, or DTensors, have nothing to do.
        """
        self.settle_parameters()
        yield

    def _own_parameters(self) -> None:
        """Lets optimizers find the wrapper of their parameters; called at the end of a constructor."""
        own_parameters(self.module.parameters(), self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardstackError(
            f"{type(self).__name__} cannot be copied or pickled (copy.deepcopy, torch.save): it holds process groups. "
            "Save its state_dict(), or whole checkpoints with core.dist_checkpointing; copy or save the model inside, "
            "its .module"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the wrapped module's, with the names that it has without a wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the state of a checkpoint, by Megatron-LM's name."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies into the wrapped module's parameters and buffers."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def describe(self, format: str = "text", num_microbatches: int = 1) -> str:
        """Describes the wrapped model by unit (of FSDP2) or bucket: what a rank keeps, gathers and sends.

        It talks to no other rank: any may call it alone. Bytes are this rank's; what a step sends is the least that
        its collectives can, as in a ring, and of the wrapper alone: neither tensor parallelism nor the optimizer's
        norm is in it.

        Args:
            format: ``text``, a table of 119 columns at most, in which equal layers are one line; or ``html``, a page
                in one file, with a picture.
            num_microbatches: of a step.

        Raises:
            ConfigError: another format.
        """
        return describe(model_facts(self.plan, self.module, num_microbatches), format)

    @abstractmethod
    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns what this rank holds at this moment: ``parameters``, ``gathered parameters`` and ``gradients``.

        Of these, ``gradients not reduced yet`` are the whole ones that a reduction will free.

        Tensors may share memory, also between categories: it belongs to the first.
        """

    def gradient_receivers(self) -> list[nn.Parameter]:
        """Returns the parameters into whose ``grad`` backward adds at this moment."""
        return list(self.module.parameters())


def unwrap_model(module: nn.Module) -> nn.Module:
    """Returns the model inside data-parallel wrappers and `Float16Module`, whose parameter names checkpoints use."""
    while isinstance(module, (_BaseDataParallel, Float16Module)):
        module = module.module
    return module
