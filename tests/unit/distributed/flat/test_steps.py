"""The wrapper on buffers and its module's parameters: gathered in time, found where they were, stepped by no other
optimizer.

With `steps.py` this tests `whole_parameters.py`, and how `engine/engine.py` finds the wrapper of a parameter.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import ShardstackError
from core.comm import collectives
from core.distributed import finalize_model_grads
from core.distributed.distributed_data_parallel import ParamAndGradBuffer
from core.distributed.flat import unit
from tests.unit._lane import called_before_waiting
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import BUFFERED, batches, build, gradients, loss_of, oracle, toy

GATHERED_LATER = [kind for kind, fields in BUFFERED.items() if "overlap_param_gather" in fields]


# ---- parameters gathered during forward


def _update_shards(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for group in model.bucket_groups:
            group.local_param_shard.fill_(value)


def _gathers_during_forward(kind: str, read: str) -> None:
    model = build(kind, toy(tied=False))
    gate, gather = threading.Event(), collectives.all_gather
    reads = {
        "forward": lambda: model(batches(0)[0]),
        "state_dict": model.module.state_dict,
        "evaluation": model.disable_forward_pre_hook,
    }

    def gather_late(*args, **options):
        assert gate.wait(600)
        gather(*args, **options)

    never = mock.patch.object(unit, "make_pending") if read == "without waiting" else nullcontext()
    with mock.patch.object(collectives, "all_gather", gather_late), never:
        _update_shards(model, 0.25)
        model.start_param_sync()  # returns although nothing has been gathered
        with called_before_waiting(lambda task: gate.set()):
            reads.get(read, model.module.head.weight.sum)()
            assert gate.is_set() == (read != "without waiting")
            weights = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        gate.set()  # if nothing has waited
    assert all(torch.equal(w, torch.full_like(w, 0.25)) for w in weights), "stale parameters"
    model.finish_param_sync()


@pytest.mark.parametrize("kind", GATHERED_LATER)
@on_ranks(2)
def test_parameters_are_gathered_while_other_code_runs(kind: str) -> None:
    for read in ("forward", "state_dict", "evaluation", "directly"):
        _gathers_during_forward(kind, read)


@on_ranks(2)
def test_parameters_that_did_not_wait_would_be_seen_to_be_stale() -> None:
    with pytest.raises(AssertionError, match="stale parameters"):
        _gathers_during_forward("zero1_overlap", "without waiting")


@on_ranks(2)
def test_hooks_are_switched_off_for_an_evaluation_and_on_again() -> None:
    model = build("zero1_overlap", toy())
    with pytest.raises(ShardstackError, match="while the hooks are enabled"):
        model.enable_forward_pre_hook()
    model.disable_forward_pre_hook()
    with pytest.raises(ShardstackError, match="no forward pre-hooks"):
        model.disable_forward_pre_hook()
    _update_shards(model, 0.5)
    model.start_param_sync()  # without hooks nothing would wait later
    assert all((p == 0.5).all() for p in model.parameters())
    model.enable_forward_pre_hook()


# ---- torch's own view of the module


@pytest.mark.parametrize("kind", ["ddp_overlap", "zero1"])
@on_ranks(1)
def test_buffers_is_megatrons_list_and_torchs_method(kind: str) -> None:
    module = toy()
    plain = copy.deepcopy(module)
    model = build(kind, module)
    assert all(isinstance(buffer, ParamAndGradBuffer) for buffer in model.buffers) and len(model.buffers) == 1
    assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in plain.buffers()]
    assert list(model.buffers(recurse=False)) == []
    assert [name for name, _ in model.named_buffers()] == ["module.offset"]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.to("cpu").float().train().eval()
    for index, tokens in enumerate(batches(0)):
        with nullcontext() if index == 2 else model.no_sync():
            loss_of(model, tokens).backward()
    model.finish_grad_sync()
    expected = oracle(world_size=1)
    assert {n: g.tolist() for n, g in gradients(model).items()} == {n: g.tolist() for n, g in expected.items()}
    outer = nn.Sequential(model)
    assert [name for name, _ in outer.named_buffers()] == ["0.module.offset"]


# ---- who may step


@on_ranks(1)
def test_a_plain_torch_optimizer_over_sharded_buffers_raises() -> None:
    for kind in BUFFERED:
        model = build(kind, toy())
        other = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW([*other.parameters(), *model.parameters()])
        loss_of(model, batches(0)[0]).backward()
        finalize_model_grads([model])
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # of other parameters: allowed
        if kind.startswith("zero"):
            with pytest.raises(ShardstackError, match=r"AdamW was to step.*shardstack\.optimizer\.shard_optimizer"):
                optimizer.step()
        else:
            optimizer.step()


# ---- memory


@pytest.mark.parametrize("kind", ["ddp", "zero1_overlap"])
@on_ranks(2)
def test_gradient_memory_stays_in_place_and_padding_stays_zero(kind: str) -> None:
    model = build(kind, toy())
    places = []
    for _ in range(3):
        model.zero_grad_buffer()
        for tokens in batches(dist.get_rank()):
            with model.no_sync():
                loss_of(model, tokens).backward()
        places.append([p.main_grad.data_ptr() for p in model.parameters() if p.requires_grad])
        finalize_model_grads([model])
        for buffer in model.buffers:
            used = torch.zeros(buffer.numel, dtype=torch.bool)
            for start, end, _ in buffer.param_index_map.values():
                used[start:end] = True
            assert not buffer.grad_data[~used].any(), "padding is not zero"
    assert places[0] == places[1] == places[2]
