"""Process groups as one object, which Megatron-LM passes to models, wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import parallel_state
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
        ps = parallel_state
        # Raises for the first group if nothing is initialised.
        groups: dict[str, Group] = {
            "dp": ps.get_data_parallel_group(),
            "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
            "intra_dp_cp": ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            "tp": ps.get_tensor_model_parallel_group(),
            "pp": ps.get_pipeline_model_parallel_group(),
            "mp": ps.get_model_parallel_group(),
            "cp": ps.get_context_parallel_group(),
            "tp_cp": ps.get_tensor_and_context_parallel_group(),
            "tp_dp_cp": ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
            "embd": ps.get_embedding_group(check_initialized=False),
            "pos_embd": ps.get_position_embedding_group(check_initialized=False),
            "ep": ps.get_expert_model_parallel_group(),
            "expt_tp": ps.get_expert_tensor_parallel_group(),
            "tp_ep": ps.get_expert_tensor_and_model_parallel_group(),
            "tp_ep_pp": ps.get_expert_tensor_model_pipeline_parallel_group(),
            "expt_dp": ps.get_expert_data_parallel_group(),
            "intra_expt_dp": ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            "inter_dist_opt": ps.get_inter_distributed_optimizer_instance_group(),
            "intra_dist_opt": ps.get_intra_distributed_optimizer_instance_group(),
        }
        groups["dp_cp_gtp_remat"] = groups["dp_cp"]
        groups["expt_dp_gtp_remat"] = groups["expt_dp"]
        groups["tp_ep_pp_with_egtp_remat"] = groups["tp_ep_pp"]
        names = [entry.name for entry in fields(cls)] if required_pgs is None else required_pgs
        _check_names(dict.fromkeys(names))
        return cls(**{name: groups.get(name) for name in names})


def _check_names(groups: dict[str, Group | list[ProcessGroup]] | dict[str, None]) -> None:
    known = {entry.name for entry in fields(ProcessGroupCollection)}
    if unknown := sorted(groups.keys() - known):
        raise ParallelConfigError(f"a ProcessGroupCollection has no group {unknown[0]!r}; it has {sorted(known)}")


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
    getters = {
        "tp": parallel_state.get_tensor_model_parallel_group,
        "cp": parallel_state.get_context_parallel_group,
        "pp": parallel_state.get_pipeline_model_parallel_group,
        "ep": parallel_state.get_expert_model_parallel_group,
        "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    }
    for name in names:
        given, own = getattr(groups, name), getters[name](check_initialized=False)
        if given is None:
            continue
        ranks = dist.get_process_group_ranks(given)
        expected = dist.get_process_group_ranks(own) if own is not None else [dist.get_rank()]
        if ranks != expected:
            raise ParallelConfigError(
                f"{caller}: pg_collection.{name} has the ranks {ranks}, but core.parallel_state has {expected}; "
                "initialise that with the same sizes"
            )
