"""The interface of all data-parallel wrappers, so that a training script can swap one for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from ..base.errors import ConfigError, ParallelConfigError, ShardstackError
from ..base.module_protocol import clear_step_sums, rank_dependence, unwrap_model
from ..base.parameters import is_packed
from ..diagnostics import raise_explained
from ..diagnostics.misplaced_parameters import reject_resizing
from ..dist_checkpointing.global_view import FlatRange
from ..dist_checkpointing.model_state import load_model_state_dict, sharded_state_dict
from ..process_groups_config import ProcessGroupCollection
from .distributed_data_parallel_config import DistributedDataParallelConfig, Engine
from .engine.gradient_tree import GradientTree
from .gradient_state import GradientChecks, GradientState
from .groups import LEFT_OUT, Ranks, find_groups, is_summed_later, managed_parameters
from .model import unfit_models
from .model.initial_values import broadcast_buffers, broadcast_tensors
from .model.offloaded_activations import offload_activations
from .model.unit_transforms import hold_packed_weights, leave_out, transform_units
from .plan import GradientReduction, Plan, plan_model
from .plan.unit_choice import UnitChoice
from .report import describe, model_facts
from .verbs import EngineVerbs, own_parameters


class _BaseDataParallel(EngineVerbs):
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
        plan: what the wrapper does. The library reads it instead of `ddp_config`, which is kept for users.
        process_group: the ranks that hold replicas: data-parallel times context-parallel ones.
        gradient_state: the phase of this wrapper's gradients. The wrapper, `finalize_model_grads` and optimizers
            report events to it, and check the phase before they act.
    """

    is_model_wrapper = True

    def __init__(self, config: Any, module: nn.Module, ddp_config: DistributedDataParallelConfig, plan: Plan) -> None:
        super().__init__()
        unfit_models.reject_different_models(plan)
        if plan.transforms:
            transform_units(plan.transforms)
        if plan.shards_parameters and any(map(is_packed, module.parameters())):
            hold_packed_weights(module)
        # These five are the user's and the plan's; nothing replaces them.
        self.config = config
        self.module = module
        self.ddp_config = ddp_config
        self.plan = plan
        self.process_group = plan.groups.whole
        # False inside `no_sync`, which sets and restores it with `_set_gradient_sync`. Each backward reads it.
        self._syncs_gradients = True
        # With ``check_for_large_grads`` remembers the largest norm of each gradient; otherwise without state.
        self._gradient_checks = GradientChecks(plan.check_for_nan_in_grad, plan.check_for_large_grads)
        # Number of steps whose gradients were reduced, for messages. `finish_grad_sync` counts; never reset.
        self._step = 0
        # Parameters that an optimizer of `core.optimizer` updates: each adds its own when it is built. Never cleared.
        self.updated_parameters: set[nn.Parameter] = set()
        self.gradient_state = GradientState()
        # The step's position in its tree, with ``reproducible_across_ranks``; else None. `expect_micro_batches` sets
        # the number of backwards, each backward advances it, `zero_grad_buffer` restarts it.
        self._tree: GradientTree | None = None
        if plan.tree is not None:
            self._tree = GradientTree(plan.tree, 1 if self.sums_gradients else self.process_group.size())

    @classmethod
    def _make_plan(
        cls,
        module: nn.Module,
        model: nn.Module,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        unit_classes: Iterable[UnitChoice] | None,
        ranks: Ranks | None,
        pg_collection: ProcessGroupCollection | None,
        **options: Any,
    ) -> Any:
        """Resolves the groups of ranks and plans a model, which is changed only afterwards.

        Args:
            module: the argument of the constructor.
            model: what is planned: `module`, or the model inside it.
            unit_classes: None means `default_units` of the model.
            options: keyword arguments of `plan_model`.

        Raises:
            WrapError: the model is wrapped already or cannot be wrapped.
            ParallelConfigError: from `plan_model`.
        """
        unfit_models.reject_wrapped(module, (_BaseDataParallel,))
        instances = ddp_config.num_distributed_optimizer_instances
        groups = find_groups(cls.__name__, instances, ranks, pg_collection)
        for parameter in module.parameters():
            vars(parameter).pop(LEFT_OUT, None)  # the mark of an earlier wrapper
        if ddp_config.replicated or ddp_config.ignored:
            shards = cls.engine is not Engine.FLAT_BUFFERS or ddp_config.shards_updates
            groups = leave_out(unwrap_model(module), ddp_config, groups, shards=shards)
        unfit_models.reject_expert_parameters(module, config, groups)
        if ddp_config.reproducible_across_ranks and (dependence := rank_dependence(module)):
            raise ParallelConfigError(f"reproducible_across_ranks is set, and {dependence}")
        unfit_models.reject_unfit(module)
        if cls.engine is Engine.FSDP2:
            unfit_models.reject_unfit_for_fsdp2(module)
        return plan_model(
            model, config, ddp_config, groups, unit_classes, engine=cls.engine, caller=cls.__name__, **options
        )

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, for `finalize_model_grads` to divide by the token count."""
        return self.plan.reduction is GradientReduction.SUM

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. `raise_explained` explains its errors."""
        try:
            return self.module(*inputs, **kwargs)
        except Exception as error:
            raise_explained(error, self)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward accumulate on this rank alone: no gradient crosses ranks. Nests, and is restored on errors."""
        before = self._syncs_gradients
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(before)

    @property
    def syncs_gradients(self) -> bool:
        """Whether a backward may communicate. False inside `no_sync`."""
        return self._syncs_gradients

    require_backward_grad_sync = property(syncs_gradients.fget, lambda self, on: self._set_gradient_sync(bool(on)))  # type: ignore[attr-defined]
    """`syncs_gradients`, by the name of torch's DDP: setting it to False acts as entering `no_sync`, to True as
    leaving it."""

    def expect_micro_batches(self, count: int, *, divides_by_ranks: bool = True) -> None:
        """Sets the number of backwards in each step that follows, for ``reproducible_across_ranks``. The default is 1.

        Args:
            divides_by_ranks: divide summed gradients by the number of ranks, exactly. False: the caller divides each
                loss by it instead. Backward then computes with the same numbers on any number of ranks, which matters
                in fp16, where small numbers underflow.

        Raises:
            ConfigError: `count` is below one, or `divides_by_ranks` is False without ``reproducible_across_ranks``.
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

        With ``reproducible_across_ranks`` a rank has to run the micro-batches with these indices, in this order:
        choose samples and seed dropout by the index.
        """
        rank = self.process_group.rank() // self.plan.context_parallel_size
        if self._tree is None:
            return number * (self.process_group.size() // self.plan.context_parallel_size) + rank
        return self._tree.shape.index(rank, number, self._tree.count)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces gradients over ranks: afterwards every rank has its shard of the global gradient, and with
        ``broadcast_buffers`` rank 0's buffers.

        Args:
            force_all_reduce: leave the whole gradient on every rank, not a shard; as in Megatron-LM, only in wrappers
                whose buffers keep whole gradients.

        Raises:
            ShardstackError: called inside `no_sync`, or a gradient fails ``check_for_nan_in_grad`` or
                ``check_for_large_grads``.
            ParallelConfigError: `force_all_reduce` where whole gradients are released.
        """
        if not self._syncs_gradients:
            raise ShardstackError(
                "finish_grad_sync was called inside no_sync; leave it (or set require_backward_grad_sync)"
            )
        self.recover()
        self.gradient_state.check_may_reduce()
        if self._tree is not None:
            self._tree.check_complete()
        self._finish_grad_sync()
        if self._tree is not None and self._tree.factor != 1.0 and not self.gradient_state.is_reduced:
            self._scale_gradients(self._tree.factor)
        self._share_buffers()
        self.gradient_state.note_reduced()
        self._step += 1
        if force_all_reduce:
            self.gather_gradients()

    def _share_buffers(self) -> None:
        """Makes buffers equal on all ranks. Here and not before a forward, as torch's DDP: an evaluation, on all ranks
        or one, and a checkpoint then see the same, and a forward between others' backwards writes nothing they saved.
        """
        if self.plan.broadcast_buffers:
            broadcast_buffers(self.module, self.process_group)

    sharded_state_dict = sharded_state_dict

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

    def _scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        self.settle_parameters()
        gradients = self._reduced_gradients()
        if gradients and isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.to(gradients[0].device)  # offloaded shards are on the host
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)
        self.gather_gradients(again=True)

    def gather_gradients(self, *, again: bool = False) -> None:
        """Gathers whole gradients from the reduced shards. Every rank calls it.

        Args:
            again: only those that were gathered in this step, after their shards have changed.

        Raises:
            ParallelConfigError: the wrapper releases whole gradients.
        """
        if not again and any(piece.releases_grads for unit in self.plan.units for piece in unit.pieces):
            raise ParallelConfigError(
                f"force_all_reduce asks for whole gradients, which {self.plan.caller} releases with the strategy "
                f"{self.plan.strategy!r}; drop it"
            )

    def zero_grad_buffer(self) -> None:
        """Makes every gradient zero or None. Also recovers from a step that an exception ended."""
        self._zero_gradients()
        if self._tree is not None:
            self._tree.restart()
        clear_step_sums([self.module])
        self.gradient_state.note_zeroed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad_buffer`, by torch's name. Gradients are None or unused memory in both forms."""
        self.zero_grad_buffer()

    def _adds_exactly(self, parameter: nn.Parameter) -> bool:
        """Returns whether a backward may add to the reduced gradient of a parameter, which the next reduction reduces
        again: a mean over as many ranks as are divided by leaves it unchanged, a sum not. FSDP2 reduces what is added
        alone.
        """
        groups = self.plan.groups.of(parameter)
        stages = self.plan.groups.model.embd
        is_mean = self.engine is Engine.FSDP2 or groups.divisor == groups.whole.size()
        return is_mean and not (self.sums_gradients or self._tree is not None or is_summed_later(parameter, stages))

    def check_may_step(self, optimizer: str) -> None:
        """Raises unless an optimizer of `core.optimizer` may read this wrapper's gradients.

        Args:
            optimizer: the optimizer's name, for the message.

        Raises:
            ShardstackError: gradients were not reduced, or are invalid.
        """
        self.recover()
        self.gradient_state.check_may_step(optimizer)

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch, which reads ``param.grad`` and writes the parameters, may step.

        Raises:
            ShardstackError: as `check_may_step`; or ``param.grad`` is not the gradient that an optimizer has to read.
        """
        self.check_may_step(optimizer)

    def broadcast_params(self) -> None:
        """Broadcasts data-parallel rank 0's parameters and buffers to all replicas.

        A shard is sent to its replicas across optimizer instances. Within an instance it exists once, and is not sent:
        replicas that started different were made equal before they were cut (``sync_module_states``).
        """
        self.settle_parameters()
        broadcast_tensors(self.module.buffers(), self.process_group)
        for _, parameter in managed_parameters(self.module):
            groups = self.plan.groups.of(parameter)
            replicas = groups.replicate if self.plan.shards_parameters else groups.whole
            if replicas is not None:
                broadcast_tensors([self.shard(parameter)], replicas)

    def _finish_construction(self) -> None:
        """Lets optimizers find the wrapper of their parameters, and puts the last hooks around units."""
        if self.plan.transforms:
            offload_activations(self.plan.transforms)
        reject_resizing(self.module)
        own_parameters((parameter for _, parameter in managed_parameters(self.module)), self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardstackError(
            f"{type(self).__name__} cannot be copied or pickled (copy.deepcopy, torch.save): it holds process groups. "
            "Save its state_dict(), or whole checkpoints with core.dist_checkpointing; copy or save the model inside, "
            "its .module"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the wrapped module's state dict, under the names of the unwrapped module."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the module's state dict for a checkpoint, by Megatron-LM's name."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies into the module's parameters and buffers. Every rank calls it.

        `TorchFullyShardedDataParallel` has its own, which loads nothing.

        Args:
            state_dict: whole tensors, as those of a plain module; or this rank's parts, as `load_model_state_dict`
                takes them. The module's own tensors, which a checkpoint loader has filled in place, stay as they are.

        Raises:
            ParallelConfigError: `assign` where parameters are sharded, which would replace them.
            CheckpointError: of `load_model_state_dict`, before anything is written.
        """
        if assign and self.plan.shards_parameters:
            raise ParallelConfigError(
                "load_state_dict was called with assign=True, which replaces the parameters that are views of the "
                "wrapper's memory; leave it out"
            )
        if any(isinstance(value, FlatRange) for value in state_dict.values()):
            return load_model_state_dict(self.module, state_dict, strict, process_group=self.process_group)
        with self.whole_parameters():
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def describe(self, format: str = "text", num_microbatches: int = 1) -> str:
        """Describes the wrapped model by unit (of FSDP2) or bucket: what a rank keeps, gathers and sends.

        No communication: a rank may call it alone. Bytes are this rank's. The bytes that a step sends are the minimum
        for its collectives, as in a ring algorithm. They include only the wrapper's collectives, not those of tensor
        parallelism or of the gradient norm.

        Args:
            format: ``text``, a table of at most 119 columns in which equal layers share a line; or ``html``, a page in
                one file, in which bars show bytes.
            num_microbatches: micro-batches in a step.

        Raises:
            ConfigError: an unknown format.
        """
        return describe(model_facts(self.plan, self.module, num_microbatches), format)


def check_chunks(model: Any, function: str, kind: type[nn.Module] = nn.Module) -> list[nn.Module]:
    """Returns the modules of an argument that takes a list of them.

    Raises:
        ConfigError: it is one module, empty, or holds anything else: parameters, groups of them, modules not wrapped.
    """
    is_module = isinstance(model, nn.Module)  # a Sequential would pass for a list of its layers
    chunks = [] if is_module or not isinstance(model, Iterable) else list(model)
    strangers = [chunk for chunk in chunks if not isinstance(chunk, kind)] if chunks else [model]
    if strangers:
        raise ConfigError(
            f"{function} takes a list of wrapped models, [model] for a single one, and not parameters; it was given "
            f"{'' if strangers[0] is model else 'a list with '}a {type(strangers[0]).__name__}"
        )
    return chunks
