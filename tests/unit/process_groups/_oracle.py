"""Which ranks every getter of `parallel_state` has to name, for every size and order.

The oracle follows Megatron-LM's definitions: dense layers and experts cut the same ranks in the same order, with
ep = 1 and with cp = 1; an optimizer instance is a consecutive part of the data-parallel (x context) group, and the
groups across instances and those of whole instances come from the experts' data-parallel groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist

from core import parallel_state as ps
from tests.unit._ranks import Factorisation

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class Case(NamedTuple):
    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    instances: int = 1

    def initialize(self, order: str = DEFAULT_ORDER) -> None:
        ps.initialize_model_parallel(
            self.tp,
            self.pp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            num_distributed_optimizer_instances=self.instances,
            order=order,
        )


GROUPS = {
    "tp": ps.get_tensor_model_parallel_group,
    "pp": ps.get_pipeline_model_parallel_group,
    "cp": ps.get_context_parallel_group,
    "dp": ps.get_data_parallel_group,
    "dp-cp": lambda: ps.get_data_parallel_group(with_context_parallel=True),
    "partial dp-cp": lambda: ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
    "tp-pp": ps.get_model_parallel_group,
    "tp-cp": ps.get_tensor_and_context_parallel_group,
    "tp-dp": ps.get_tensor_and_data_parallel_group,
    "tp-dp-cp": lambda: ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
    "intra": ps.get_intra_distributed_optimizer_instance_group,
    "inter": ps.get_inter_distributed_optimizer_instance_group,
    "embedding": lambda: ps.get_embedding_group(check_initialized=False),
    "position embedding": lambda: ps.get_position_embedding_group(check_initialized=False),
    "ep": ps.get_expert_model_parallel_group,
    "expert tp": ps.get_expert_tensor_parallel_group,
    "expert tp-ep": ps.get_expert_tensor_and_model_parallel_group,
    "expert tp-ep-pp": ps.get_expert_tensor_model_pipeline_parallel_group,
    "expert dp": ps.get_expert_data_parallel_group,
    "expert partial dp": lambda: ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
}
SIZES_AND_RANKS = {
    "tp": (ps.get_tensor_model_parallel_world_size, ps.get_tensor_model_parallel_rank),
    "pp": (ps.get_pipeline_model_parallel_world_size, ps.get_pipeline_model_parallel_rank),
    "cp": (ps.get_context_parallel_world_size, ps.get_context_parallel_rank),
    "dp": (ps.get_data_parallel_world_size, ps.get_data_parallel_rank),
    "dp-cp": (lambda: ps.get_data_parallel_world_size(True), lambda: ps.get_data_parallel_rank(True)),
    "partial dp-cp": (
        lambda: ps.get_data_parallel_world_size(True, partial_data_parallel=True),
        lambda: ps.get_data_parallel_rank(True, partial_data_parallel=True),
    ),
    "ep": (ps.get_expert_model_parallel_world_size, ps.get_expert_model_parallel_rank),
    "expert tp": (ps.get_expert_tensor_parallel_world_size, ps.get_expert_tensor_parallel_rank),
    "expert tp-ep": (ps.get_expert_tensor_and_model_parallel_world_size, ps.get_expert_tensor_and_model_parallel_rank),
    "expert dp": (ps.get_expert_data_parallel_world_size, ps.get_expert_data_parallel_rank),
    "expert partial dp": (
        lambda: ps.get_expert_data_parallel_world_size(True),
        lambda: ps.get_expert_data_parallel_rank(True),
    ),
}
FIRST_RANKS = {
    "tp": ps.get_tensor_model_parallel_src_rank,
    "dp": ps.get_data_parallel_src_rank,
    "dp-cp": lambda: ps.get_data_parallel_src_rank(with_context_parallel=True),
}


@lru_cache(maxsize=4)
def _factorisations(case: Case, order: str) -> tuple[Factorisation, Factorisation, str]:
    """Dense layers, experts, and the experts' data-parallel tokens."""
    dp = case.world // (case.tp * case.pp * case.cp)
    dense = Factorisation(order, {"tp": case.tp, "cp": case.cp, "ep": 1, "dp": dp, "pp": case.pp})
    expert_dp = dp * case.cp // case.ep
    experts = Factorisation(order, {"tp": case.tp, "cp": 1, "ep": case.ep, "dp": expert_dp, "pp": case.pp})
    if case.ep == 1 and dense.table("pp") != experts.table("pp"):
        return dense, dense, "dp-cp"
    return dense, experts, "dp"


