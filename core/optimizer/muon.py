"""Muon (Jordan et al., 2024): momentum whose singular values are brought to near 1, one matrix at a time.

Every rank computes the momentum of the elements that it holds. Each matrix is then brought whole to its owner
(`matrix_owners`), which orthogonalizes it, and its parts go back to the ranks that hold them, which update their
parameters. So the bits are those of one process under every wrapper: elementwise arithmetic does not depend on how a
tensor is cut (`update_rules.in_whole_vectors`), and a product is always that of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import parallel_state
from ..base.device import current_device
from ..base.errors import ConfigError, ParallelConfigError, warn_once
from ..comm.host_read import known_on_host
from ..distributed.groups import whole_group
from ..distributed.parameter_owner import owner_of
from .main_params import MainParam
from .matrices import Choice, Matrix, choose, describe_matrices, matrices_of
from .matrix_owners import Arrival, MatrixOwners
from .newton_schulz import MuonRecipe, orthogonalize, recipe_of
from .optimizer_config import OptimizerConfig
from .param_groups import ConfigOverrides, override_of
from .update_rules import (
    Columns,
    SkippableRule,
    count_steps,
    ensure_state,
    in_whole_vectors,
    update_by_adamw,
    update_by_sgd,
    vector_elements,
)

_MOMENTUM = "momentum_buffer"
_OWNED = "owned."
"""Prefix of the state of a matrix that this rank owns, in the state of its parameter; its index follows."""

Rows = list[list[Tensor]]


class Muon(SkippableRule):
    """Muon for groups whose ``optimizer`` is ``"muon"``, AdamW or SGD for the others.

    The protocol of a step; every rank that shares the matrices takes part::

        momentum       each rank, of its elements, and what is to be orthogonalized; with momentum at owners they do it
        bring          a bucket's matrices go to their owners while those of the bucket before are orthogonalized
        orthogonalize  each owner
        return         a bucket's updates go back while the next bucket is orthogonalized
        update         each rank, of its elements: weight decay, then the scaled update

    Momentum at owners is in their state between steps, and in that of the elements' ranks while a checkpoint is
    written or read: `share_state` brings it there, and the next step back.

    Args:
        groups: groups of main tensors; weight decay and learning rate are theirs.
        mains: main tensors of Muon's parameters, in the order of `matrices`.
        matrices: all matrices.
        owners: the exchanges.
        table: all parameters, as text for the log.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        config: OptimizerConfig,
        recipe: MuonRecipe,
        mains: Sequence[Tensor],
        matrices: Sequence[Matrix],
        owners: MatrixOwners,
        table: str,
    ) -> None:
        defaults = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "momentum": config.sgd_momentum,
        }
        super().__init__(groups, defaults)
        self.recipe, self.table, self.owners = recipe, table, owners
        self._mains, self._matrices = mains, matrices
        self._dtype = reduce(torch.promote_types, (main.dtype for main in mains))
        self._result_dtype = torch.bfloat16 if recipe.fp32_matmul_prec == "medium" else self._dtype
        # Whether the device may skip the update of this step, by `found_inf`. `_update_matrices` sets it.
        self._may_skip = False
        self._owner_holds_momentum = config.muon_momentum_holder == "owners"
        self._muons = set(mains)
        self._update_others: Callable[[SkippableRule, dict[str, Any], tuple[str, ...]], None]
        if config.muon_scalar_optimizer == "adam":
            self._update_others, self.state_names = update_by_adamw, ("exp_avg", "exp_avg_sq")
        else:
            self._update_others = update_by_sgd
            self.state_names = (_MOMENTUM,) if config.sgd_momentum else ()
        # Whether momentum that owners hold is with the ranks that hold the elements instead. `share_state` sets it,
        # the next step clears it.
        self._is_shared = False
        # Factor of each parameter's updates, of its first matrix, and that of each matrix relative to it. Fixed.
        first = {matrix.param: recipe.scale(matrix.shape) for matrix in reversed(matrices)}
        self._scales = [first[param] for param in range(len(mains))]
        self._relative = [recipe.scale(matrix.shape) / first[matrix.param] for matrix in matrices]

    @property
    def mean_factor(self) -> float:
        """Factor that makes the momentum a mean of gradients, as that of `torch.optim.Muon` is."""
        return 1 - self.recipe.momentum if self.recipe.sums_momentum else 1.0

    def is_muons(self, param: Tensor) -> bool:
        """Returns whether Muon updates a main tensor, and not the optimizer of the others."""
        return param in self._muons

    def state_names_of(self, param: Tensor) -> tuple[str, ...]:
        return (_MOMENTUM,) if self.is_muons(param) else self.state_names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures, hence no loss to return
        """Updates every parameter that has a gradient."""
        skips = known_on_host(self.found_inf) if self.found_inf is not None else 0.0
        for group in self.param_groups:
            if group["optimizer"] == "muon":
                count_steps(self, group["params"])
            else:
                self._update_others(self, group, self.state_names)
        if skips != 1.0:
            self._update_matrices(may_skip=skips is None)

    def _update_matrices(self, may_skip: bool) -> None:
        """Brings, orthogonalizes and returns all buckets.

        Args:
            may_skip: the device may skip the update, by `found_inf`.
        """
        self._may_skip = may_skip
        num_buckets, returning = len(self.owners.buckets), None
        bringing = self._start_bringing(0)
        for bucket in range(num_buckets):
            matrices = self._take(bringing)
            if bucket + 1 < num_buckets:
                bringing = self._start_bringing(bucket + 1)
            results = {index: orthogonalize(matrix, self.recipe) for index, matrix in matrices.items()}
            before, returning = returning, self.owners.start_returning(bucket, results, self._result_dtype)
            if before is not None:
                self._apply(bucket - 1, before)
        if returning is not None:
            self._apply(num_buckets - 1, returning)
        self._is_shared = False

    def _start_bringing(self, bucket: int) -> tuple[Arrival, Arrival | None]:
        """Starts to bring what a bucket's owners need: updates, or gradients and momentum."""
        mains = {param: self._mains[param] for param in self.owners.buckets[bucket]}
        grads = {param: torch.zeros_like(p) if p.grad is None else p.grad for param, p in mains.items()}
        if self._owner_holds_momentum:
            momenta = None
            if self._is_shared:
                momenta = self.owners.start_bringing(bucket, self._flat_momentum, self._dtype)
            flat = {param: grad.reshape(-1) for param, grad in grads.items()}
            return self.owners.start_bringing(bucket, flat.__getitem__, self._dtype), momenta
        updates = {param: torch.zeros_like(p, memory_format=torch.contiguous_format) for param, p in mains.items()}
        rows = [
            [grads[param], ensure_state(self, p, (_MOMENTUM,))[_MOMENTUM], updates[param]]
            for param, p in mains.items()
            if p.grad is not None and p.numel()
        ]
        self._advance(rows)
        dtype = self.recipe.wire_dtype or self._dtype
        return self.owners.start_bringing(bucket, lambda param: updates[param].view(-1), dtype), None

    def _take(self, bringing: tuple[Arrival, Arrival | None]) -> dict[int, Tensor]:
        """Returns the updates of the matrices that this rank owns."""
        matrices = self.owners.take(bringing[0])
        if not self._owner_holds_momentum:
            return matrices
        momenta = {} if bringing[1] is None else self.owners.take(bringing[1])
        rows = []
        for index, grad in matrices.items():
            main = self._mains[self._matrices[index].param]
            momentum = momenta.get(index, self.state[main].get(f"{_OWNED}{index}"))
            self.state[main][f"{_OWNED}{index}"] = momentum = torch.zeros_like(grad) if momentum is None else momentum
            matrices[index] = torch.zeros_like(grad)
            if main.grad is not None:
                rows.append([grad, momentum, matrices[index]])
        self._advance(rows)
        return matrices

    def _advance(self, rows: Rows) -> None:
        """Updates momenta in place.

        Args:
            rows: gradient, momentum, and what is to be orthogonalized, which is written; all in one dtype.
        """
        if rows:
            with self._unless_skipped([momentum for _, momentum, _ in rows]):
                in_whole_vectors(partial(_advance, self.recipe), rows, vector_elements(rows[0][0].device))

    def _apply(self, bucket: int, arrival: Arrival) -> None:
        """Updates this rank's elements of a bucket's parameters."""
        updates = {param: _flat_like(self._mains[param]) for param in self.owners.buckets[bucket]}
        self.owners.put(arrival, updates.__getitem__, self._relative)
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        rows: dict[tuple[float, float], Rows] = {}
        for param, update in updates.items():
            main, group = self._mains[param], group_of[self._mains[param]]
            if main.grad is not None and main.numel():
                factors = 1 - group["lr"] * group["weight_decay"], group["lr"] * self._scales[param]
                rows.setdefault(factors, []).append([main, update.view(main.shape)])
            if self._owner_holds_momentum:
                self.state[main].pop(_MOMENTUM, None)
        for (keep, step), same in rows.items():
            with self._unless_skipped([main for main, _ in same]):
                in_whole_vectors(partial(_descend, keep, step), same, vector_elements(same[0][0].device))

    @contextmanager
    def _unless_skipped(self, targets: Sequence[Tensor]) -> Iterator[None]:
        """Restores tensors that are written inside, if the device has decided to skip the update."""
        before = [target.clone() for target in targets] if self._may_skip else []
        yield
        for target, old in zip(targets, before, strict=False):
            torch.where(self.found_inf.to(target.device).bool(), old, target, out=target)  # type: ignore[union-attr]

    def share_state(self) -> None:
        if not self._owner_holds_momentum or self._is_shared:
            return
        for bucket in range(len(self.owners.buckets)):
            owned = {}
            for index in self.owners.owned(bucket):
                state, shape = self.state[self._mains[self._matrices[index].param]], self._matrices[index].shape
                zeros = torch.zeros(shape, dtype=self._dtype, device=self.owners.device)
                owned[index] = state.pop(f"{_OWNED}{index}", zeros)
            arrival = self.owners.start_returning(bucket, owned, self._dtype)
            self.owners.put(arrival, self._flat_momentum)
        self._is_shared = True

    def _flat_momentum(self, param: int) -> Tensor:
        main = self._mains[param]
        if _MOMENTUM not in self.state[main]:
            self.state[main][_MOMENTUM] = _flat_like(main).zero_().view(main.shape)
        flat: Tensor = self.state[main][_MOMENTUM].view(-1)
        return flat

    def state_notes(self) -> dict[str, Any]:
        return {"muon_momentum": self.recipe.momentum_kind}

    def load_state_notes(self, notes: Mapping[str, Any]) -> None:
        """Converts momentum between sum and mean, which differ by a factor."""
        if notes.get("muon_momentum", self.recipe.momentum_kind) == self.recipe.momentum_kind:
            return
        self.share_state()
        factor = 1 / self.mean_factor if self.recipe.sums_momentum else 1 - self.recipe.momentum
        for main in self._mains:
            ensure_state(self, main, (_MOMENTUM,))[_MOMENTUM].mul_(factor)


