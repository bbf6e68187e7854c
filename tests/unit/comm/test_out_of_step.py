"""A rank that the others left waiting says in which collective, of what, and where the others are."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import OutOfStepError
from core.comm import call, collectives, out_of_step, record
from core.comm.call import Position, positions
from core.comm.out_of_step import PATIENCE_S, is_failure_of_backend
from core.comm.record import recorded
from core.diagnostics import failures_explained
from core.distributed import finalize_model_grads
from core.tensor_parallel.mappings import column_parallel_linear, reduce_from_tensor_model_parallel_region
from tests.unit._ranks import fake_world
from tests.unit._spawn import RankFailure, give_up_soon, on_ranks, reach, run_distributed, wait_for
from tests.unit.distributed._toys import batches, build, loss_of, toy


def _explained(run: Any) -> str:
    try:
        # Else it may not be the limit's message.
        no_look = mock.patch.object(out_of_step.DeadlockWatch, "look", lambda self: None)
        with no_look, pytest.raises(OutOfStepError) as caught:
            run()
    finally:
        reach(f"rank {dist.get_rank()} has its message")
    # A rank that waits second in a group whose time is up hears that the connection was closed by the first.
    assert re.search("Timed out|closed|pair closure", str(caught.value))
    return str(caught.value)


def _stays_away(*waiting: int) -> str:
    """Keeps this rank busy elsewhere until the ranks that wait for it have their messages."""
    reach(f"rank {dist.get_rank()} stays away")
    wait_for(*(f"rank {rank} has its message" for rank in waiting))
    return ""


def _meet(group: dist.ProcessGroup, *ranks: int) -> None:
    """Waits until all of `ranks` have come to the calls that are to fail, recorded or about to be made."""
    reach(f"rank {dist.get_rank()} calls")
    wait_for(*(f"rank {rank} calls" for rank in ranks))
    give_up_soon(group)


@contextmanager
def _meeting_in(kind: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Makes two ranks meet once each has recorded a collective: this one the first of `kind`."""
    begin, is_first = record.CollectiveRecord.collective, iter([True])

    def begin_and_meet(self: Any, found: str, *call: Any, **where: Any) -> Any:
        begun = begin(self, found, *call, **where)
        if found == kind and next(is_first, False):
            _meet(group, 0, 1)
        return begun

    with mock.patch.object(record.CollectiveRecord, "collective", begin_and_meet):
        yield


def _one_rank_skips_a_micro_batch(kind: str, fields: dict[str, Any], collective: str) -> str:
    model = build(kind, toy(tied=False), group=dist.new_group(), **fields)
    rank = dist.get_rank()

    def step() -> None:
        with failures_explained(model), _meeting_in("all-reduce" if rank else collective, model.process_group):
            if rank == 0:
                loss_of(model, batches(0)[0]).backward()
                finalize_model_grads([model])
            else:  # this rank takes its step to be over, and measures its gradients
                norm = torch.ones(1)
                with recorded("all-reduce", "the gradient norm", norm, model.process_group):
                    dist.all_reduce(norm, group=model.process_group)

    return _explained(step)


@pytest.mark.parametrize(
    ("kind", "fields", "collective", "what"),
    [
        pytest.param(
            "ddp", {}, "all-reduce", "the gradients of bucket head.weight to embedding.weight", marks=pytest.mark.long
        ),
        pytest.param(
            *("zero1_overlap", {}, "reduce-scatter", "the gradients of bucket head.weight to blocks.1.down.bias"),
            marks=pytest.mark.long,
        ),
        ("zero2", {}, "reduce-scatter", "the gradients of bucket head.weight to embedding.weight"),
        ("fsdp2", {}, "all-gather", "the parameters of the root unit"),
    ],
)
def test_a_rank_left_behind_names_the_collective_and_the_other(kind, fields, collective, what):
    left, skipped = run_distributed(_one_rank_skips_a_micro_batch, 2, kind, fields, collective)
    assert re.search(rf"^rank 0 of 2 waited \d+ s for {collective} 1 of {what} \([\d.]+ \w+\), its call", left)
    assert "rank 1 waited in all-reduce 1 of the gradient norm (4 B) instead, its call" in left
    assert "look at rank 1 for a skipped micro-batch" in left
    assert re.search(r"^rank 1 of 2 waited \d+ s for all-reduce 1 of the gradient norm \(4 B\)", skipped)
    assert f"rank 0 waited in {collective} 1 of {what} (" in skipped


