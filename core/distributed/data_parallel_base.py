"""The interface of all data-parallel wrappers, so that a training script can swap one for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..base.errors import ConfigError, ParallelConfigError, ShardstackError
from ..base.module_protocol import counting_modules, rank_dependence, unwrap_model
from ..base.parameters import is_packed
from ..diagnostics import raise_explained
from ..diagnostics.misplaced_parameters import reject_resizing
from ..dist_checkpointing.global_view import FlatRange
from ..dist_checkpointing.model_state import load_model_state_dict, sharded_state_dict
from ..process_groups_config import ProcessGroupCollection
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .engine.engine import Engine, WrappedModel, own_parameters
from .gradient_state import GradientState
from .groups import LEFT_OUT, Ranks, find_groups, managed_parameters
from .model import unfit_models
from .model.initial_values import broadcast_tensors
from .model.offloaded_activations import offload_activations
from .model.unit_transforms import hold_packed_weights, leave_out, transform_units
from .plan import Plan, plan_model
from .plan.units import UnitChoice
from .report import describe, model_facts


class _BaseDataParallel(WrappedModel):
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
        engine: holds the parameters and gradients. Optimizers, checkpoints and reports use it.
        process_group: the ranks that hold replicas: data-parallel times context-parallel ones.
        gradient_state: the phase of this wrapper's gradients. The wrapper, `finalize_model_grads` and optimizers
            report events to it, and check the phase before they act.
    """

    is_model_wrapper = True

    engine_kind: ClassVar[EngineKind]
    """The kind of `engine`. Fixed by each class, and read when a model is planned."""

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
        # Parameters that an optimizer of `core.optimizer` updates: each adds its own when it is built. Never cleared.
        self.updated_parameters: set[nn.Parameter] = set()
        self.gradient_state = GradientState()
        # What the model has of `CountsInStep`; fixed. Steps use it, because looking for them takes long.
        self.counting_modules = counting_modules(module)

    def _set_engine(self, engine: Engine, *, lives_with_module: bool = False) -> None:
        """Takes the engine, lets optimizers find it at its parameters, and puts the last hooks around units.

        Constructors call it once.

        Args:
            lives_with_module: the module's hooks keep the engine, which then keeps the wrapper: optimizers of the
                module's parameters go on being checked when only the module is left.
        """
        self.engine = engine
        engine.wrapper = self if lives_with_module else None
        if self.plan.transforms:
            offload_activations(self.plan.transforms)
        reject_resizing(self.module)
        own_parameters((parameter for _, parameter in managed_parameters(self.module)), self)

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
        *,
        disable_bucketing: bool = False,
        finish_in_backward: bool = False,
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> Plan:
        """Resolves the groups of ranks and plans a model, which is changed only afterwards.

        Args:
            module: the argument of the constructor.
            model: what is planned: `module`, or the model inside it.
            unit_classes: None means `default_units` of the model.
            disable_bucketing, finish_in_backward, mp_policy: of `plan_model`.

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
            shards = cls.engine_kind is not EngineKind.FLAT_BUFFERS or ddp_config.shards_updates
            groups = leave_out(unwrap_model(module), ddp_config, groups, shards=shards)
        unfit_models.reject_expert_parameters(module, config, groups)
        if ddp_config.reproducible_across_ranks and (dependence := rank_dependence(module)):
            raise ParallelConfigError(f"reproducible_across_ranks is set, and {dependence}")
        unfit_models.reject_unfit(module)
        if cls.engine_kind is EngineKind.FSDP2:
            unfit_models.reject_unfit_for_fsdp2(module)
        return plan_model(
            model,
            config,
            ddp_config,
            groups,
            unit_classes,
            engine=cls.engine_kind,
            caller=cls.__name__,
            disable_bucketing=disable_bucketing,
            finish_in_backward=finish_in_backward,
            mp_policy=mp_policy,
        )

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, for `finalize_model_grads` to divide by the token count."""
        return self.plan.sums_gradients

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
        gradients = self.engine.gradients
        before = gradients.syncs
        gradients.set_sync(False)
        try:
            yield
        finally:
            gradients.set_sync(before)

    @property
    def syncs_gradients(self) -> bool:
        """Whether a backward may communicate. False inside `no_sync`."""
        return self.engine.gradients.syncs

    require_backward_grad_sync = property(
        syncs_gradients.fget,  # type: ignore[attr-defined]
        lambda self, on: self.engine.gradients.set_sync(bool(on)),
    )
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
        self.engine.gradients.expect_micro_batches(count, divides_by_ranks)
        if self.engine.gradients.tree is None and not divides_by_ranks:
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
        tree = self.engine.gradients.tree
        if tree is None:
            return number * (self.process_group.size() // self.plan.context_parallel_size) + rank
        return tree.shape.index(rank, number, tree.count)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces gradients over ranks: afterwards every rank has its shard of the global gradient, and with
        ``broadcast_buffers`` rank 0's buffers.

        Args:
            force_all_reduce: leave the whole gradient on every rank, not a shard; as in Megatron-LM, only in wrappers
                whose buffers keep whole gradients.

        Raises:
            ShardstackError: called inside `no_sync`, or a gradient fails ``check_for_nan_in_grad``.
            ParallelConfigError: `force_all_reduce` where whole gradients are released.
        """
        gradients, tree = self.engine.gradients, self.engine.gradients.tree
        if not gradients.syncs:
            raise ShardstackError(
                "finish_grad_sync was called inside no_sync; leave it (or set require_backward_grad_sync)"
            )
        gradients.recover()
        self.gradient_state.check_may_reduce()
        if tree is not None:
            tree.check_complete()
        gradients.finish()
        if tree is not None and tree.factor != 1.0 and not self.gradient_state.is_reduced:
            self._scale_gradients(tree.factor)
        self.engine.share_buffers()
        self.gradient_state.note_reduced()
        gradients.num_steps += 1
        if force_all_reduce:
            gradients.gather()

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reduction that `finish_grad_sync` completes. Does nothing in a wrapper that does not overlap."""
        self.engine.gradients.start()

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
        self.engine.parameters.settle()
        gradients = self.engine.gradients.tensors()
        if gradients and isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.to(gradients[0].device)  # offloaded shards are on the host
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)
        self.engine.gradients.gather(again=True)

    def zero_grad_buffer(self) -> None:
        """Makes every gradient zero or None. Also recovers from a step that an exception ended."""
        self.engine.gradients.zero()
        if self.engine.gradients.tree is not None:
            self.engine.gradients.tree.restart()
        for module in self.counting_modules:
            module.clear_step_sums()
        self.gradient_state.note_zeroed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad_buffer`, by torch's name. Gradients are None or unused memory in both forms."""
        self.zero_grad_buffer()

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        return self.engine.gradients.of(parameter)

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Does nothing in wrappers
        whose parameters are always whole, or are DTensors.
        """
        with self.engine.parameters.whole():
            yield

    def broadcast_params(self) -> None:
        """Broadcasts data-parallel rank 0's parameters and buffers to all replicas.

        A shard is sent to its replicas across optimizer instances. Within an instance it exists once, and is not sent:
        replicas that started different were made equal before they were cut (``sync_module_states``).
        """
        self.engine.parameters.settle()
        broadcast_tensors(self.module.buffers(), self.process_group)
        for _, parameter in managed_parameters(self.module):
            groups = self.plan.groups.of(parameter)
            replicas = groups.replicate if self.plan.shards_parameters else groups.whole
            if replicas is not None:
                broadcast_tensors([self.engine.parameters.shard(parameter)], replicas)
        self.engine.parameters.invalidate()

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
