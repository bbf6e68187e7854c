"""Groups of real ranks: collectives over each, their time limit, and their mesh."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from core import parallel_state as ps
from tests.unit._spawn import has_reached, on_ranks, reach, run_distributed, wait_for
from tests.unit.process_groups._oracle import DEFAULT_ORDER, GROUPS, Case, check_every_getter, expected_groups


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
            expected = {kind: ranks for kind, ranks in expected_groups(case, DEFAULT_ORDER, rank).items() if ranks}
            expected["default"] = list(range(case.world))
            assert sums.pop("groups left") == 1, case
            assert sums == {kind: sum(10**other for other in ranks) for kind, ranks in expected.items()}, (case, rank)


@on_ranks(2)
def test_every_group_but_the_default_has_the_asked_time_limit() -> None:

    def seconds(group: dist.ProcessGroup | None) -> float:
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())

    before = seconds(dist.group.WORLD)
    ps.initialize_model_parallel(2, distributed_timeout_minutes=7.5)
    assert seconds(dist.group.WORLD) == before
    assert {seconds(getter()) for getter in GROUPS.values()} == {450.0} and before != 450.0


@on_ranks(2)
def test_getters_do_not_communicate() -> None:
    ps.initialize_model_parallel(2)
    if dist.get_rank() == 0:
        check_every_getter(Case(2, tp=2), DEFAULT_ORDER, 0)


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


def _num_groups_made() -> int:
    """Returns how many groups every rank makes."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    return new_group.call_count


@on_ranks(2)
def test_no_rank_goes_on_under_gloo_before_all_have_their_groups() -> None:
    """A rank that closed its groups while another was still connecting would make that one fail."""
    num_groups, made = _num_groups_made(), 0
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def late(*args: Any, **options: Any) -> Any:
        nonlocal made
        group, made = new_group(*args, **options), made + 1
        if made == num_groups:
            wait_for("rank 0 waits")
            reach("rank 1 has its groups")
        return group

    def waits(*args: Any, **options: Any) -> Any:
        reach("rank 0 waits")
        return all_reduce(*args, **options)

    patched = {"new_group": late} if dist.get_rank() == 1 else {"all_reduce": waits}
    with mock.patch.multiple(dist, **patched):
        ps.initialize_model_parallel(2)
    has_its_groups = has_reached("rank 1 has its groups")
    reach("rank 0 waits")  # if it has not waited
    assert has_its_groups
