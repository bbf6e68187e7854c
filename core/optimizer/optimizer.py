"""The optimizer of a model under any data-parallel wrapper: one global norm, one update, one state layout.

The device decides the outcome of a step, and the host learns it later.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import OptimizerError
from ..base.module_protocol import ModelContents, unwrap_model
from ..distributed import _BaseDataParallel, finalize_model_grads
from ..distributed.engine.engine import owner_of
from ..distributed.step import Phase
from ..distributed.step_marks import note_own_optimizer
from ..process_groups_config import ProcessGroupCollection
from .clip_grads import GradientStatistics, gradient_factor, multiply_gradients
from .grad_scaler import DynamicGradScaler, GradScaler, PendingOutcome, StepOutcome
from .main_params import MainParam, WrittenParams, low_precision_weights, refresh_parameters
from .main_ranges import find_main_params
from .optimizer_config import OptimizerConfig
from .optimizer_state import OptimizerState
from .update_rules import MASTER, SkippableRule

if TYPE_CHECKING:
    from .torch_rule import UpdateRule


class MegatronOptimizer(OptimizerState):
    """Updates a model's parameters from the gradients that its data-parallel wrapper has reduced.

    The protocol of a step, in the order of :meth:`step`; every rank of the model takes part in all phases::

        gather and check   each gradient's local part, ``main_grad`` where present, else ``grad``; the global norm
        clip               the factor of gradients: 1 / loss scale, times the clip coefficient
        update             each rank updates its own shards, and multiplies gradients as it reads them
        publish            parameters in low precision are refreshed from masters; ranks that share a parameter's
                           update exchange the updated shards (only in :class:`DistributedOptimizer`)

    A step writes to no gradient, unless it runs a torch optimizer (`shard_optimizer`), whose gradients are multiplied
    in place, as by torch's `clip_grad_norm_`.

    Call `finalize_model_grads` before the step; otherwise the step raises. Parameters without a gradient are not
    updated, as in torch: under a wrapper these are the frozen ones. If other code has written to parameters in low
    precision since the last step, their masters take the written values first.
    A gradient that is not finite on any rank makes every rank skip the step, in any precision: parameters, moments and
    step counts stay unchanged. (Megatron-LM skips only with a loss scale. Without one its weights become NaN, unless
    its wrapper's ``check_for_nan_in_grad`` stops the run.)

    `param_groups` hold the tensors that are updated; a scheduler sets their ``lr`` and ``weight_decay``.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        params: Sequence[MainParam],
        rule: UpdateRule,
        statistics: GradientStatistics,
        grad_scaler: GradScaler | None,
        model_chunks: Sequence[nn.Module] = (),
        *,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, params, rule, grad_scaler, groups)
        note_own_optimizer(rule.optimizer, self)
        self._statistics = statistics
        self._chunks = model_chunks
        self._wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
        self._note_params()
        # The outcome of the last step, while the device may still compute it. `start_step` sets it; `conclude` clears
        # it, and so does `_start_reduced` if the rule raised.
        self._pending: PendingOutcome | None = None
        # The caller's function for the outcome of `_pending`; None if none was given. Set and cleared with `_pending`.
        self._on_outcome: Callable[[StepOutcome], None] | None = None
        # Whether a step was started and `finish_step` was not called since. `start_step` sets it, `finish_step` clears
        # it.
        self._has_unfinished_step = False

    def _note_params(self) -> None:
        """Derives what depends on which parameters are updated: at construction, and when a group is added."""
        for wrapper in self._wrappers:
            wrapper.updated_parameters.update(p.param for p in self._params)
            wrapper.optimizers.add(self)
        # Parameters whose storage is checked here, because their wrappers' guards do not.
        checking = [wrapper for wrapper in self._wrappers if wrapper.engine.places]
        self._checked_here = [p for p in self._params if owner_of(p.param) not in checking]
        # What each model held when a check of it last passed.
        self._contents = [(chunk, ModelContents()) for chunk in self._chunks]
        # Whether the norm stays in double, instead of being rounded to fp32.
        self._is_double = bool(self._params) and all(p.main.dtype == torch.float64 for p in self._params)

    def step(self, closure: None = None) -> tuple[bool, float | None, int | None]:  # type: ignore[override]
        """Makes one update, or skips it on all ranks, and waits until the device has decided.

        Args:
            closure: torch's argument, None: run forward and backward before.

        Returns:
            ``(True, grad_norm, num_zeros_in_grad)`` after an update: the norm before clipping, without the loss scale;
            the number of zeros if the configuration asks for it, else None. After a skipped step with a loss scale,
            which is lowered, ``(False, None, None)``; without one ``(False, grad_norm, num_zeros_in_grad)`` with a
            norm that is not finite.

        Raises:
            ShardstackError: gradients that were not reduced, or are incomplete.
            OptimizerError: a parameter whose storage was replaced, or that was made trainable since the optimizer was
                built, or a gradient that does not fit its parameter.
        """
        if closure is not None:
            raise OptimizerError("step() takes no closure; run forward, backward and finalize_model_grads before it")
        outcomes: list[StepOutcome] = []
        self.start_step(on_outcome=outcomes.append)
        self.finish_step()
        outcome = outcomes[0]
        if not outcome.has_update and self.grad_scaler is not None:
            return False, None, None
        return outcome.has_update, outcome.grad_norm, outcome.num_zeros if self.config.log_num_zeros_in_grad else None

    @torch.no_grad()
    def start_step(
        self, report: Tensor | None = None, *, on_outcome: Callable[[StepOutcome], None] | None = None
    ) -> None:
        """Queues one update, which the device skips if a gradient is not finite.

        Does not wait for it. The host learns the outcome in :meth:`finish_step`, which checkpoints call, or else in
        the next step: before its update, or in :meth:`scale_loss` with a dynamic loss scale. Other code that writes to
        parameters in low precision between two steps through ``.data``, which torch does not count, has to call
        `finish_step` before, or :meth:`reload_model_params` after.

        Args:
            report: `[n]`, numbers on the device, for example a loss, that are copied to the host with the outcome.
            on_outcome: called once with the outcome, before the next step's update.

        Raises:
            ShardstackError, OptimizerError: see :meth:`step`, and :meth:`finish_step` for the previous step.
        """
        self.conclude()
        if not isinstance(self.rule, SkippableRule):
            self._reduce_gradients()  # before hooks, which read gradients
        self._start_reduced(report, on_outcome=on_outcome)

    @torch.optim.Optimizer.profile_hook_step  # runs hooks of steps
    @torch.no_grad()
    def _start_reduced(self, report: Tensor | None, *, on_outcome: Callable[[StepOutcome], None] | None) -> None:
        # Gather and check.
        self._check_may_step()
        if self._has_unfinished_step and not self._written_params.were_counted():
            written_flags = self._written_params.find_written()  # to wait for it would leave the device without work
        else:
            written_flags = None
            self._written_params.refresh_masters()
        grads = [p.take_gradient() for p in self._params]
        scale = self.grad_scaler.scale if self.grad_scaler is not None else 1.0
        norm, num_zeros = self._statistics.measure(grads, self.config.log_num_zeros_in_grad).unbind()
        norm = norm / torch.full_like(norm, scale)  # a number in place of the tensor is not divided by on CUDA
        norm = norm if self._is_double else norm.float().double()
        params = [p.main for p, grad in zip(self._params, grads, strict=True) if grad is not None]
        lr = max(group.get("lr", 0.0) for group in self.param_groups)
        self._pending = PendingOutcome(
            norm, num_zeros, report, written_flags, self._written_params.names, params=params, lr=lr, loss_scale=scale
        )
        self._on_outcome, self._has_unfinished_step = on_outcome, True
        is_finite = torch.isfinite(norm)
        if not self.rule.skips_on_device and not self._pending.wait().has_update:
            self._pending.params = ()
            return

        # Clip.
        factor = gradient_factor(norm, self.config.clip_grad, scale)
        gradients = {p.main: grad for p, grad in zip(self._params, grads, strict=True) if grad is not None}
        if not self.rule.skips_on_device:
            gradients, factor = self._clipped_in_place(gradients, factor), None

        # Update.
        weights = low_precision_weights(self._params)
        try:
            self.rule.update(gradients, is_finite, factor, weights)
        except BaseException:
            self._pending = self._on_outcome = None  # there is no update to conclude
            raise
        if self.average is not None:
            self.average.note_update(is_finite)

        # Publish.
        self._publish_parameters(weights)
        for wrapper in self._wrappers:
            wrapper.engine.updated()
            if not self.rule.skips_on_device and self.grad_scaler is not None:
                wrapper.step.enter(Phase.UNSCALED)

    def _reduce_gradients(self) -> None:
        """Calls `finalize_model_grads` where the loop has not: with a torch optimizer a step follows the backward.

        Losses that are divided by a number of tokens are the loop's: `finalize_model_grads` has to learn the number.
        """
        phases = (Phase.ACCUMULATING, Phase.REDUCED)
        chunks = [w for w in self._wrappers if w.step.phase in phases and not w.plan.sums_gradients]
        if chunks:
            finalize_model_grads(chunks)

    def _check_may_step(self) -> None:
        self.check_whole()
        if self.average is not None:
            self.average.check_may_step()
        for wrapper in self._wrappers:
            wrapper.check_step(type(self).__name__)
            wrapper.stepped_optimizers.add(self)
        for chunk, contents in self._contents:
            if contents.have_changed():
                _check_updated(chunk, getattr(self.rule, "left_out", ()))
                contents.note(chunk)
        for p in self._checked_here:
            p.check_storage()

    def _clipped_in_place(self, gradients: dict[Tensor, Tensor], factor: Tensor | None) -> dict[Tensor, Tensor]:
        """Returns gradients for a torch optimizer: in the dtypes of main tensors, and multiplied where they are."""
        ready = {main: torch.empty_like(g, dtype=main.dtype) for main, g in gradients.items() if g.dtype != main.dtype}
        if ready:
            torch._foreach_copy_(list(ready.values()), [gradients[main] for main in ready])
        ready = gradients | ready
        if factor is not None:
            multiply_gradients(list(ready.values()), factor)
            for wrapper in self._wrappers:
                wrapper.engine.gradients.gather(again=True)
        return ready

    def finish_step(self) -> None:
        """Waits until the device has decided whether the last step made an update.

        Afterwards parameters may be read and written as after :meth:`step`.

        Raises:
            OutOfStepError: not all ranks took part in the step.
            OptimizerError: other code wrote to parameters in low precision between this step and an unfinished one.
            ShardstackError: a wrapper has released the model or the state.
        """
        for wrapper in self._wrappers:
            wrapper.step.reject_released("finish_step(), or state of an optimizer,", "model", "optimizer")
        self.conclude()
        self._has_unfinished_step = False

    def conclude(self) -> None:
        """Takes the last step's outcome, waiting for it, unless that was done: loss scale, step counts, callback."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        outcome = pending.wait()
        if self.grad_scaler is not None:
            self.grad_scaler.update(not outcome.has_update)
        if not outcome.has_update:
            self.rule.take_back(pending.params)
        elif self.average is not None:
            self.average.num_averaged += 1
        on_outcome, self._on_outcome = self._on_outcome, None
        if on_outcome is not None:
            on_outcome(outcome)

    def _publish_parameters(self, weights: Mapping[Tensor, Tensor] | None = None) -> None:
        """Copies updated or loaded values into the model's parameters.

        Args:
            weights: those in low precision that do not have them yet, by master. None is all.
        """
        refresh_parameters(low_precision_weights(self._params) if weights is None else weights)
        self._written_params.note_agreement()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters that this optimizer does not update yet, as torch's method does.

        They were trainable when the model was wrapped. Every rank of the model calls it.

        Raises:
            OptimizerError: parameters of another model or group, the optimizer is one of `get_megatron_optimizer`,
                which updates all, or the settings are not elementwise. The group is not added.
        """
        self.finish_step()
        if isinstance(self.rule, SkippableRule):
            raise OptimizerError(
                "add_param_group was called for an optimizer that updates every parameter already; name them in the "
                "config_overrides of get_megatron_optimizer, or build an optimizer of torch for shard_optimizer"
            )
        if self.average is not None:
            raise OptimizerError("add_param_group was called after AveragedWeights was built; add the group before")
        groups, known = self.optimizer.param_groups, {p.param for p in self._params}
        type(self.optimizer).add_param_group(self.optimizer, param_group)
        try:
            added = find_main_params(type(self.optimizer).__name__, groups[-1]["params"], self._chunks)
            if twice := [p.name for p in added.values() if p.param in known]:
                raise OptimizerError(f"parameter {twice[0]} is in another group of the optimizer; add it to one")
            self.rule.take(groups[-1:], added)
        except OptimizerError:
            groups.pop()
            raise
        self._params = [*self._params, *added.values()]
        self._written_params = WrittenParams(self._params)
        self._statistics = self._statistics.over(self._params)
        self._note_params()

    @torch.no_grad()
    def exchange_main_tensors(self, others: Sequence[Tensor]) -> None:
        """Exchanges the updated tensors' values with other tensors of their shapes, and publishes them. Collective.

        Args:
            others: one tensor for each of `main_params`, in its dtype and shape.
        """
        self.finish_step()
        self._written_params.refresh_masters()
        for wrapper in self._wrappers:
            wrapper.engine.parameters.check_may_write()
            wrapper.engine.parameters.settle()
        for p, other in zip(self._params, others, strict=True):
            values = self.rule.stored.read(p.main, MASTER, p.main)
            before = values.clone()
            self.rule.stored.write(p.main, MASTER, values.copy_(other), 0)
            other.copy_(before)
        self._publish_parameters()

    def describe(self) -> str:
        """Returns what updates each parameter, as text for a log. Empty if all have one update rule."""
        return getattr(self.optimizer, "table", "")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Makes every gradient zero or None.

        A wrapped model's gradients are cleared by `zero_grad_buffer`, whatever `set_to_none` is, unless they are zero:
        loops also call it between forward and backward.

        Raises:
            OptimizerError: another optimizer of the same model has not stepped, and would lose its gradients.
        """
        for wrapper in self._wrappers:
            if wrapper.step.phase is not Phase.ZEROED:
                self._check_others_stepped(wrapper)
                wrapper.zero_grad_buffer()
        for p in self._params:
            if set_to_none:
                p.param.grad = None
            elif p.param.grad is not None:
                p.param.grad.zero_()

    def _check_others_stepped(self, wrapper: _BaseDataParallel) -> None:
        """Raises where this optimizer has stepped and one of other parameters has not, which would lose gradients."""
        if len(wrapper.optimizers) == 1 or self not in wrapper.stepped_optimizers:
            return
        own = {p.param for p in self._params}
        if any(own.isdisjoint(one.main_tensors()) for one in wrapper.optimizers - wrapper.stepped_optimizers):
            raise OptimizerError(
                "zero_grad was called after this optimizer has stepped and another one of the same model has not, "
                "whose gradients it would zero too; step both before, or call the model's zero_grad_buffer() to drop "
                "them"
            )

    def get_loss_scale(self) -> Tensor:
        """Returns the loss scale as a 0-dim fp32 tensor, 1 without loss scaling."""
        self.finish_step()
        return torch.tensor(self.grad_scaler.scale if self.grad_scaler is not None else 1.0)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the loss scale, by which the step divides the gradients."""
        if isinstance(self.grad_scaler, DynamicGradScaler):
            self.conclude()
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale


def _check_updated(chunk: nn.Module, left_out: Container[nn.Parameter]) -> None:
    """Raises if no optimizer updates a parameter that a wrapper trains, or of a plain module one that is `left_out`.

    Raises:
        OptimizerError: names the parameter.
    """
    updated = getattr(chunk, "updated_parameters", None)
    for name, param in unwrap_model(chunk).named_parameters():
        is_nobodys = param in left_out if updated is None else param not in updated and owner_of(param) is chunk
        if is_nobodys and param.requires_grad:
            raise OptimizerError(
                f"parameter {name} was made trainable after the optimizer was built, or is in none of the groups, so "
                "that nothing updates it; build the optimizer with it while it is trainable, and freeze it afterwards"
            )
