"""Every getter against an oracle, for every order and from every rank, in simulated worlds; then real ranks.

The oracle follows Megatron-LM's definitions: dense layers and experts cut the same ranks in the same order, with
ep = 1 and with cp = 1; an optimizer instance is a consecutive part of the data-parallel (x context) group, and the
groups across instances and those of whole instances come from the experts' data-parallel groups.
"""

from __future__ import annotations

import time
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from core import parallel_state as ps
from core.errors import ParallelConfigError, ParallelStateError
from core.rank_generator import RankGenerator
from tests.unit._ranks import Factorisation, fake_world
from tests.unit._spawn import run_distributed

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
ORDERS = ["-".join(tokens) for tokens in permutations(("tp", "cp", "ep", "dp", "pp"))]


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
    "tp-cp": (ps.get_tensor_and_context_parallel_world_size, ps.get_tensor_and_context_parallel_rank),
    "ep": (ps.get_expert_model_parallel_world_size, ps.get_expert_model_parallel_rank),
    "expert tp": (ps.get_expert_tensor_parallel_world_size, ps.get_expert_tensor_parallel_rank),
    "expert tp-ep": (
        ps.get_expert_tensor_and_model_parallel_world_size,
        ps.get_expert_tensor_and_model_parallel_rank,
    ),
    "expert dp": (ps.get_expert_data_parallel_world_size, ps.get_expert_data_parallel_rank),
    "expert partial dp": (
        lambda: ps.get_expert_data_parallel_world_size(partial_expert_data_parallel=True),
        lambda: ps.get_expert_data_parallel_rank(partial_expert_data_parallel=True),
    ),
}
FIRST_RANKS = {
    "tp": ps.get_tensor_model_parallel_src_rank,
    "tp-pp": ps.get_model_parallel_src_rank,
    "dp": ps.get_data_parallel_src_rank,
    "dp-cp": lambda: ps.get_data_parallel_src_rank(with_context_parallel=True),
    "ep": ps.get_expert_model_parallel_src_rank,
    "pp": ps.get_pipeline_model_parallel_first_rank,
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


def _expected(case: Case, order: str, rank: int) -> dict[str, list[int]]:
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


def _fits(case: Case, order: str) -> bool:
    """Returns whether experts and dense layers agree on pipelines and on optimizer instances."""
    dense, experts, _ = _factorisations(case, order)
    if dense.table("pp") != experts.table("pp"):
        return False
    if case.instances > 1 and case.cp > 1 and order.index("cp") > order.index("dp"):
        return False
    across_dense = [part[0] for part in _parts(dense.group(0, "dp-cp"), case.instances)]
    return across_dense == _expected(case, order, 0)["inter"]


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def _check_every_getter(case: Case, order: str, rank: int) -> None:
    expected = _expected(case, order, rank)
    where = (case, order, rank)
    assert {kind: _ranks_of(getter()) for kind, getter in GROUPS.items()} == expected, where
    for kind, (size, place) in SIZES_AND_RANKS.items():
        assert (size(), place()) == (len(expected[kind]), expected[kind].index(rank)), (kind, where)
    for kind, first in FIRST_RANKS.items():
        assert first() == expected[kind][0], (kind, where)
    assert ps.get_context_parallel_global_ranks() == expected["cp"], where
    stages = expected["pp"]
    stage = stages.index(rank)
    assert ps.is_pipeline_first_stage() == (stage == 0), where
    assert ps.is_pipeline_last_stage() == (stage == len(stages) - 1), where
    assert ps.get_pipeline_model_parallel_last_rank() == stages[-1], where
    assert ps.get_pipeline_model_parallel_next_rank() == (stages * 2)[stage + 1], where
    assert ps.get_pipeline_model_parallel_prev_rank() == (stages * 2)[stage - 1 + len(stages)], where
    assert ps.is_rank_in_embedding_group() == bool(expected["embedding"]), where
    assert ps.is_rank_in_position_embedding_group() == bool(expected["position embedding"]), where
    mesh = ps.get_device_mesh()
    axes = [token for token in reversed(order.split("-")) if token != "ep"]
    names = [name for axis in axes for name in (("dp_replicate", "dp_shard") if axis == "dp" else (axis,))]
    assert list(mesh.mesh_dim_names or ()) == names, where
    assert mesh.mesh.flatten().tolist() == list(range(case.world)), where
    for axis, kind in {"tp": "tp", "cp": "cp", "pp": "pp", "dp_replicate": "inter"}.items():
        assert _ranks_of(mesh.get_group(axis)) == expected[kind], (axis, where)
    wrapped = ps.get_data_parallel_mesh()
    assert wrapped.mesh.flatten().tolist() == expected["dp-cp"], where
    if case.instances == 1:
        assert wrapped.mesh_dim_names == ("dp_cp",), where
        assert _ranks_of(wrapped.get_group()) == expected["dp-cp"], where
    else:
        assert wrapped.mesh_dim_names == ("dp_replicate", "dp_shard_cp"), where
        assert _ranks_of(wrapped.get_group("dp_replicate")) == expected["inter"], where
        assert _ranks_of(wrapped.get_group("dp_shard_cp")) == expected["partial dp-cp"], where


@pytest.mark.parametrize(
    ("case", "ranks_a_world"),
    [
        (Case(8, tp=2, pp=2), 8),
        (Case(8, tp=2, cp=2, ep=2), 8),
        (Case(8, pp=2, cp=2), 8),
        (Case(16, tp=2, pp=2, cp=2, ep=2), 2),
        (Case(16, tp=2, cp=2, instances=2), 2),
        (Case(16, pp=2, cp=2, instances=2), 2),
        (Case(16, pp=2, cp=2, ep=2, instances=2), 2),
    ],
    ids=str,
)
def test_every_getter_under_every_order(case: Case, ranks_a_world: int) -> None:
    fitting = 0
    for number, order in enumerate(ORDERS):
        fits = _fits(case, order)
        fitting += fits
        for step in range(ranks_a_world):  # over the orders every rank has its turn
            rank = (number + step * (case.world // ranks_a_world)) % case.world
            with fake_world(rank, case.world):
                if fits:
                    case.initialize(order)
                    _check_every_getter(case, order, rank)
                else:
                    with pytest.raises(ParallelConfigError, match=r"order '.*' .*; put .* as in the default order"):
                        case.initialize(order)
                    assert not ps.is_initialized()
    assert fitting >= 20, "the default order and its like must be among those that fit"


@pytest.mark.parametrize("order", [DEFAULT_ORDER, "cp-tp-dp-ep-pp", "dp-tp-cp-pp-ep"])
@pytest.mark.parametrize("case", [Case(64, tp=4, pp=2, cp=2), Case(64, tp=2, pp=4, instances=2)], ids=str)
def test_a_world_of_64(case: Case, order: str) -> None:
    for rank in (0, 1, 37, 63):
        with fake_world(rank, case.world):
            case.initialize(order)
            _check_every_getter(case, order, rank)


def test_the_documented_groups_of_eight_ranks() -> None:
    seen: dict[str, set[tuple[int, ...]]] = {"tp": set(), "dp": set(), "pp": set()}
    for rank in range(8):
        with fake_world(rank, 8):
            ps.initialize_model_parallel(2, 2)
            for kind, groups in seen.items():
                groups.add(tuple(_ranks_of(GROUPS[kind]())))
    assert seen["tp"] == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert seen["dp"] == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert seen["pp"] == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_optimizer_instances_shard_over_the_inner_part() -> None:
    with fake_world(5, 16):
        ps.initialize_model_parallel(2, context_parallel_size=2, num_distributed_optimizer_instances=2)
        assert _ranks_of(GROUPS["dp-cp"]()) == [1, 3, 5, 7, 9, 11, 13, 15]
        assert _ranks_of(GROUPS["partial dp-cp"]()) == [1, 3, 5, 7]
        assert _ranks_of(GROUPS["inter"]()) == [5, 13]
        assert _ranks_of(GROUPS["intra"]()) == list(range(8))
        assert ps.get_data_parallel_mesh().mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]


def test_groups_of_equal_ranks_are_one_process_group() -> None:
    with fake_world(1, 8):
        ps.initialize_model_parallel(2)
        assert ps.get_data_parallel_group() is ps.get_data_parallel_group(with_context_parallel=True)
        assert ps.get_data_parallel_mesh().get_group() is ps.get_data_parallel_group()
        assert ps.get_device_mesh().get_group("tp") is ps.get_tensor_model_parallel_group()
        # the default group, this rank alone, tp, dp, and one of ours that spans the world
        assert len(dist.distributed_c10d._world.pg_map) == 5
        assert ps.get_intra_distributed_optimizer_instance_group() is not dist.group.WORLD


def test_the_generator_is_found_where_megatron_keeps_it() -> None:
    assert ps.RankGenerator is RankGenerator


# ---- before, twice, and after


def test_before_initialisation_a_rank_is_alone() -> None:
    assert not ps.is_initialized()
    assert not ps.model_parallel_is_initialized()
    for kind in ("tp", "pp", "cp", "ep"):
        size, place = SIZES_AND_RANKS[kind]
        assert (size(), place()) == (1, 0), kind
    assert ps.is_pipeline_first_stage()
    assert ps.is_pipeline_last_stage()
    assert not ps.is_rank_in_embedding_group()
    assert not ps.is_rank_in_position_embedding_group()
    with_none = (
        ps.get_tensor_model_parallel_group,
        ps.get_pipeline_model_parallel_group,
        ps.get_context_parallel_group,
        ps.get_context_parallel_global_ranks,
        ps.get_model_parallel_group,
        ps.get_tensor_and_context_parallel_group,
        ps.get_tensor_and_data_parallel_group,
        ps.get_embedding_group,
        ps.get_position_embedding_group,
        ps.get_intra_distributed_optimizer_instance_group,
        ps.get_inter_distributed_optimizer_instance_group,
        ps.get_expert_model_parallel_group,
        ps.get_expert_tensor_parallel_group,
        ps.get_expert_tensor_and_model_parallel_group,
        ps.get_expert_tensor_model_pipeline_parallel_group,
        ps.get_expert_data_parallel_group,
    )
    for getter in with_none:
        assert getter(check_initialized=False) is None, getter
        with pytest.raises(ParallelStateError, match=r"call core\.parallel_state\.initialize_model_parallel\(\)"):
            getter()
    strict = [pair for kind, pair in SIZES_AND_RANKS.items() if kind not in ("tp", "pp", "cp", "ep")]
    for strict_getter in (
        *(getter for pair in strict for getter in pair),
        *FIRST_RANKS.values(),
        ps.get_data_parallel_group,
        ps.get_pipeline_model_parallel_last_rank,
        ps.get_pipeline_model_parallel_next_rank,
        ps.get_pipeline_model_parallel_prev_rank,
        ps.get_device_mesh,
        ps.get_data_parallel_mesh,
    ):
        with pytest.raises(ParallelStateError, match=r"call core\.parallel_state\.initialize_model_parallel\(\)"):
            strict_getter()


def test_torch_distributed_comes_first() -> None:
    with pytest.raises(ParallelStateError, match=r"call core\.device\.init_process_group\(\)"):
        ps.initialize_model_parallel()


def test_initialising_twice_is_refused_until_destroyed() -> None:
    with fake_world(0, 4):
        ps.initialize_model_parallel(2)
        with pytest.raises(ParallelStateError, match=r"call destroy_model_parallel\(\)"):
            ps.initialize_model_parallel(2)
        assert ps.get_tensor_model_parallel_world_size() == 2
        ps.destroy_model_parallel()
        ps.destroy_model_parallel()
        assert not ps.is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1
        ps.initialize_model_parallel(4)
        assert ps.get_tensor_model_parallel_world_size() == 4


def test_groups_that_ended_with_their_world_can_still_be_destroyed() -> None:
    with fake_world(0, 2):
        ps.initialize_model_parallel(2)
        dist.destroy_process_group()
        with fake_world(0, 2):
            ps.destroy_model_parallel()
            ps.initialize_model_parallel()
            assert ps.get_data_parallel_world_size() == 2


def test_a_middle_stage_has_no_embedding_group() -> None:
    with fake_world(1, 3):
        ps.initialize_model_parallel(1, 3)
        with pytest.raises(ParallelStateError, match=r"rank 1 .* is_rank_in_embedding_group\(\)"):
            ps.get_embedding_group()
        with pytest.raises(ParallelStateError, match=r"rank 1 .* is_rank_in_position_embedding_group\(\)"):
            ps.get_position_embedding_group()


def test_partial_data_parallel_needs_context_parallel() -> None:
    with fake_world(0, 2):
        ps.initialize_model_parallel()
        with pytest.raises(ParallelConfigError, match="with_context_parallel=True"):
            ps.get_data_parallel_group(partial_data_parallel=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2},
            "world of 8 ranks is not divisible by 6 = tensor_model_parallel_size 3 x pipeline_model_parallel_size 2 "
            "x context_parallel_size 1; change a size, or start a multiple of 6 ranks",
        ),
        ({"tensor_model_parallel_size": 16}, "not divisible by 16"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0; it takes a positive number"),
        ({"expert_model_parallel_size": -1}, "expert_model_parallel_size is -1"),
        ({"distributed_timeout_minutes": 0}, "distributed_timeout_minutes is 0"),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size 3 does not divide 8 = .*choose a divisor"),
        (
            {"num_distributed_optimizer_instances": 3},
            "num_distributed_optimizer_instances 3 does not divide the data-parallel size 8 .*choose a divisor",
        ),
        (
            {"num_distributed_optimizer_instances": 4, "expert_model_parallel_size": 4},
            "num_distributed_optimizer_instances 4 does not divide the experts' data-parallel size 2 .*lower one",
        ),
        ({"order": "tp-cp-ep-dp-qq"}, "unknown token 'qq'"),
        ({"order": "tp-cp-ep-dp-tp"}, "names 'tp' twice"),
        ({"order": "cp-ep-dp-pp", "tensor_model_parallel_size": 2}, "leaves out 'tp', whose size is 2"),
        ({"order": "tp-cp-dp-pp", "expert_model_parallel_size": 2}, "leaves out 'ep', whose size is 2"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, int | str], message: str) -> None:
    with fake_world(0, 8):
        with pytest.raises(ParallelConfigError, match=message):
            ps.initialize_model_parallel(**arguments)  # type: ignore[arg-type]
        assert not ps.is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1


# ---- real ranks


def _sum_over(group: dist.ProcessGroup | None) -> int:
    value = torch.tensor(10 ** dist.get_rank())  # the sum shows which ranks took part
    dist.all_reduce(value, group=group)
    return int(value)


def _sums_over_every_kind(case: Case) -> dict[str, int]:
    case.initialize()
    sums = {kind: _sum_over(group) for kind, getter in GROUPS.items() if (group := getter()) is not None}
    ps.destroy_model_parallel()
    return sums | {"default": _sum_over(None), "groups left": len(dist.distributed_c10d._world.pg_map)}


def _then(first: Case, second: Case) -> tuple[dict[str, int], dict[str, int]]:
    return _sums_over_every_kind(first), _sums_over_every_kind(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Case(2, tp=2), Case(2)),
        (Case(4, tp=2, ep=2), Case(4, cp=2, instances=2)),
        (Case(4, pp=4), Case(4, pp=2, instances=2)),
    ],
    ids=str,
)
def test_collectives_over_every_group_and_again_with_other_sizes(first: Case, second: Case) -> None:
    for rank, answers in enumerate(run_distributed(_then, first.world, first, second)):
        for case, sums in zip((first, second), answers, strict=True):
            expected = {kind: ranks for kind, ranks in _expected(case, DEFAULT_ORDER, rank).items() if ranks}
            expected["default"] = list(range(case.world))
            assert sums.pop("groups left") == 1, case
            assert sums == {kind: sum(10**other for other in ranks) for kind, ranks in expected.items()}, (case, rank)