def _one_rank_skips_a_layer() -> str:
    group = dist.new_group()

    def forward() -> None:
        with _meeting_in("all-gather" if dist.get_rank() else "all-reduce", group):
            if dist.get_rank() == 0:
                reduce_from_tensor_model_parallel_region(torch.ones(4), group)
            else:
                column_parallel_linear(torch.ones(2, 1, 4), torch.ones(3, 4), None, group, sequence_parallel=True)

    return _explained(forward)


def test_a_layer_that_one_tensor_parallel_rank_skips_is_named():
    first, second = run_distributed(_one_rank_skips_a_layer, 2)
    reduced, gathered = "all-reduce 1 of partial sums of activations", "all-gather 1 of the input of a column-parallel"
    assert f"for {reduced} (16 B), its call 1" in first and f"rank 1 waited in {gathered} layer" in first
    assert f"for {gathered} layer (64 B), its call 1" in second and f"rank 0 waited in {reduced}" in second


def _one_rank_leaves_in_backward() -> str:
    model = build("fsdp2", toy(tied=False), group=dist.new_group())
    loss = loss_of(model, batches(dist.get_rank())[0])
    if dist.get_rank() == 1:
        return _stays_away(0)  # as a loader that waits for its data
    wait_for("rank 1 stays away")
    give_up_soon(model.process_group)

    def step() -> None:
        with failures_explained(model):
            loss.backward()

    return _explained(step)


def test_a_busy_rank_is_known_by_its_last_collective():
    message = run_distributed(_one_rank_leaves_in_backward, 2)[0]
    assert re.search(r"^rank 0 of 2 waited \d+ s for \S+ \d of the \w+ of unit [\w.]+ \(", message)
    assert re.search(
        r"rank 1 never came: it was in no collective, the last was all-gather 1 of the parameters of unit head \(.*\),"
        r" its call \d+, [123] fewer than this rank",
        message,
    )


def _one_of_four_stays_away() -> str:
    group = dist.new_group()
    tensor = torch.ones(4)
    with recorded("all-reduce", "the loss", tensor, group):
        dist.all_reduce(tensor, group=group)
    if dist.get_rank() == 2:
        return _stays_away(0, 1, 3)
    wait_for("rank 2 stays away")

    def run() -> None:
        with recorded("all-reduce", "the gradient norm", tensor, group):
            _meet(group, 0, 1, 3)
            dist.all_reduce(tensor, group=group)

    return _explained(run)


def test_ranks_that_wait_are_distinguished_from_absent_ones():
    first, second, _, fourth = run_distributed(_one_of_four_stays_away, 4)
    assert (
        "rank 2 never came: it was in no collective, the last was all-reduce 1 of the loss (16 B), its call 1" in first
    )
    for message, others in ((first, "ranks 1, 3"), (second, "ranks 0, 3"), (fourth, "ranks 0, 1")):
        assert f"{others} waited in the same" in message
        assert "; look at rank 2 for a skipped micro-batch" in message


def _one_rank_does_not_answer() -> str:
    group, tensor = dist.new_group(), torch.ones(4)
    if dist.get_rank() == 1:
        with mock.patch.object(record._Listener, "_answer"):  # as in a process that is paused
            return _stays_away(0)
    wait_for("rank 1 stays away")
    give_up_soon(group)

    def run() -> None:
        with (
            mock.patch.object(record, "_INTERVALS_WITHOUT_ANSWER", 1),
            recorded("all-reduce", "the loss", tensor, group),
        ):
            dist.all_reduce(tensor, group=group)

    return _explained(run)


def test_a_rank_that_does_not_answer_is_named():
    message = run_distributed(_one_rank_does_not_answer, 2)[0]
    assert "rank 1 has not answered: it has called nothing in this group, is paused, or has ended." in message
    assert "; look at rank 1 for" in message


def _fails_without_records() -> str:
    group = dist.new_group()
    if dist.get_rank() == 1:
        return _stays_away(0)
    wait_for("rank 1 stays away")
    give_up_soon(group)
    model = nn.Linear(2, 2)

    def run() -> None:
        with (
            mock.patch.dict(os.environ, SHARDSTACK_RECORD_COLLECTIVES="0"),
            failures_explained(model),
            recorded("all-reduce", "the loss", 16, group),
        ):
            dist.all_reduce(torch.ones(4), group=group)

    return _explained(run)


