"""Muon (Jordan et al., 2024): momentum whose singular values are brought to near 1, one matrix at a time.

Every rank computes the momentum of the elements that it holds. Each matrix is then brought whole to its owner
(`matrix_owners`), which orthogonalizes it, and its parts go back to the ranks that hold them, which update their
parameters. So the bits are those of one process under every wrapper: elementwise arithmetic does not depend on how a
tensor is cut (`update_rules.in_whole_vectors`), and a product is always that of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final

import torch
from torch import Tensor

from ...base.device import current_device
from ...base.errors import warn_once
from ...comm.lane import known_on_host
from ...process_groups_config import ProcessGroupCollection
from .. import update_rules as rules
from ..main_params import MainParam
from ..main_ranges import sharing_ranks
from ..muon_recipe import MuonRecipe, recipe_of
from ..optimizer_config import OptimizerConfig
from .matrices import describe_matrices, matrices_of, orthogonalize_all
from .matrix_owners import Arrival, MatrixOwners

_MOMENTUM = "momentum_buffer"
_OWNED = "owned."
"""Prefix of the momentum of a matrix that this rank owns, in the state of its parameter. Its index follows."""
_Row = tuple[Tensor, list[Tensor | str]]
"""A parameter and the tensors of its update, or the kinds of those that `SkippableRule.read` returns."""


class Muon(rules.SkippableRule):
    """Muon for groups whose ``optimizer`` is ``"muon"``, AdamW or Lion for the others.

    The protocol of a step; every rank that shares the matrices takes part::

        momentum       each rank, of its elements, and what is to be orthogonalized; with momentum at owners they do it
        bring          a bucket's matrices go to their owners while those of the bucket before are orthogonalized
        orthogonalize  each owner
        return         a bucket's updates go back while the next bucket is orthogonalized
        update         each rank, of its elements: weight decay, then the scaled update

    Momentum at owners is in their state between steps, and in that of the elements' ranks while a checkpoint is
    written or read: `share_state` brings it there, and the next step back.

    Args:
        groups: groups of main tensors, with weight decay and learning rate.
        reasons: result of `MuonBuilder.choose` for all parameters of the groups. All ranks that share them make an
            instance together.
        model_groups: groups of the model, of which it reads `tp` and `tp_dp_cp`.

    Attributes:
        recipe: what decides the numbers of an update.
        table: all parameters, as text for a log.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        config: OptimizerConfig,
        reasons: Mapping[MainParam, str],
        model_groups: ProcessGroupCollection,
    ) -> None:
        is_lion = config.muon_scalar_optimizer == "lion"
        betas = (config.lion_beta1, config.lion_beta2) if is_lion else (config.adam_beta1, config.adam_beta2)
        super().__init__(
            groups, {"lr": config.lr, "weight_decay": config.weight_decay, "betas": betas, "eps": config.adam_eps}
        )
        ours, group = [p for p in reasons if not reasons[p]], sharing_ranks(reasons, model_groups)
        self.recipe = recipe = recipe_of(config)
        # All fixed: the parameters that Muon updates, their matrices, and the dtypes of momentum and of what
        # `orthogonalize` returns.
        self._mains = [p.main for p in ours]
        self._matrices = [matrix for index, p in enumerate(ours) for matrix in matrices_of(index, p, config, recipe)]
        self._dtype = reduce(torch.promote_types, (main.dtype for main in self._mains), torch.float32)
        is_sent_rounded = recipe.fp32_matmul_prec == "medium" and recipe.rounds_first  # before it is multiplied
        self._sent_dtype = torch.bfloat16 if is_sent_rounded else self._dtype
        self._result_dtype = torch.bfloat16 if recipe.fp32_matmul_prec == "medium" else self._dtype
        device = self._mains[0].device if group is None and ours else current_device()
        self._owners = MatrixOwners(self._matrices, {p.name: p.whole(p.main) for p in ours}, group, device)
        num_ranks, num_matrices = self._owners.num_ranks, len(self._matrices)
        if num_ranks > num_matrices > 0:
            warn_once(f"{num_ranks} ranks share Muon's update of {num_matrices} matrices, so that some own none")
        self.state_names = rules.LION_STATE if is_lion else rules.ADAM_STATE
        self.table = describe_matrices(reasons, config.muon_scalar_optimizer, self._matrices, self._owners.owners)
        self._owner_holds_momentum = config.muon_momentum_holder == "owners"
        # Whether momentum that owners hold is with the ranks that hold the elements instead. `share_state` sets it,
        # the next step clears it.
        self._is_shared = False
        # Whether the device may skip the update of this step, by `found_inf`. `step` sets it.
        self._may_skip = False
        # Factor of each parameter's updates, of its first matrix, and that of each matrix relative to the first.
        scales = [recipe.scale(matrix.shape) for matrix in self._matrices]
        self._scales: Final = {m.param: scale for m, scale in reversed(list(zip(self._matrices, scales, strict=True)))}
        self._relative: Final = [s / self._scales[m.param] for m, s in zip(self._matrices, scales, strict=True)]

    def state_names_of(self, param: Tensor) -> tuple[str, ...]:
        return (_MOMENTUM,) if any(param is main for main in self._mains) else self.state_names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures, hence no loss to return
        """Updates every parameter that has a gradient."""
        skips = known_on_host(self.found_inf) if self.found_inf is not None else 0.0
        self._may_skip = skips is None
        for group in self.param_groups:
            if group["optimizer"] == "adam":
                rules.update_by_adamw(self, group)
                continue
            by_count = rules.count_steps(self, group["params"])
            if group["optimizer"] == "lion" and skips != 1.0:
                params = [p for batch in by_count.values() for p, _ in batch]
                self._run(partial(rules.lion, group), [(p, [rules.MASTER, self._read(p), "exp_avg"]) for p in params])
        if skips == 1.0 or not self._mains:  # a pipeline stage may have no matrix
            return
        self._take_momenta()
        num_buckets, bringing = len(self._owners.buckets), self._start_bringing(0)
        returning: list[Arrival] = []
        for bucket in range(num_buckets):
            matrices = self._take(bringing)
            if bucket + 1 < num_buckets:
                bringing = self._start_bringing(bucket + 1)
            results = orthogonalize_all(matrices, self.recipe)
            returning.append(self._owners.start_returning(bucket, results, self._result_dtype))
            if bucket:
                self._apply(bucket - 1, returning.pop(0))
        self._apply(num_buckets - 1, returning.pop())

    def _start_bringing(self, bucket: int) -> Arrival:
        """Starts to bring what a bucket's owners need: updates, or gradients where they hold the momentum."""
        mains = {param: self._mains[param] for param in self._owners.buckets[bucket]}
        grads = {param: self._read(p) for param, p in mains.items()}
        if self._owner_holds_momentum:
            flat = {param: grad.reshape(-1) for param, grad in grads.items()}
            return self._owners.start_bringing(bucket, flat, self._dtype)
        updates = {
            param: torch.zeros_like(grad, memory_format=torch.contiguous_format) for param, grad in grads.items()
        }
        rows: list[_Row] = [
            (p, [grads[param], _MOMENTUM, updates[param]])
            for param, p in mains.items()
            if self.gradient_of(p) is not None and p.numel()
        ]
        self._run(partial(_advance, self.recipe), rows)
        flat = {param: update.view(-1) for param, update in updates.items()}
        return self._owners.start_bringing(bucket, flat, self._sent_dtype)

    def _read(self, p: Tensor) -> Tensor:
        """Returns a parameter's gradient in its dtype, multiplied, or zeros where it has none."""
        grad, dtype = self.gradient_of(p), torch.promote_types(p.dtype, torch.float32)
        return torch.zeros_like(p, dtype=dtype) if grad is None else self.as_read([grad], dtype)[0]

    def _take(self, bringing: Arrival) -> dict[int, Tensor]:
        """Returns the updates of the matrices that this rank owns, by index."""
        matrices = self._owners.take(bringing)
        if not self._owner_holds_momentum:
            return matrices
        updates = {index: torch.zeros_like(grad) for index, grad in matrices.items()}
        rows: list[_Row] = []
        for index, grad in matrices.items():
            main = self._mains[self._matrices[index].param]
            if self.gradient_of(main) is not None:
                self.state[main].setdefault(f"{_OWNED}{index}", torch.zeros_like(grad))
                rows.append((main, [grad, f"{_OWNED}{index}", updates[index]]))
        self._run(partial(_advance, self.recipe), rows)
        return updates

    def _apply(self, bucket: int, arrival: Arrival) -> None:
        """Updates this rank's elements of a bucket's parameters."""
        mains = {param: self._mains[param] for param in self._owners.buckets[bucket]}
        updates = {
            param: main.new_empty(main.numel(), dtype=torch.promote_types(main.dtype, torch.float32))
            for param, main in mains.items()
        }
        self._owners.put(arrival, updates, self._relative)
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        rows: dict[tuple[float, float], list[_Row]] = {}
        for param, main in mains.items():
            group = group_of[main]
            if self.gradient_of(main) is not None and main.numel():
                factors = 1 - group["lr"] * group["weight_decay"], group["lr"] * self._scales[param]
                rows.setdefault(factors, []).append((main, [rules.MASTER, updates[param].view(main.shape)]))
        for factors, same in rows.items():
            self._run(partial(_descend, *factors), same)

    def _run(self, kernel: rules.Kernel, rows: Sequence[_Row]) -> None:
        """Runs `kernel` over columns of tensors, and stores what it has written unless the device skips the step.

        Args:
            rows: parameters and their tensors; a kind for one that the kernel writes.
        """
        if not rows:
            return
        written = [(p, kind, self.read(p, kind)) for p, row in rows for kind in row if isinstance(kind, str)]
        before = [values.clone() for *_, values in written] if self._may_skip else []
        read = iter([values for *_, values in written])
        rules.in_whole_vectors(kernel, [[next(read) if isinstance(t, str) else t for t in row] for _, row in rows])
        for (*_, values), old in zip(written, before, strict=False):
            torch.where(self.found_inf.to(values.device).bool(), old, values, out=values)  # type: ignore[union-attr]
        for p, kind, values in written:
            self.write(p, kind, values)

    def _take_momenta(self) -> None:
        """Brings momentum to its owners, if the ranks that hold the elements have it."""
        if not self._is_shared:
            return
        for bucket in range(len(self._owners.buckets)):
            arrival = self._owners.start_bringing(bucket, self._momenta(bucket), self._dtype)
            for index, momentum in self._owners.take(arrival).items():
                self.state[self._mains[self._matrices[index].param]][f"{_OWNED}{index}"] = momentum
            for param in self._owners.buckets[bucket]:
                del self.state[self._mains[param]][_MOMENTUM]
        self._is_shared = False

    def share_state(self) -> None:
        if not self._owner_holds_momentum or self._is_shared:
            return
        for bucket in range(len(self._owners.buckets)):
            matrices = {}
            for index, matrix in enumerate(self._matrices):
                if matrix.param not in self._owners.buckets[bucket] or self._owners.owners[index] != self._owners.rank:
                    continue
                zeros = torch.zeros(matrix.shape, dtype=self._dtype, device=self._owners.device)
                matrices[index] = self.state[self._mains[matrix.param]].pop(f"{_OWNED}{index}", zeros)
            arrival = self._owners.start_returning(bucket, matrices, self._dtype)
            self._owners.put(arrival, self._momenta(bucket), [1.0] * len(self._matrices))
        self._is_shared = True

    def _momenta(self, bucket: int) -> dict[int, Tensor]:
        """Returns this rank's elements of the momentum of a bucket's parameters, which is made where it is absent."""
        mains = {param: self._mains[param] for param in self._owners.buckets[bucket]}
        return {param: rules.ensure_state(self, p, (_MOMENTUM,))[_MOMENTUM].view(-1) for param, p in mains.items()}


def _advance(recipe: MuonRecipe, columns: rules.Columns) -> None:
    grads, momenta, updates = columns
    torch._foreach_lerp_(momenta, grads, 1 - recipe.momentum)
    if not recipe.nesterov:
        torch._foreach_copy_(updates, momenta)
        return
    for grad, momentum, update in zip(grads, momenta, updates, strict=True):
        torch.lerp(grad, momentum, recipe.momentum, out=update)  # without a copy first


def _descend(keep: float, step: float, columns: rules.Columns) -> None:
    params, updates = columns
    torch._foreach_mul_(params, keep)
    torch._foreach_add_(params, updates, alpha=-step)