def _flat_like(main: Tensor) -> Tensor:
    return torch.empty(main.numel(), dtype=main.dtype, device=main.device)


def _advance(recipe: MuonRecipe, columns: Columns) -> None:
    grads, momenta, updates = columns
    if recipe.sums_momentum:
        torch._foreach_mul_(momenta, recipe.momentum)
        torch._foreach_add_(momenta, grads)
    else:
        torch._foreach_lerp_(momenta, grads, 1 - recipe.momentum)
    torch._foreach_copy_(updates, grads if recipe.nesterov else momenta)
    if recipe.nesterov and recipe.sums_momentum:
        torch._foreach_add_(updates, momenta, alpha=recipe.momentum)
    elif recipe.nesterov:
        torch._foreach_lerp_(updates, momenta, recipe.momentum)


def _descend(keep: float, step: float, columns: Columns) -> None:
    params, updates = columns
    torch._foreach_mul_(params, keep)
    torch._foreach_add_(params, updates, alpha=-step)


def choose_optimizers(
    params: Sequence[MainParam], config: OptimizerConfig, overrides: ConfigOverrides | None
) -> dict[MainParam, Choice]:
    """Returns which optimizer updates each parameter.

    Raises:
        ConfigError: a pattern matches no parameter, an override names an unknown optimizer, or Muon gets none.
    """
    for pattern in (*config.muon_include, *config.muon_exclude):
        if not any(fnmatchcase(p.name, pattern) for p in params):
            raise ConfigError(
                f"muon_include or muon_exclude {pattern!r} matches no parameter that is trained; names are as "
                f"{params[0].name} and {params[-1].name}"
            )
    choices = {}
    for p in params:
        requested = override_of(overrides or {}, p.name, p.param).get("optimizer")
        if requested not in (None, "muon", config.muon_scalar_optimizer):
            raise ConfigError(
                f"config_overrides gives parameter {p.name} the optimizer {requested!r}; it takes 'muon' or "
                f"{config.muon_scalar_optimizer!r}, the muon_scalar_optimizer"
            )
        choices[p] = choose(p, config, requested)
    if not any(choice.is_muon for choice in choices.values()):
        raise ConfigError(
            f"optimizer is muon, and none of the {len(params)} trained parameters is a matrix of a hidden layer; set "
            "optimizer to adam, or name parameters in muon_include"
        )
    return choices


