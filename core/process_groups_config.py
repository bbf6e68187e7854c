"""Process groups as one object, which Megatron-LM passes to models, wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from torch.distributed import ProcessGroup

from . import process_groups
from .base.errors import ParallelConfigError

Group = ProcessGroup | None


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Process groups by Megatron-LM's names. One that was not set is None.

        groups = ProcessGroupCollection(tp=tp_group)
        groups.dp_cp = replicas
        DistributedDataParallel(config, ddp_config, module, pg_collection=groups)

    Raises:
        ParallelConfigError: a name that does not exist.
    """

    tp: Annotated[Group, "tp"] = None
    """Tensor parallelism."""
    pp: Annotated[Group, "pp"] = None
    """Pipeline stages."""
    mp: Annotated[Group, "tp_pp"] = None
    """Tensor x pipeline: one copy of the model."""
    embd: Annotated[Group, "embedding"] = None
    """First and last stage, which hold tied embeddings."""
    pos_embd: Annotated[Group, "position_embedding"] = None
    """The first stage."""
    cp: Annotated[Group, "cp"] = None
    """Context parallelism."""
    tp_cp: Annotated[Group, "tp_cp"] = None
    """Tensor x context."""
    hcp: list[ProcessGroup] | None = None
    """Hierarchical context parallelism, which does not exist here."""
    ep: Annotated[Group, "ep"] = None
    """Expert parallelism."""
    expt_tp: Annotated[Group, "expert_tp"] = None
    """Experts' tensor parallelism."""
    tp_ep: Annotated[Group, "expert_tp_ep"] = None
    """Experts' tensor x expert."""
    tp_ep_pp: Annotated[Group, "expert_tp_ep_pp"] = None
    """Experts' tensor x expert x pipeline."""
    tp_ep_pp_with_egtp_remat: Annotated[Group, "expert_tp_ep_pp"] = None
    """Equal to `tp_ep_pp`: no ranks rematerialise weights here."""
    tp_dp_cp: Annotated[Group, "tp_dp_cp"] = None
    """Tensor x data x context."""
    dp: Annotated[Group, "dp"] = None
    """Data parallelism."""
    dp_cp: Annotated[Group, "dp_cp"] = None
    """Data x context: the replicas of a dense parameter, which wrappers reduce gradients over."""
    dp_cp_gtp_remat: Annotated[Group, "dp_cp"] = None
    """Equal to `dp_cp`: no ranks rematerialise weights here."""
    dp_cp_ag: Group = None
    """Another communicator over `dp_cp`, for a script's own use."""
    gtp_remat: Group = None
    """Ranks that rematerialise weights, which do not exist here."""
    expt_gtp_remat: Group = None
    """Ranks that rematerialise experts' weights, which do not exist here."""
    expt_dp: Annotated[Group, "expert_dp"] = None
    """The replicas of an expert's parameter."""
    expt_dp_gtp_remat: Annotated[Group, "expert_dp"] = None
    """Equal to `expt_dp`: no ranks rematerialise weights here."""
    expt_dp_ag: Group = None
    """Another communicator over `expt_dp`, for a script's own use."""
    intra_dp_cp: Annotated[Group, "dp_shard_cp"] = None
    """Data x context within an optimizer instance."""
    intra_expt_dp: Annotated[Group, "expert_dp_shard"] = None
    """The replicas of an expert's parameter within an optimizer instance."""
    inter_dist_opt: Annotated[Group, "dp_replicate"] = None
    """The ranks with the same shard in each optimizer instance."""
    intra_dist_opt: Annotated[Group, "optimizer_instance"] = None
    """Every rank of an optimizer instance."""

    @property
    def experts_are_apart(self) -> bool:
        """Whether experts are cut over other ranks than dense layers, so that they have replicas of their own."""
        ranks = [1 if group is None else group.size() for group in (self.ep, self.tp, self.expt_tp or self.tp)]
        return ranks[0] > 1 or ranks[1] != ranks[2]

    def __init__(self, **kwargs: Group | list[ProcessGroup]) -> None:
        _check_names(kwargs)
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        sizes = {name: group.size() for name, group in vars(self).items() if hasattr(group, "size")}
        return f"ProcessGroupCollection({', '.join(f'{name}: {size} ranks' for name, size in sizes.items())})"

    @classmethod
    def of(cls, given: Any, caller: str) -> ProcessGroupCollection:
        """Returns the groups that an object has under these names, as Megatron-LM's own collection has.

        Args:
            given: a collection of this class is returned as it is.
            caller: name of the function that the user called, for messages.

        Raises:
            ParallelConfigError: it has none.
        """
        if isinstance(given, cls):
            return given
        groups = {name: group for name in _FIELDS if isinstance(group := getattr(given, name, None), ProcessGroup)}
        if not groups:
            raise ParallelConfigError(
                f"{caller}: pg_collection is a {type(given).__name__} without groups; give an object that has them by "
                "Megatron-LM's names, as dp_cp; a group or a mesh goes to process_group"
            )
        return cls(**groups)

    def filled_from(self, others: ProcessGroupCollection) -> ProcessGroupCollection:
        """Returns these groups, and `others` where these are None."""
        own = {name: group for name, group in vars(self).items() if group is not None}
        return ProcessGroupCollection(**vars(others) | own)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Returns the groups of `shardstack.parallel_state`, all or only the named ones. A group that it lacks is
        None.

        Raises:
            ParallelConfigError: a name does not exist.
            ParallelStateError: `shardstack.parallel_state` is not initialised.
        """
        _check_names(dict.fromkeys(required_pgs or ()))
        process_groups.groups("a collection of groups")
        return groups_in_effect(names=required_pgs)


def groups_in_effect(
    given: ProcessGroupCollection | None = None, names: Sequence[str] | None = None
) -> ProcessGroupCollection:
    """Returns the given groups, filled up with the groups of `shardstack.parallel_state` if it is initialised.

    Wrappers, optimizers and functions of checkpoints call it where their caller gives no groups. What is below them
    gets groups as values.

    Args:
        names: names of the groups to look up; by default all.
    """
    looked_up = _FIELDS if names is None else names
    groups = ProcessGroupCollection(**{name: group_of_field(name) for name in looked_up})
    return groups if given is None else given.filled_from(groups)


# By name; the annotation of a field has the kind of its groups in `shardstack.process_groups`, where there are such
# groups.
_FIELDS = get_type_hints(ProcessGroupCollection, include_extras=True)


def group_of_field(name: str) -> Group:
    """Returns the group of `shardstack.parallel_state` that a field has, or None before initialisation."""
    kinds = getattr(_FIELDS[name], "__metadata__", None)
    return None if kinds is None else process_groups.process_group(kinds[0], check_initialized=False)


def _check_names(groups: dict[str, Group | list[ProcessGroup]] | dict[str, None]) -> None:
    if wrong := sorted(groups.keys() - _FIELDS):
        raise ParallelConfigError(f"a ProcessGroupCollection has no group {wrong[0]!r}; it has {sorted(_FIELDS)}")
