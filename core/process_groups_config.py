"""Process groups as one object, which Megatron-LM passes to models, wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .base.errors import ParallelConfigError
from .process_groups import current

Group = ProcessGroup | None

_KINDS = {
    **{name: name for name in ("tp", "pp", "cp", "ep", "dp", "dp_cp", "tp_cp", "tp_dp_cp")},
    "mp": "tp_pp",
    "embd": "embedding",
    "pos_embd": "position_embedding",
    "dp_cp_gtp_remat": "dp_cp",
    "expt_tp": "expert_tp",
    "tp_ep": "expert_tp_ep",
    "tp_ep_pp": "expert_tp_ep_pp",
    "tp_ep_pp_with_egtp_remat": "expert_tp_ep_pp",
    "expt_dp": "expert_dp",
    "expt_dp_gtp_remat": "expert_dp",
    "intra_dp_cp": "dp_shard_cp",
    "intra_expt_dp": "expert_dp_shard",
    "inter_dist_opt": "dp_replicate",
    "intra_dist_opt": "optimizer_instance",
}
"""Kinds of groups of `core.process_groups` by Megatron-LM's names. The others are None."""


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Process groups by Megatron-LM's names. One that was not set is None.

        groups = ProcessGroupCollection(tp=tp_group)
        groups.dp_cp = replicas
        DistributedDataParallel(config, ddp_config, module, pg_collection=groups)

    Raises:
        ParallelConfigError: a name that does not exist.
    """

    tp: Group = None
    """Tensor parallelism."""
    pp: Group = None
    """Pipeline stages."""
    mp: Group = None
    """Tensor x pipeline: one copy of the model."""
    embd: Group = None
    """First and last stage, which hold tied embeddings."""
    pos_embd: Group = None
    """The first stage."""
    cp: Group = None
    """Context parallelism."""
    tp_cp: Group = None
    """Tensor x context."""
    hcp: list[ProcessGroup] | None = None
    """Hierarchical context parallelism, which does not exist here."""
    ep: Group = None
    """Expert parallelism."""
    expt_tp: Group = None
    """Experts' tensor parallelism."""
    tp_ep: Group = None
    """Experts' tensor x expert."""
    tp_ep_pp: Group = None
    """Experts' tensor x expert x pipeline."""
    tp_ep_pp_with_egtp_remat: Group = None
    """The same: no ranks rematerialise weights here."""
    tp_dp_cp: Group = None
    """Tensor x data x context."""
    dp: Group = None
    """Data parallelism."""
    dp_cp: Group = None
    """Data x context: the replicas of a dense parameter, which wrappers reduce gradients over."""
    dp_cp_gtp_remat: Group = None
    """The same: no ranks rematerialise weights here."""
    dp_cp_ag: Group = None
    """Another communicator over `dp_cp`, for a script's own use."""
    gtp_remat: Group = None
    """Ranks that rematerialise weights, which do not exist here."""
    expt_gtp_remat: Group = None
    """Ranks that rematerialise experts' weights, which do not exist here."""
    expt_dp: Group = None
    """The replicas of an expert's parameter."""
    expt_dp_gtp_remat: Group = None
    """The same: no ranks rematerialise weights here."""
    expt_dp_ag: Group = None
    """Another communicator over `expt_dp`, for a script's own use."""
    intra_dp_cp: Group = None
    """Data x context within an optimizer instance."""
    intra_expt_dp: Group = None
    """The replicas of an expert's parameter within an optimizer instance."""
    inter_dist_opt: Group = None
    """The ranks with the same shard in each optimizer instance."""
    intra_dist_opt: Group = None
    """Every rank of an optimizer instance."""

    def __init__(self, **kwargs: Group | list[ProcessGroup]) -> None:
        _check_names(kwargs)
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        sizes = {name: group.size() for name, group in vars(self).items() if hasattr(group, "size")}
        return f"ProcessGroupCollection({', '.join(f'{name}: {size} ranks' for name, size in sizes.items())})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Returns the groups of `core.parallel_state`, all or only those named. Those that it lacks are None.

        Raises:
            ParallelConfigError: a name does not exist.
            ParallelStateError: `core.parallel_state` is not initialised.
        """
        names = [entry.name for entry in fields(cls)] if required_pgs is None else required_pgs
        _check_names(dict.fromkeys(names))
        current.groups("a collection of groups")
        return cls(**{name: _group(name) for name in names})


def _group(name: str) -> Group:
    return current.process_group(_KINDS[name], check_initialized=False) if name in _KINDS else None


def _check_names(groups: dict[str, Group | list[ProcessGroup]] | dict[str, None]) -> None:
    names = {entry.name for entry in fields(ProcessGroupCollection)}
    if wrong := sorted(groups.keys() - names):
        raise ParallelConfigError(f"a ProcessGroupCollection has no group {wrong[0]!r}; it has {sorted(names)}")


def check_same_groups(caller: str, groups: ProcessGroupCollection | None, names: Sequence[str]) -> None:
    """Checks that given groups have the ranks of `core.parallel_state`, whose groups the caller uses.

    Args:
        caller: name of the caller, for the error.
        groups: the given groups.
        names: names of the groups to check.

    Raises:
        ParallelConfigError: a group has other ranks.
    """
    if groups is None:
        return
    for name in names:
        theirs, own = getattr(groups, name), _group(name)
        if theirs is None:
            continue
        ranks = dist.get_process_group_ranks(theirs)
        own_ranks = dist.get_process_group_ranks(own) if own is not None else [dist.get_rank()]
        if ranks != own_ranks:
            raise ParallelConfigError(
                f"{caller}: pg_collection.{name} has the ranks {ranks}, but core.parallel_state has {own_ranks}; "
                "initialise that with the same sizes"
            )