def _parts(ranks: list[int], number: int) -> list[list[int]]:
    length = len(ranks) // number
    return [ranks[start : start + length] for start in range(0, len(ranks), length)]


def expected_groups(case: Case, order: str, rank: int) -> dict[str, list[int]]:
    dense, experts, expert_dp = _factorisations(case, order)
    groups = {kind: dense.group(rank, kind) for kind in GROUPS if set(kind.split("-")) <= {"tp", "pp", "cp", "dp"}}
    groups |= {f"expert {kind}": experts.group(rank, kind) for kind in ("tp", "tp-ep", "tp-ep-pp")}
    groups["ep"] = experts.group(rank, "ep")
    groups["expert dp"] = experts.group(rank, expert_dp)
    parts = {"partial dp-cp": groups["dp-cp"], "expert partial dp": groups["expert dp"]}
    for kind, whole in parts.items():
        groups[kind] = next(part for part in _parts(whole, case.instances) if rank in part)

    def instance(of: int) -> tuple[int, int, list[list[int]]]:
        parts = _parts(experts.group(of, expert_dp), case.instances)
        return next((i, part.index(of), parts) for i, part in enumerate(parts) if of in part)

    index, place, parts_of_mine = instance(rank)
    groups["inter"] = [part[place] for part in parts_of_mine]
    groups["intra"] = [other for other in range(case.world) if instance(other)[0] == index]
    stages = groups["pp"]
    groups["embedding"] = sorted({stages[0], stages[-1]}) if rank in (stages[0], stages[-1]) else []
    groups["position embedding"] = stages[:1] if rank == stages[0] else []
    return groups


def experts_fit(case: Case, order: str) -> bool:
    """Returns whether experts and dense layers agree on pipelines and on optimizer instances."""
    dense, experts, _ = _factorisations(case, order)
    if dense.table("pp") != experts.table("pp"):
        return False
    if case.instances > 1 and case.cp > 1 and order.index("cp") > order.index("dp"):
        return False
    across_dense = [part[0] for part in _parts(dense.group(0, "dp-cp"), case.instances)]
    return across_dense == expected_groups(case, order, 0)["inter"]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def check_every_getter(case: Case, order: str, rank: int) -> None:
    expected = expected_groups(case, order, rank)
    where = (case, order, rank)
    assert {kind: ranks_of(getter()) for kind, getter in GROUPS.items()} == expected, where
    for kind, (size, place) in SIZES_AND_RANKS.items():
        assert (size(), place()) == (len(expected[kind]), expected[kind].index(rank)), (kind, where)
    for kind, first in FIRST_RANKS.items():
        assert first() == expected[kind][0], (kind, where)
    assert ps.get_data_parallel_global_ranks() == expected["dp"], where
    experts = (ps.get_expert_model_parallel_world_size(), ps.get_expert_tensor_parallel_world_size())
    assert experts == (len(expected["ep"]), len(expected["expert tp"])), where
    stages = expected["pp"]
    stage = stages.index(rank)
    assert ps.is_pipeline_first_stage() == (stage == 0), where
    assert ps.is_pipeline_last_stage() == (stage == len(stages) - 1), where
    mesh = ps.get_device_mesh()
    axes = [token for token in reversed(order.split("-")) if token != "ep"]
    names = [name for axis in axes for name in (("dp_replicate", "dp_shard") if axis == "dp" else (axis,))]
    assert list(mesh.mesh_dim_names or ()) == names, where
    assert mesh.mesh.flatten().tolist() == list(range(case.world)), where
    for axis, kind in {"tp": "tp", "cp": "cp", "pp": "pp", "dp_replicate": "inter"}.items():
        assert ranks_of(mesh.get_group(axis)) == expected[kind], (axis, where)
    wrapped = ps.get_data_parallel_mesh()
    assert wrapped.mesh.flatten().tolist() == expected["dp-cp"], where
    if case.instances == 1:
        assert wrapped.mesh_dim_names == ("dp_cp",), where
        assert ranks_of(wrapped.get_group()) == expected["dp-cp"], where
    else:
        assert wrapped.mesh_dim_names == ("dp_replicate", "dp_shard_cp"), where
        assert ranks_of(wrapped.get_group("dp_replicate")) == expected["inter"], where
        assert ranks_of(wrapped.get_group("dp_shard_cp")) == expected["partial dp-cp"], where