def test_without_records_a_failure_says_that_there_are_none():
    message = run_distributed(_fails_without_records, 2)[0]
    assert message.startswith(
        "rank 0 of 2 failed in a collective, and SHARDSTACK_RECORD_COLLECTIVES=0 keeps no record"
    )


def _fails_outside_of_any_record() -> str:
    model = build("ddp", toy(), group=dist.new_group())
    if dist.get_rank() == 1:
        return _stays_away(0)
    wait_for("rank 1 stays away")
    give_up_soon(model.process_group)

    def step() -> None:
        with failures_explained(model):
            dist.all_reduce(torch.ones(1), group=model.process_group)

    return _explained(step)


def test_the_flight_recorder_names_collectives_of_other_code():
    message = run_distributed(_fails_outside_of_any_record, 2)[0]
    assert re.match(
        r"rank 0 of 2 failed in a collective that was not the wrapper's, after broadcast \d+ of initial values "
        r"\(28 B\) in one of 2 ranks\. ",
        message,
    )
    # Gloo's recorder retires a collective that fails a moment after the caller has its error, which may come first.
    found = re.search(
        r"Torch's flight recorder has rank 0 at gloo:all_reduce, number \d+( \(over\))?; rank 1 at", message
    )
    assert found is not None
    assert ("look at what the ranks do there" if found[1] else "look at rank 1.") in message


def _nccls_entry(group: Any, number: int, state: str) -> dict[str, Any]:
    """Returns an entry as NCCL's recorder has it."""
    return {
        "process_group": [group.group_name, "dp"],
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": number,
        "is_p2p": False,
        "state": state,
        "retired": state == "completed",
    }


def _waits_as_under_nccl() -> str:
    group, rank = dist.new_group(), dist.get_rank()
    with recorded("all-reduce", "the gradient norm", torch.ones(4), group):
        dist.all_reduce(torch.ones(4), group=group)
    entries = [_nccls_entry(group, 56, "completed")] + [_nccls_entry(group, 57, "started")] * (rank != 1)
    with mock.patch.object(call, "flight_recorder", lambda: entries):
        if rank == 1:
            return _stays_away(0, 2)
        wait_for("rank 1 stays away")

        def run() -> None:
            with recorded("all-reduce", "the loss", torch.ones(4), group):
                _meet(group, 0, 2)
                dist.all_reduce(torch.ones(4), group=group)

        message = _explained(run)
        wait_for("rank 0 has its message", "rank 2 has its message")  # until then the other asks for these entries
        return message


def test_the_flight_recorder_comes_first_where_it_has_the_call():
    for message in run_distributed(_waits_as_under_nccl, 3)[::2]:
        assert (
            "which did not complete (torch's flight recorder has ranks 0, 2 at nccl:all_reduce, number 57; rank 1 at "
            "nccl:all_reduce, number 56 (over)): rank"
        ) in message
        assert "; look at rank 1 for a skipped micro-batch" in message


def _positions_under_gloo() -> tuple[list[Position | None], ...]:
    group, late = dist.new_group(), dist.new_group()
    names = (group.group_name, late.group_name)
    dist.all_reduce(torch.ones(2), group=group)
    work = dist.all_reduce(torch.ones(2), group=late, async_op=True) if dist.get_rank() == 0 else None
    dist.barrier()
    found = [positions().get(name) for name in names]
    record._publish_all()
    dist.barrier()
    of_other = [record.flight_recorder_of(1 - dist.get_rank()).get(name) for name in names]
    if work is None:
        work = dist.all_reduce(torch.ones(2), group=late, async_op=True)
    work.wait()
    return found, of_other


def test_positions_are_those_of_torchs_own_recorder():
    (first, of_second), (second, of_first) = run_distributed(_positions_under_gloo, 2)
    ended, waiting = (Position("gloo:all_reduce", 1, is_over=over) for over in (True, False))
    assert first == of_first == [ended, waiting]
    assert second == of_second == [ended, None]