def build_muon(
    config: OptimizerConfig,
    params: Sequence[MainParam],
    choices: Mapping[MainParam, Choice],
    groups: Sequence[dict[str, Any]],
    tp_group: dist.ProcessGroup | None,
) -> Muon:
    """Builds the update rule over `groups` of main tensors. All ranks that share the parameters call it."""
    recipe, ours = recipe_of(config), [p for p in params if choices[p].is_muon]
    matrices = [matrix for index, p in enumerate(ours) for matrix in matrices_of(index, p, config, recipe)]
    group = _sharing_ranks(params, tp_group)
    wholes = [p.whole(p.main) for p in ours]
    device = ours[0].main.device if group is None else current_device()
    owners = MatrixOwners(matrices, wholes, [p.name for p in ours], group, device)
    if owners.num_ranks > len(matrices):
        warn_once(
            f"{owners.num_ranks} ranks share the update of {len(matrices)} matrices by Muon, so that "
            f"{owners.num_ranks - len(matrices)} or more own none"
        )
    table = describe_matrices(params, choices, matrices, owners.owners, owners.num_ranks, config.muon_scalar_optimizer)
    return Muon(groups, config, recipe, [p.main for p in ours], matrices, owners, table)


def _sharing_ranks(params: Sequence[MainParam], tp_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the smallest group with all ranks that hold parts of the model or replicas of them; None for one rank.

    Raises:
        ParallelConfigError: no group has the ranks of both tensor and data parallelism.
    """
    groups: list[dist.ProcessGroup | None] = [tp_group]
    for p in params:
        wrapper = owner_of(p.param)
        if wrapper is not None:
            groups.append(wrapper.plan.groups.whole)
        elif isinstance(p.param, DTensor):
            groups.append(whole_group(p.param.device_mesh))
    both = None
    if parallel_state.model_parallel_is_initialized():
        groups.append(parallel_state.get_tensor_model_parallel_group())
        both = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    ranks = {group: set(dist.get_process_group_ranks(group)) for group in (*groups, both) if group is not None}
    needed = set().union(*(ranks[group] for group in groups if group is not None))
    if len(needed) <= 1:
        return None
    fitting = [group for group, members in ranks.items() if needed <= members]
    if not fitting:
        raise ParallelConfigError(
            f"ranks {sorted(needed)} share the model by tensor and data parallelism, and no group has all of them; "
            "initialize core.parallel_state, and let the wrapper take its groups"
        )
    return min(fitting, key=dist.get_world_size)
