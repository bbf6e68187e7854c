"""The interface of all data-parallel wrappers, so that a training script can swap one for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..base.errors import ConfigError, ShardstackError
from ..base.module_protocol import counting_modules, tensor_parallel_groups, unwrap_model
from ..base.parameters import is_packed
from ..process_groups_config import ProcessGroupCollection
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .engine.engine import Engine, own_parameters
from .groups import LEFT_OUT, Ranks, find_groups, managed_parameters
from .guards import GUARDS, Guard, PlainModel, reject_wrapped
from .model.offloaded_activations import offload_activations
from .model.unit_transforms import hold_packed_weights, leave_out, transform_units
from .plan import plan_model
from .plan.settings import own_settings
from .plan.units import UnitChoice
from .released_memory import Part, ReleasedMemory
from .step import Call, Phase, Step
from .wrapped_parameters import _WrappedParameters


class _BaseDataParallel(_WrappedParameters):
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
        ddp_config: the wrapper's settings, of this library or of Megatron-LM.
        module: the model, wrapped in place.
        unit_classes: classes of units, or single modules. None means `default_units` of the model.
        ranks, pg_collection: the ranks that hold replicas, as in the wrappers' `process_group` and `pg_collection`.
        guards: guarantees of this wrapper alone, in addition to `GUARDS`.
        disable_bucketing, finish_in_backward, mp_policy: of `plan_model`.

    Raises:
        WrapError: the model is wrapped already or cannot be wrapped.
        ParallelConfigError: a setting that this wrapper, the model or these ranks cannot have.

    Attributes:
        plan: what the wrapper does. The library reads it instead of `ddp_config`, which is kept for users.
        engine: holds the parameters and gradients. Optimizers, checkpoints and reports use it.
        process_group: the ranks that hold replicas: data-parallel times context-parallel ones.
        guards: what every step is checked by, besides the model at its wrapping.
        step: the order of calls. The wrapper, `finalize_model_grads` and optimizers check it before they act, and
            report what they have done to gradients.
    """

    is_model_wrapper = True

    engine_kind: ClassVar[EngineKind]
    """The kind of `engine`. Each class sets it, and a model is planned for it."""

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        unit_classes: Iterable[UnitChoice] | None,
        ranks: Ranks | None,
        pg_collection: ProcessGroupCollection | None,
        *,
        guards: Iterable[Guard] = (),
        disable_bucketing: bool = False,
        finish_in_backward: bool = False,
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        super().__init__()
        kind = self.engine_kind
        reject_wrapped(module, (_BaseDataParallel,))  # before anything is read of it: marks would be another wrapper's
        ddp_config = own_settings(ddp_config, kind)
        instances = ddp_config.num_distributed_optimizer_instances
        groups = find_groups(type(self).__name__, instances, ranks, pg_collection, config)
        for parameter in module.parameters():
            vars(parameter).pop(LEFT_OUT, None)  # the mark of an earlier wrapper
        if ddp_config.replicated or ddp_config.ignored:
            shards = kind is not EngineKind.FLAT_BUFFERS or ddp_config.shards_updates
            groups = leave_out(unwrap_model(module), ddp_config, groups, shards=shards)
        self.guards = [*guards, *(guard() for guard in GUARDS)]
        self.step = Step()
        for guard in self.guards:
            guard.at_wrap(PlainModel(module, config, ddp_config, groups, kind))
        self.plan = plan_model(
            module if kind is EngineKind.FSDP2 else unwrap_model(module),
            config,
            ddp_config,
            groups,
            unit_classes,
            engine=kind,
            caller=type(self).__name__,
            disable_bucketing=disable_bucketing,
            finish_in_backward=finish_in_backward,
            mp_policy=mp_policy,
        )
        for guard in self.guards:
            guard.at_plan(self.plan, self.step)
        if self.plan.transforms:
            transform_units(self.plan.transforms)
        if self.plan.shards_parameters and any(map(is_packed, module.parameters())):
            hold_packed_weights(module)
        self.config, self.module, self.ddp_config = config, module, ddp_config
        self.process_group = groups.whole
        # Parameters that an optimizer of `shardstack.optimizer` updates: each adds its own when it is built.
        self.updated_parameters: set[nn.Parameter] = set()
        # The optimizers of `shardstack.optimizer` over this model: each adds itself when it is built. And those of
        # them that have stepped since gradients were zeroed: `zero_grad_buffer` clears them.
        self.optimizers: WeakSet[Any] = WeakSet()
        self.stepped_optimizers: WeakSet[Any] = WeakSet()
        # What the model has of `CountsInStep`, and the groups of its layers. Each step uses them, because looking for
        # them takes long.
        self.counting_modules, self.tensor_parallel_groups = counting_modules(module), tensor_parallel_groups(module)

    def _set_engine(self, engine: Engine, *, lives_with_module: bool = False) -> None:
        """Takes the engine, lets optimizers find it at its parameters, and puts the last hooks around units.

        Constructors call it once.

        Args:
            lives_with_module: the module's hooks keep the engine, which then keeps the wrapper: optimizers of the
                module's parameters go on being checked when only the module is left.
        """
        self.engine = engine
        engine.wrapper = self if lives_with_module else None
        # Bound to guards, which know no wrapper: autograd's hooks hold the engine, and must not hold the wrapper.
        engine.gradients.inspections = tuple(
            guard.on_gradients for guard in self.guards if type(guard).on_gradients is not Guard.on_gradients
        )
        for guard in self.guards:
            guard.once_wrapped(self.module, engine)
        if self.plan.transforms:
            offload_activations(self.plan.transforms)
        own_parameters((parameter for _, parameter in managed_parameters(self.module)), self)
        # What is released at the moment. `release` and `restore` alone change it.
        self._released = ReleasedMemory(self.module, engine, self.step, self.optimizers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. `raise_explained` explains its errors."""
        try:
            return self.module(*inputs, **kwargs)
        except Exception as error:
            from ..diagnostics import raise_explained  # after a failure alone: the library is read without it

            raise_explained(error, self)
            raise

    def check_step(self, optimizer: str, *, is_torchs: bool = False) -> None:
        """Raises unless an optimizer may read the gradients and write the parameters.

        Args:
            optimizer: its name, for messages.
            is_torchs: it reads ``param.grad``, and is no optimizer of `shardstack.optimizer`.

        Raises:
            ShardstackError: of a guard, whose guarantee does not hold.
        """
        self.engine.gradients.recover()
        if is_torchs:
            self.engine.prepare_direct_step(optimizer)
        for guard in self.guards:
            guard.before_step(self.engine, optimizer, is_torchs=is_torchs)

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
        engine, gradients, tree = self.engine, self.engine.gradients, self.engine.gradients.tree
        if not gradients.syncs:
            raise ShardstackError(
                "finish_grad_sync was called inside no_sync; leave it (or set require_backward_grad_sync)"
            )
        gradients.recover()
        self.step.check(Call.REDUCE)
        if tree is not None:
            tree.check_complete()
        for guard in self.guards:
            guard.before_reduction(engine)
        try:
            gradients.finish()
        except RuntimeError:
            for guard in self.guards:
                guard.on_failure(engine)
            raise
        if tree is not None and tree.factor != 1.0 and not self.step.is_reduced:
            _scale(engine, tree.factor)
        engine.share_buffers()
        self.step.enter(Phase.REDUCED)
        if force_all_reduce:
            gradients.gather()

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reduction that `finish_grad_sync` completes. Does nothing in a wrapper that does not overlap."""
        self.engine.gradients.start()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient that the optimizer will read by a number or a 0-dim tensor.

        Raises:
            ShardstackError: gradients have not been reduced, by `finish_grad_sync`.
        """
        self.step.check(Call.SCALE)
        _scale(self.engine, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Makes every gradient zero or None. Also recovers from a step that an exception ended."""
        self.step.reject_released("zero_grad_buffer()", "model", "gradients")
        self.engine.gradients.zero()
        if self.engine.gradients.tree is not None:
            self.engine.gradients.tree.restart()
        for module in self.counting_modules:
            module.clear_step_sums()
        self.step.enter(Phase.ZEROED)
        self.stepped_optimizers.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad_buffer`, by torch's name. Gradients are None or unused memory in both forms."""
        self.zero_grad_buffer()

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        self.step.reject_released("local_gradient()", "model", "gradients")
        return self.engine.gradients.of(parameter)

    def release(self, *what: Part, folder: str | None = None) -> int:
        """Frees memory while other work runs on the device, as a server that generates, until `restore`.

        Values are copied to pinned memory of the host, on a CPU into a file. What can be made again is dropped:
        gathered parameters, gradients that are zeroed. Ranks need not call it together. What uses a released part
        raises: a forward, a step, a checkpoint, a parameter itself. A part that is released already stays so.

        Args:
            what: ``"model"``: parameters and buffers; ``"optimizer"``: moments, fp32 masters and averages of each
                optimizer of the model; ``"gradients"``. All by default.
            folder: of the file, for a GPU too: the values then take no memory of the host.

        Returns:
            The bytes that were freed on this rank, gathered parameters not counted.

        Raises:
            ConfigError: a part that does not exist, or ``nccl_ub``, which registers the memory.
            ShardstackError: gradients in mid-step, or a folder that cannot be written to. Nothing is released.
        """
        return self._released.release(what, folder)

    def restore(self, *what: Part) -> None:
        """Brings back what `release` has freed, with the same bits. All of it by default.

        Raises:
            ConfigError: a part that does not exist.
            RuntimeError: of torch, without memory for it. Once there is, call it again.
        """
        self._released.restore(what)


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


def _scale(engine: Engine, factor: float | torch.Tensor) -> None:
    """Multiplies this rank's reduced gradients, and whole ones that were gathered from them."""
    engine.parameters.settle()
    gradients = engine.gradients.tensors()
    if gradients and isinstance(factor, torch.Tensor):
        factor = factor.to(gradients[0].device)  # offloaded shards are on the host
    if gradients:
        torch._foreach_mul_(gradients, factor)
    engine.gradients.gather(again=True)
