"""Every getter against an oracle, for every order and from every rank, in simulated worlds."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch.distributed as dist

from core import parallel_state as ps
from core.base.errors import ParallelConfigError
from tests.unit._quick import quick
from tests.unit._ranks import fake_world
from tests.unit.process_groups._oracle import DEFAULT_ORDER, GROUPS, Case, check_every_getter, experts_fit, ranks_of

ORDERS = ["-".join(tokens) for tokens in permutations(("tp", "cp", "ep", "dp", "pp"))]


@pytest.mark.parametrize(
    ("case", "ranks_a_world"),
    quick(
        [
            (Case(8, tp=2, pp=2), 8),
            (Case(8, tp=2, cp=2, ep=2), 2),
            (Case(8, pp=2, cp=2), 8),
            (Case(16, tp=2, pp=2, cp=2, ep=2), 2),
            (Case(16, tp=2, cp=2, instances=2), 2),
            (Case(16, pp=2, cp=2, instances=2), 2),
            (Case(16, pp=2, cp=2, ep=2, instances=2), 2),
        ],
        lambda case: case[0] in (Case(8, tp=2, cp=2, ep=2), Case(16, pp=2, cp=2, ep=2, instances=2)),
    ),
    ids=str,
)
def test_every_getter_under_every_order(case: Case, ranks_a_world: int) -> None:
    fitting = 0
    for number, order in enumerate(ORDERS):
        fits = experts_fit(case, order)
        fitting += fits
        for step in range(ranks_a_world):  # over the orders every rank has its turn
            rank = (number + step * (case.world // ranks_a_world)) % case.world
            with fake_world(rank, case.world):
                if fits:
                    case.initialize(order)
                    check_every_getter(case, order, rank)
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
            check_every_getter(case, order, rank)


def test_optimizer_instances_shard_over_the_inner_part() -> None:
    with fake_world(5, 16):
        ps.initialize_model_parallel(2, context_parallel_size=2, num_distributed_optimizer_instances=2)
        assert ranks_of(GROUPS["dp-cp"]()) == [1, 3, 5, 7, 9, 11, 13, 15]
        assert ranks_of(GROUPS["partial dp-cp"]()) == [1, 3, 5, 7]
        assert ranks_of(GROUPS["inter"]()) == [5, 13]
        assert ranks_of(GROUPS["intra"]()) == list(range(8))
        assert ps.get_data_parallel_mesh().mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]


def test_experts_have_a_mesh_of_their_replicas() -> None:
    with fake_world(5, 16):
        ps.initialize_model_parallel(2, expert_model_parallel_size=2, num_distributed_optimizer_instances=2)
        assert ps.experts_are_apart()
        assert ps.get_expert_data_parallel_mesh().mesh.tolist() == [[1, 5], [9, 13]]
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(2)
        assert not ps.experts_are_apart()
        assert ps.get_expert_data_parallel_mesh().mesh.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_a_model_and_its_gradients_share_no_process_group() -> None:
    """A lane may reduce gradients while the model exchanges tokens or parts of a sequence."""
    with fake_world(1, 2):
        ps.initialize_model_parallel(expert_model_parallel_size=2)
        assert ranks_of(ps.get_expert_model_parallel_group()) == ranks_of(ps.get_data_parallel_group()) == [0, 1]
        assert ps.get_expert_model_parallel_group() is not ps.get_data_parallel_group()
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(context_parallel_size=2)
        of_wrappers = ps.get_data_parallel_group(with_context_parallel=True)
        assert ps.get_context_parallel_group() is not of_wrappers
        assert ps.get_data_parallel_mesh().get_group() is of_wrappers


def test_groups_of_equal_ranks_are_one_process_group() -> None:
    with fake_world(1, 8):
        ps.initialize_model_parallel(2)
        assert ps.get_data_parallel_group() is ps.get_data_parallel_group(with_context_parallel=True)
        assert ps.get_data_parallel_mesh().get_group() is ps.get_data_parallel_group()
        assert ps.get_device_mesh().get_group("tp") is ps.get_tensor_model_parallel_group()
        # the default group, this rank alone, tp, dp, and one of ours that spans the world
        assert len(dist.distributed_c10d._world.pg_map) == 5
        assert ps.get_intra_distributed_optimizer_instance_group() is not dist.group.WORLD
