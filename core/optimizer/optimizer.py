"""The optimizer of a model under any data-parallel wrapper: one global norm, one update, one state layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..absent_names import absent_method
from ..diagnostics.step_marks import note_own_optimizer
from ..distributed import _BaseDataParallel
from ..distributed.parameter_owner import owner_of
from ..errors import CheckpointError
from .clip_grads import GradientStatistics, clip_coefficient, round_to_fp32
from .grad_scaler import GradScaler
from .main_params import MainParam, refresh_masters, refresh_parameters
from .optimizer_config import OptimizerConfig
from .update_rules import ensure_state, get_step_count, set_step_count, state_names
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
        # Parameters whose storage no wrapper checks in `check_may_step`.
        checking = [wrapper for wrapper in wrappers if wrapper.checks_placement]
        self._checked_here = [p for p in params if owner_of(p.param) not in checking]
        self._state_names = state_names(config)
        # Sums of parameters in low precision as of the last agreement with their masters; see there.
        self._written_params = WrittenParams(params)
        self._is_double = all(p.main.dtype == torch.float64 for p in params)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The update's groups, which :func:`~core.optimizer.param_groups.build_param_groups` describes."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Makes one update, or agrees with all ranks to skip it.

        Returns:
            ``(True, grad_norm, num_zeros_in_grad)``: the norm before clipping, without the loss scale; the count of
            zeros where the configuration asks for it, else None. Skipped: ``(False, None, None)`` with a loss scale,
            which is then lowered; without one ``(False, grad_norm, num_zeros_in_grad)`` with a norm that is not
            finite.

        Raises:
            ShardstackError: gradients that were not reduced, or are incomplete.
            OptimizerError: a parameter whose storage was replaced, or a gradient that does not fit its parameter.
        """
        # Gather and check.
        for wrapper in self._wrappers:
            wrapper.check_may_step(type(self).__name__)
        for p in self._checked_here:
            p.check_storage()
        self._written_params.refresh_masters()
        grads = [p.take_gradient() for p in self._params]
        scale = self.grad_scaler.scale if self.grad_scaler is not None else 1.0
        scaled_norm, num_zeros = self._statistics.measure(grads, self.config.log_num_zeros_in_grad)
        norm = scaled_norm / scale if self._is_double else round_to_fp32(scaled_norm / scale)
        overflow = not math.isfinite(norm)
        if self.grad_scaler is not None:
            self.grad_scaler.update(overflow)
        if overflow:
            return (False, norm, num_zeros) if self.grad_scaler is None else (False, None, None)

        # Clip.
        factor = clip_coefficient(norm, self.config.clip_grad) / scale
        if factor != 1.0:
            torch._foreach_mul_([grad for grad in grads if grad is not None], factor)

        # Update.
        for p, grad in zip(self._params, grads, strict=True):
            p.main.grad = grad
        try:
            self.optimizer.step()
        finally:
            for p in self._params:  # else the gradient's memory would outlive the model's own reference to it
                p.main.grad = None

        # Publish.
        self._publish_parameters()
        for wrapper in self._wrappers:
            wrapper.note_step()
            if self.grad_scaler is not None:
                wrapper.gradient_state.note_unscaled()
        return True, norm, num_zeros

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
        return torch.tensor(self.grad_scaler.scale if self.grad_scaler is not None else 1.0)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the loss scale; the step divides the gradients by it again."""
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
        """Returns every tensor of the state under ``<kind>.<parameter name>``, created where absent, for a checkpoint.

        Kinds are ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``, and ``master``. Each is the tensor of the
        whole model (`core.dist_checkpointing`'s `global_view` or `flat_range_view`) and shares this rank's storage:
        load into it, then call :meth:`load_state_scalars`. Masters contain what something else has written into
        parameters in low precision since the last step: a checkpoint keeps the master in the parameter's place.
        """
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
        """Returns the rest of the state as plain JSON: the step count, the parameters that deviate from it, the loss
        scale."""
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
        """Returns this rank's state in torch's layout, with masters and loss scale: for the same model, cut the same
        way."""
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