def _timeouts(minutes: float) -> tuple[set[float], float]:
    def seconds(group: dist.ProcessGroup | None) -> float:
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())

    before = seconds(dist.group.WORLD)
    ps.initialize_model_parallel(2, distributed_timeout_minutes=minutes)
    assert seconds(dist.group.WORLD) == before
    return {seconds(getter()) for getter in GROUPS.values()}, before


def test_every_group_but_the_default_one_has_the_time_limit_asked_for() -> None:
    for ours, default in run_distributed(_timeouts, 2, 7.5):
        assert ours == {450.0}
        assert default != 450.0


def _rank_0_reads_alone() -> bool:
    ps.initialize_model_parallel(2)
    if dist.get_rank() == 0:
        _check_every_getter(Case(2, tp=2), DEFAULT_ORDER, 0)
    return True


def test_getters_do_not_communicate() -> None:
    assert run_distributed(_rank_0_reads_alone, 2) == [True, True]


def _through_the_mesh() -> tuple[list[float], list[int]]:
    ps.initialize_model_parallel(num_distributed_optimizer_instances=2)
    mesh = ps.get_data_parallel_mesh()
    shard = torch.tensor([10.0 ** dist.get_rank()])
    whole = DTensor.from_local(shard, mesh, (Partial("sum"), Shard(0))).full_tensor()
    return whole.tolist(), [_sum_over(ps.get_device_mesh()[axis].get_group()) for axis in ("dp_replicate", "dp_shard")]


def test_tensors_live_on_the_mesh_of_optimizer_instances() -> None:
    answers = run_distributed(_through_the_mesh, 4)
    assert [whole for whole, _ in answers] == [[101.0, 1010.0]] * 4  # summed across instances, joined within one
    assert [sums for _, sums in answers] == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def _when_groups_stood(slow_rank: int) -> tuple[float, float]:
    """When this rank had made its last group, and when it was let go."""
    new_group, made = dist.new_group, [0.0]

    def late(*args, **options):
        if dist.get_rank() == slow_rank:
            time.sleep(0.05)
        group = new_group(*args, **options)
        made[0] = time.monotonic()
        return group

    with mock.patch.object(dist, "new_group", late):
        ps.initialize_model_parallel(2)
    return made[0], time.monotonic()


def test_no_rank_goes_on_under_gloo_before_all_have_their_groups() -> None:
    """A rank that closed its groups while another was still connecting would make that one fail."""
    times = run_distributed(_when_groups_stood, 2, 1)
    assert min(released for _, released in times) >= max(made for made, _ in times)
