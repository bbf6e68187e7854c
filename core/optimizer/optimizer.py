"""The optimizer of a model under any data-parallel wrapper: one global norm, one update, one state layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..absent_names import absent_method
from ..diagnostics.step_marks import note_own_optimizer
from ..distributed import _BaseDataParallel
from ..distributed.gradient_state import Phase
from ..errors import CheckpointError
from .clip_grads import GradientStatistics, clip_coefficient, multiply_gradients
from .grad_scaler import DynamicGradScaler, GradScaler
from .main_params import MainParam, refresh_masters, refresh_parameters, take_gradients
from .optimizer_config import OptimizerConfig
from .step_outcome import PendingOutcome, StepOutcome
from .update_rules import (
    ensure_state,
    get_step_count,
    set_step_count,
    skips_on_device,
    state_names,
    take_back_step,
)
from .written_params import WrittenParams


class MegatronOptimizer:
    """Updates the parameters of a model from the gradients that its data-parallel wrapper left.

    The protocol of a step, in the order of :meth:`step`; every rank of the model takes part in all of it::

        gather and check   each gradient's local part, ``main_grad`` where present, else ``grad``; the global norm
        clip               gradients are multiplied in place, once, by 1 / loss scale and the clip coefficient
        update             each rank updates its own shards
        publish            parameters in low precision are refreshed from masters; ranks that share the update of a
                           parameter exchange what they updated (:class:`DistributedOptimizer` alone)

    The wrapper must have finished its gradients before (`finalize_model_grads`), else the step raises. Parameters
    without a gradient are left out of the update, as torch does: under a wrapper those that are frozen at the moment.
    What something else has written into parameters in low precision since the last step is taken into their masters.
    A gradient that is not finite on any rank makes every rank skip the step,
    in any precision: parameters, moments and step counts stay as they were. (Megatron-LM skips only where there is a
    loss scale, and else lets the weights be poisoned unless its wrapper's ``check_for_nan_in_grad`` stops the run.)

    `param_groups` hold the tensors that are updated; a scheduler sets their ``lr`` and ``weight_decay``.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        params: Sequence[MainParam],
        rule: torch.optim.Optimizer,
        statistics: GradientStatistics,
        grad_scaler: GradScaler | None,
        wrappers: Sequence[_BaseDataParallel] = (),
    ) -> None:
        self.config = config
        self.optimizer = rule
        note_own_optimizer(rule)
        self.grad_scaler = grad_scaler
        self._params = params
        self._statistics = statistics
        self._wrappers = wrappers
        self._state_names = state_names(config)
        # Sums of parameters in low precision as of the last agreement with their masters; see there.
        self._written_params = WrittenParams(params)
        self._is_double = all(p.main.dtype == torch.float64 for p in params)
        # The step whose outcome the host does not know yet, and who wants to hear of it. `start_step` sets both,
        # `_conclude` clears them.
        self._pending: PendingOutcome | None = None
        self._concluded: Callable[[StepOutcome], None] | None = None
        # Whether steps follow each other without the host waiting for them: from `start_step` until `finish_step`.
        self._is_ahead = False
        # Of each wrapper the phase of its gradients before that step, which returns where it was skipped.
        self._phases: list[Phase] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The update's groups, which :func:`~core.optimizer.param_groups.build_param_groups` describes."""
        return self.optimizer.param_groups

    def step(self) -> tuple[bool, float | None, int | None]:
        """Makes one update, or agrees with all ranks to skip it, and waits for the device to know which.

        Returns:
            ``(True, grad_norm, num_zeros_in_grad)``: the norm before clipping, without the loss scale; the count of
            zeros where the configuration asks for it, else None. Skipped: ``(False, None, None)`` with a loss scale,
            which is then lowered; without one ``(False, grad_norm, num_zeros_in_grad)`` with a norm that is not
            finite.

        Raises:
            ShardstackError: gradients that were not reduced, or are incomplete.
            OptimizerError: a parameter whose storage was replaced, or a gradient that does not fit its parameter.
        """
        outcomes: list[StepOutcome] = []
        self.start_step(concluded=outcomes.append)
        self.finish_step()
        outcome = outcomes[0]
        if not outcome.updated and self.grad_scaler is not None:
            return False, None, None
        return outcome.updated, outcome.grad_norm, outcome.num_zeros if self.config.log_num_zeros_in_grad else None

    @torch.no_grad()
    def start_step(
        self, report: Tensor | None = None, *, concluded: Callable[[StepOutcome], None] | None = None
    ) -> None:
        """Queues one update, which the device skips if a gradient is not finite; does not wait for it.

        The host learns what it came to when it calls :meth:`finish_step`, as checkpoints do, or during the next step:
        before its update, or in :meth:`scale_loss` where the loss scale adapts. Between two steps without a
        `finish_step` something else must not write into parameters in low precision, or has to call
        :meth:`reload_model_params`.

        Args:
            report: `[n]`, numbers on the device, for example a loss, that travel to the host in the same copy.
            concluded: called once with the outcome, before anything of a later step is decided.

        Raises:
            ShardstackError, OptimizerError: as :meth:`step`; of the step before also as :meth:`finish_step`.
        """
        self._conclude()

        # Gather and check.
        for wrapper in self._wrappers:
            wrapper.check_may_step(type(self).__name__)
        for p in self._params:
            p.check_storage()
        if self._is_ahead:
            written = self._written_params.find_written()  # to wait for it would leave the device without work
        else:
            written = None
            self._written_params.refresh_masters()
        grads = take_gradients(self._params)
        scale = self.grad_scaler.scale if self.grad_scaler is not None else 1.0
        norm, num_zeros = self._statistics.measure(grads, self.config.log_num_zeros_in_grad).unbind()
        norm = norm / torch.full_like(norm, scale)  # a number in place of the tensor is not divided by on CUDA
        norm = norm if self._is_double else norm.float().double()
        stepped = [p.main for p, grad in zip(self._params, grads, strict=True) if grad is not None]
        lr = max(group["lr"] for group in self.param_groups)
        self._pending = PendingOutcome(
            norm, num_zeros, report, written, self._written_params.names, stepped=stepped, lr=lr, loss_scale=scale
        )
        self._concluded, self._is_ahead = concluded, True
        is_finite = torch.isfinite(norm)
        if not skips_on_device(self.optimizer) and not self._pending.wait().updated:
            self._pending.stepped = ()
            return

        # Clip.
        if self.config.clip_grad > 0.0 or scale != 1.0:
            factor = clip_coefficient(norm, self.config.clip_grad) / torch.full_like(norm, scale)
            factor = torch.where(is_finite, factor, torch.ones_like(factor))
            multiply_gradients([grad for grad in grads if grad is not None], factor)

        # Update.
        self._phases = [wrapper.gradient_state.phase for wrapper in self._wrappers]
        for p, grad in zip(self._params, grads, strict=True):
            p.main.grad = grad
        self.optimizer.found_inf = is_finite.logical_not().float()  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
            for p in self._params:  # else the gradient's memory would outlive the model's own reference to it
                p.main.grad = None

        # Publish.
        self._publish_parameters()
        for wrapper in self._wrappers:
            wrapper.note_step()
            if self.grad_scaler is not None:
                wrapper.gradient_state.note_unscaled()

    def finish_step(self) -> None:
        """Waits until the device has decided about the step that was started last, if it is not known yet.

        After it, parameters may be read and written as after :meth:`step`.

        Raises:
            OutOfStepError: not all ranks took part in the step.
            OptimizerError: something wrote into parameters in low precision before the step, and after one that was
                not finished.
        """
        self._conclude()
        self._is_ahead = False

    def _conclude(self) -> None:
        """Learns the outcome of the step before, and acts on it: loss scale, step counts, who asked for it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        outcome = pending.wait()
        if self.grad_scaler is not None:
            self.grad_scaler.update(not outcome.updated)
        if not outcome.updated:
            take_back_step(self.optimizer, pending.stepped)
            for wrapper, phase in zip(self._wrappers, self._phases, strict=False):
                wrapper.gradient_state.note_skipped(phase)
        concluded, self._concluded = self._concluded, None
        if concluded is not None:
            concluded(outcome)

    def _publish_parameters(self) -> None:
        """Brings what was updated, or loaded, into the model's parameters."""
        refresh_parameters(self._params)
        self._written_params.note_agreement()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Makes every gradient zero or None; those of a wrapped model are None or unused memory in both forms."""
        for wrapper in self._wrappers:
            wrapper.zero_grad_buffer()
        for p in self._params:
            if p.param.grad is None:
                continue
            if set_to_none:
                p.param.grad = None
            else:
                p.param.grad.zero_()

    def get_loss_scale(self) -> Tensor:
        """Returns the factor of losses before their backward: a 0-dim fp32 tensor, 1 without loss scaling."""
        self.finish_step()
        return torch.tensor(self.grad_scaler.scale if self.grad_scaler is not None else 1.0)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale; the step divides the gradients by it again."""
        if isinstance(self.grad_scaler, DynamicGradScaler):
            self._conclude()
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Takes the model's parameters into the fp32 masters, after something else has written the parameters."""
        refresh_masters(self._params)
        self._written_params.note_agreement()

    def gradient_tensors(self) -> dict[str, Tensor]:
        """Returns the gradients that the next :meth:`step` reads, by parameter name: zeros where there is none.

        Each is the tensor of the whole model, as those of :meth:`state_tensors`, and shares this rank's storage.
        """
        gradients = {p: p.local_gradient() for p in self._params}
        return {p.name: p.whole(torch.zeros_like(p.main) if g is None else g) for p, g in gradients.items()}

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state under ``<kind>.<parameter name>``, created where absent, for a checkpoint.

        Kinds are ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``, and ``master``. Each is the tensor of the
        whole model (`core.dist_checkpointing`'s `global_view` or `flat_range_view`) and shares this rank's storage:
        load into it, then call :meth:`load_state_scalars`. Masters contain what something else has written into
        parameters in low precision since the last step: a checkpoint keeps the master in the parameter's place.
        """
        self.finish_step()
        self._written_params.refresh_masters()
        tensors: dict[str, Tensor] = {}
        for p in self._params:
            state = ensure_state(self.optimizer, p.main, self._state_names)
            tensors |= {f"{kind}.{p.name}": p.whole(state[kind]) for kind in self._state_names}
            if p.is_low_precision:
                tensors[f"master.{p.name}"] = p.whole(p.main)
        return tensors

    sharded_state_dict = absent_method("sharded_state_dict", "state_tensors() and state_scalars() go into checkpoints")

    def state_scalars(self) -> dict[str, Any]:
        """The rest of the state as plain JSON: the step count, the parameters that deviate from it, the loss scale."""
        self.finish_step()
        counts = {p.name: get_step_count(self.optimizer, p.main) for p in self._params}
        step = Counter(counts.values()).most_common(1)[0][0]
        return {
            "step": step,
            "step_of": {name: count for name, count in counts.items() if count != step},
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler is not None else {},
        }

    @torch.no_grad()
    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Continues from :meth:`state_scalars`, once the tensors are loaded: masters are written into the parameters.

        Raises:
            CheckpointError: step counts for parameters that this model does not have.
        """
        self.finish_step()
        unknown = sorted(set(scalars["step_of"]) - {p.name for p in self._params})
        if unknown:
            raise CheckpointError(
                f"the optimizer state names parameters that this model does not have: {', '.join(unknown[:5])}; "
                "load the checkpoint of this model"
            )
        for p in self._params:
            set_step_count(self.optimizer, p.main, int(scalars["step_of"].get(p.name, scalars["step"])))
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(scalars["grad_scaler"])
        self._publish_parameters()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state in torch's layout, with masters and loss scale: for the same model, cut the same way."""
        self.finish_step()
        self._written_params.refresh_masters()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {p.name: p.main for p in self._params if p.is_low_precision},
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler is not None else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`; masters are written into the model's parameters.

        Raises:
            CheckpointError: masters of other parameters than this model has in low precision.
        """
        self.finish_step()
        masters = {p.name: p.main for p in self._params if p.is_low_precision}
        if state_dict["masters"].keys() != masters.keys():
            differing = sorted(state_dict["masters"].keys() ^ masters.keys())
            raise CheckpointError(
                f"fp32 masters are on one side only for {', '.join(differing[:5])}; load the state of the same model "
                "in the same precision"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for name, main in masters.items():
            main.copy_(state_dict["masters"][name])
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        self._publish_parameters()