def test_only_backend_failures_are_taken_for_ranks_out_of_step():
    assert is_failure_of_backend(
        RuntimeError("[x/gloo/unbound_buffer.cc:78] Timed out waiting 10ms for recv operation")
    )
    assert is_failure_of_backend(RuntimeError("[...] Connection closed by peer [127.0.0.1]:1234"))
    assert is_failure_of_backend(RuntimeError("Application timeout caused pair closure"))
    assert is_failure_of_backend(
        RuntimeError("[enforce fail at .../gloo/transport/tcp/pair.cc:1] op.preamble.length <= op.nbytes. 8 vs 4")
    )
    assert not is_failure_of_backend(RuntimeError("[.../gloo/transport/tcp/device.cc:1] bind: Address already in use"))
    assert is_failure_of_backend(dist.DistBackendError("anything"))
    assert not is_failure_of_backend(RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"))
    assert not is_failure_of_backend(RuntimeError("DataLoader timed out after 5 seconds"))
    assert not is_failure_of_backend(TimeoutError("timed out"))
    assert not is_failure_of_backend(OutOfStepError("timed out"))


def test_in_a_large_world_only_the_first_ranks_compare_with_all():
    store = dist.HashStore()  # torch's fake one counts nothing
    with fake_world(rank=3, world_size=2 * record.MOST_ASKING), mock.patch.object(record, "_store", lambda: store):
        messages = []
        for _ in range(record.MOST_ASKING + 1):
            with mock.patch.object(record, "ask_other_ranks") as asked:
                call = recorded("all-reduce", "the loss", 16)
                with pytest.raises(OutOfStepError) as caught:
                    call.explain(dist.DistBackendError("timed out"))
                messages.append((asked.called, str(caught.value)))
        assert [asked for asked, _ in messages] == [True] * record.MOST_ASKING + [False]
        assert f"all-reduce {record.MOST_ASKING + 1} of the loss (16 B)" in messages[-1][1]
        assert "8 ranks failed before it, and their messages say where the others are" in messages[-1][1]


def test_ranks_that_came_are_not_blamed():
    """A rank that waits in the same collective, or is through with it, is not behind; one that waits elsewhere is."""
    with fake_world(rank=0, world_size=2):
        call = recorded("all-reduce", "the loss", 16)

    def state(*entries: list[Any]) -> tuple[str, bool]:
        return out_of_step._state_of({"num_calls": 9, "calls": list(entries)}, call)

    ended, waiting = ([1, 1, "all-reduce", "the loss", 16, 0.0, at, False] for at in (1.0, None))
    later = [9, 3, "all-gather", "the batch", 16, 0.0, None, False]
    recovered, failed = ([number, 1, "all-gather", "the shapes", 16, 0.0, None, True] for number in (2, 10))
    assert state(waiting) == ("waited in the same", False)
    assert state(waiting, later) == ("waited in the same", False)
    assert state(ended, later) == ("was through with it", False)
    elsewhere = "waited in all-gather 3 of the batch (16 B) instead, its call 9, 8 more than this rank"
    assert state(later) == state(recovered, later) == (elsewhere, True)
    assert "waited in all-gather 1 of the shapes" in state(failed)[0]
    assert out_of_step._state_of(None, call).is_behind and state()[1]


# ---- before the time limit: ranks that wait for each other, and ranks that wait for a slow one


class _Skipping(nn.Module):
    """Layers of one size, so that a gather of one could pass for that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else torch.tanh(layer(x))
        return x.sum()


def _skips(kind: str, skipped: int) -> None:
    model = build(kind, _Skipping(), unit_classes=(nn.Linear,))
    for step in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 6), skipped if step == dist.get_rank() == 1 else None).backward()
        finalize_model_grads([model])


@pytest.mark.parametrize(("kind", "skipped"), [("zero3", 1), ("fsdp2", 3)])
def test_a_unit_that_one_rank_skips_is_named_at_once(kind, skipped):
    with pytest.raises(RankFailure) as caught:
        run_distributed(_skips, 2, kind, skipped)
    report = str(caught.value)
    assert f"unit layers.{skipped} " in report
    assert "look at rank 1" in report
    assert "name its parameters in replicated, or call it with a dummy input on all" in report
    assert "Timed out waiting" not in report  # the backend's limit


@on_ranks(3)
def test_a_chain_of_waiting_ranks_is_waited_for() -> None:
    """Rank 0 waits for 1 in one group while 1 waits for 2, which is slow: no two wait for each other."""
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(4 * PATIENCE_S)
    if rank:
        collectives.all_reduce(torch.ones(8), other, what="numbers of the second pair")
    if rank < 2:
        collectives.all_reduce(torch.ones(8), pair, what="numbers of the first pair")
