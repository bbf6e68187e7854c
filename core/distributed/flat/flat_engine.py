"""The flat engine: gradients, and the parameters that a strategy shards, in buffers that collectives work on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.device import current_device
from ...base.errors import ShardstackError, WrapError
from ...base.memory_categories import Held
from ...base.parameters import without_waiting
from ...comm.collectives import allocator
from ...comm.lane import comm_lane
from ..engine.engine import Engine, Gradients, Parameters
from ..engine.gradients import BucketReduction, UnreadableGradient, is_unreadable
from ..groups import ParameterKind, managed_parameters, twin_group
from ..model.initial_values import InitialValues
from ..plan import Plan
from ..step import Phase, Step
from ..step_marks import replaced_parameters_marked
from .bucket import Bucket
from .buffer import FlatBuffer
from .sharded_parameters import ShardedParameters
from .steps import ReductionSchedule, ShownGradients, shows_main_grad
from .unit import Slot, Unit, build_units
from .whole_parameters import WholeParameters


class FlatEngine(Engine):
    """Backward moves each gradient into its place in a flat bucket, which is reduced in place when it is complete.

    The strategies are settings of it: the plan says where buckets are cut, which memory is kept, and who updates what.
    Parameters are whole (`WholeParameters`: replicated, ZeRO-1, ZeRO-2) or gathered by unit (`ShardedParameters`:
    ZeRO-3).

    Args:
        module, model, state: as of `Gradients`.
        finish: called at the end of each backward outside `no_sync`, with ``finish_in_backward``; a bound method,
            which is not kept alive.

    Attributes:
        units: buckets whose parameters are gathered together, in the plan's order, the root last.
        buckets: all buckets with gradients, in the order in which they leave.
        bucket_at: all buckets, by their place in the buffers of the plan.
        buffers: own all memory of gradients, and of parameters or their shards if a strategy shards.
    """

    gradients: FlatGradients

    def __init__(
        self, plan: Plan, module: nn.Module, model: nn.Module, state: Step, finish: Callable[[], None] | None = None
    ) -> None:
        with replaced_parameters_marked(module):
            start = InitialValues(module, plan.groups, from_first_rank=plan.settings.sync_module_states)
            start.equalize()  # replicas that start different would stay different
            start.allocate(parameters_have_memory=not plan.shards_parameters)
            if not plan.shards_parameters:
                start.fill()
        named_params = dict(model.named_parameters())
        self.buffers: list[FlatBuffer] = []
        self.bucket_at: dict[tuple[int, int], Bucket] = {}
        gradients = FlatGradients(plan, module, model, state)
        self._build(plan, named_params, gradients)
        self.buckets = [self.bucket_at[place] for place in plan.reduction_order]
        # Their slots own the memory that parameters are gathered into.
        on = next((param.device for param in named_params.values()), current_device())
        allocate = allocator(plan.groups.shard, on, registers=plan.settings.nccl_ub)
        self.units = build_units(plan, self.bucket_at, allocate)
        parameters: Parameters
        if plan.shards_parameters:
            parameters = ShardedParameters(
                plan, model, self.units, self.buffers, start, comm_lane(on), self._note_moved, gradients.note_skipped
            )
        else:
            parameters = WholeParameters(plan, module, self.units)
        super().__init__(plan, parameters, gradients)
        # Of each parameter in a bucket, and of those of units that have moved since. `_note_moved` sets both.
        self._names: dict[nn.Parameter, str] = {}
        self.places: dict[nn.Parameter, tuple[int, torch.dtype]] = {}
        self._note_moved((slot.name, slot.param) for bucket in self.buckets for slot in bucket.slots)
        gradients.take_from_backward(self.buckets, parameters, finish)
        parameters.invalidate()

    def _build(self, plan: Plan, named_params: Mapping[str, nn.Parameter], gradients: FlatGradients) -> None:
        """Builds buffers and buckets as planned.

        Where parameters are sharded, gradients are reduced in another group and lane than parameters are gathered in:
        neither waits for the other.
        """
        # All that is trained is on one device (the guard `DenseOnOneDevice`); what is frozen may be elsewhere.
        device = next((param.device for param in named_params.values() if param.requires_grad), current_device())
        has_twins = plan.shards_parameters and plan.num_shards > 1
        lane = comm_lane(device, int(has_twins))
        reduces_over = twin_group(plan.groups.shard) if has_twins else plan.groups.shard
        allocate = allocator(reduces_over, device, registers=plan.settings.nccl_ub)
        reductions = dict[ParameterKind, BucketReduction]()
        for pieces in plan.buffers:
            kind, on = pieces[0].kind, named_params[pieces[0].params[0].name].device
            if kind not in reductions:
                over_ranks = plan.over_ranks_of(kind)
                groups = over_ranks.groups
                if has_twins and kind == "replicated":  # reduced over the ranks that gather others
                    groups = replace(groups, replicate=twin_group(groups.whole))
                elif has_twins:
                    groups = replace(groups, shard=twin_group(groups.shard))
                over_ranks = replace(over_ranks, groups=groups)
                reductions[kind] = BucketReduction(over_ranks, lane, gradients.inspect, gradients.tree)
            buffer = FlatBuffer(plan, pieces, on, allocate)
            self.buffers.append(buffer)
            for piece in pieces:
                self.bucket_at[piece.bucket] = Bucket(buffer, piece, named_params, reductions[kind])  # type: ignore[index]

    def _note_moved(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, param in params:
            self._names[param], self.places[param] = name, (param.data_ptr(), param.dtype)

    def free_gathered(self) -> None:
        self.parameters.settle()
        self.parameters.invalidate()
        for slot in self._slots():
            slot.free()

    def allocate_gathered(self) -> None:
        for slot in self._slots():
            slot.allocate()
        for unit in self.units:
            unit.wait_until_readable()
        self.parameters.invalidate()
        self._note_moved([(name, parameter) for parameter, name in self._names.items()])

    def shards(self) -> list[Tensor]:
        return [bucket.local_param_shard for bucket in self.bucket_at.values()]

    def _slots(self) -> set[Slot]:
        return {unit.slot for unit in self.units if unit.slot is not None}

    def names_of_parameters(self) -> Mapping[nn.Parameter, str]:
        return self._names

    def find_assigned_gradient(self) -> str:
        assigned = self.gradients.shown.find_written()
        return "" if assigned is None else assigned.name

    def prepare_direct_step(self, optimizer: str) -> None:
        if not self.plan.is_replicated:
            raise ShardstackError(
                f"{optimizer} was to step parameters whose gradients {self.plan.caller} shards over ranks: it "
                "would see this rank's part alone; give it to shardstack.optimizer.shard_optimizer(optimizer, model), "
                "or use the sharding strategy 'no_shard'"
            )


class FlatGradients(Gradients):
    """Gradients in flat buckets, and ``param.grad``, which shows them from their reduction to a step.

    It exists before the buckets, which ask it to inspect gradients, and takes them by `take_from_backward`.
    """

    def take_from_backward(
        self, buckets: Sequence[Bucket], parameters: Parameters, finish: Callable[[], None] | None
    ) -> None:
        """Lets backwards bring their gradients to the buckets. Called once, when these are built.

        Args:
            buckets: all with gradients, in the order in which they leave.
            finish: as of `FlatEngine`.
        """
        plan, self._is_sharded = self.plan, not self.plan.is_replicated
        self._buckets, self._parameters = buckets, parameters
        self._places = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
        self._place_of = {slot.param: (bucket, slot) for bucket, slot in self._places}
        # Sends buckets and knows which have left; `_drop` and `reopen` restart it.
        self._schedule = ReductionSchedule(buckets, plan, finish and _weakly(finish, plan.caller), self.tree)
        # Sets ``param.grad`` when gradients are reduced, and clears it after a step.
        self.shown = ShownGradients(self._places, self._is_sharded)
        take = _weakly(self._take, plan.caller)
        for index, (bucket, slot) in enumerate(self._places):
            param: Any = slot.param
            param.has_buffer, param.grad_added_to_main_grad = True, False
            param.register_post_accumulate_grad_hook(partial(take, index))
            if plan.settings.lend_gradients:
                param.lend_gradient_memory = partial(bucket.lend, slot)
            slot.is_written_by_layer = plan.settings.layers_add_gradients
        # The parameters whose gradient `zero` clears; a model that was changed since is refused before a step.
        self._managed = [param for _, param in managed_parameters(self.module)]

    def expect_micro_batches(self, count: int, divides_by_ranks: bool) -> None:
        super().expect_micro_batches(count, divides_by_ranks)
        if self.tree is not None:
            for bucket in self._buckets:
                bucket.buffer.grad_memory.keep_all(self.tree.sets_whole_gradients_aside)

    def _take(self, index: int, param: Any) -> None:
        """Takes a parameter's gradient when autograd has finished it in one backward.

        Args:
            index: of its place. A hook cannot hold the place, which leads to the parameter (`_weakly`).

        Raises:
            ShardstackError: the gradient has a graph.
        """
        if self.plan.settings.finish_in_backward and self._schedule.has_lost_a_backward:
            self._drop()
        gradient: Tensor | None = param.grad
        if type(gradient) is UnreadableGradient:  # it has kept what autograd has added to it
            gradient = vars(gradient).pop("added")
        if gradient is None:
            return
        if gradient.requires_grad:
            raise ShardstackError(
                f"a backward with create_graph=True reached parameters of a {self.plan.caller}, whose buffers "
                "keep no graph of a gradient; take such gradients with torch.autograd.grad(..., create_graph=True)"
            )
        if self.state.phase is not Phase.ACCUMULATING:
            self.state.note_backward(self.reopen)
        param.grad = None
        if self.state.phase is Phase.LATE:  # drop it, so that the next use of gradients raises
            return
        bucket, slot = self._places[index]
        if not bucket.add_gradient(slot, None if param.grad_added_to_main_grad else gradient):
            self.state.enter(Phase.LATE, slot.name)
        param.grad_added_to_main_grad = False
        del gradient  # its memory may serve for what the reduction allocates
        if self._schedule.acts_in_backward:
            self._schedule.note_gradients(bucket, (slot,), self.syncs)

    def note_skipped(self, unit: Unit) -> None:
        """Sends the gradients of a unit that a backward does not reach on this rank."""
        for bucket in unit.buckets:
            if trained := [slot for slot in bucket.slots if slot.param.requires_grad]:
                self._schedule.note_gradients(bucket, trained, self.syncs)

    def start(self) -> None:
        self._schedule.send_all()

    def finish(self) -> None:
        self._parameters.settle()
        if not self.state.is_reduced:
            self.shown.take_written()
        self._schedule.send_all()
        for bucket in self._buckets:
            bucket.finish_grad_sync()
        self.shown.show()

    def gather(self, *, again: bool = False) -> None:
        super().gather(again=again)
        for bucket in self._buckets:
            if bucket.is_whole or not again:
                bucket.gather_grads()

    def reopen(self) -> bool:
        if self._is_sharded or not all(self.adds_exactly(p) for p in self._place_of if shows_main_grad(p)):
            return False
        self._schedule.restart()
        for bucket in self._buckets:
            bucket.open_again([slot for slot in bucket.slots if not shows_main_grad(slot.param)])
        return True

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        place = self._place_of.get(parameter) if self._is_sharded else None
        if place is None:
            return super().of(parameter)
        bucket, slot = place
        if not (bucket.has_reduced and self.shown.has_gradient(parameter)):
            return None
        return bucket.grads.shard_of(slot)

    def tensors(self) -> list[Tensor]:
        return [tensor for bucket in self._buckets for tensor in (bucket.grads.shard, *bucket.grads.accumulators)]

    def free_unused(self) -> None:
        for bucket in self._buckets:
            bucket.buffer.grad_memory.free_kept()

    def note_step(self) -> None:
        self.shown.hide_after_step()

    def _drop(self) -> None:
        self._schedule.give_up()
        for bucket in self._buckets:
            bucket.clear_grads()

    def zero(self) -> None:
        self._parameters.abandon()
        self._drop()
        with without_waiting():
            for parameter in self._managed:
                parameter.grad = None
            for parameter in self._place_of:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def held(self) -> dict[Held, list[Tensor]]:
        memory = [tensor for bucket in self._buckets for tensor in bucket.grads.held()]
        memory += [t for buffer in {bucket.buffer for bucket in self._buckets} for t in buffer.grad_memory.kept]
        grads = [p.grad for p in self.module.parameters() if p.grad is not None and not is_unreadable(p.grad)]
        whole = [b.grads.whole for b in self._buckets if b.grads.releases and b.grads.whole is not None]
        return {"gradients": [*memory, *grads], "gradients not reduced yet": whole}


def _weakly(method: Any, caller: str) -> Callable[..., None]:
    """Returns the bound method without its object, which it does not keep alive. `caller` is the wrapper in messages.

    torch holds hooks after accumulation where the collector does not look: one that leads back to its parameter would
    keep the wrapper, the model and their process groups for as long as the process runs (torch 2.13).

    Raises:
        WrapError: when called, if the object has gone.
    """
    reference, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        owner = reference()
        if owner is None:
            raise WrapError(
                f"a backward reached parameters whose {caller} no longer exists, so that no rank would "
                "reduce their gradients; keep the wrapper for as long as its module trains"
            )
        function(owner, *args)

    return call
