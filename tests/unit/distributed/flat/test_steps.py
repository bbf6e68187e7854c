"""The wrapper on buffers and its module's parameters: gathered in time, found where they were, stepped by no other
optimizer.

With `steps.py` this tests `whole_parameters.py` and `owners.py`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import OptimizerError, ShardstackError, WrapError
from core.comm import collectives
from core.distributed import finalize_model_grads
from core.distributed.distributed_data_parallel import ParamAndGradBuffer
from core.distributed.flat import unit
from core.distributed.flat.steps import ParamPlacement
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.main_params import MainParam
from core.optimizer.optimizer import MegatronOptimizer
from tests.unit._lane import called_before_waiting
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import BUFFERED, WRAPPERS, batches, build, gradients, loss_of, oracle, toy

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


def _moves(module: nn.Module) -> None:
    module.blocks[1].up.weight.data = module.blocks[1].up.weight.data.clone()


def _assigns(module: nn.Module) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def _adds(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    module.register_parameter(name, nn.Parameter(torch.zeros(shape)))


CHANGES: dict[Callable[[nn.Module], Any], str] = {
    _moves: r"the storage of parameter blocks\.1\.up\.weight was replaced",
    lambda m: m.blocks[1].up.double(): r"the storage of parameter blocks\.1\.up\.weight was replaced",
    _assigns: r"parameter embedding\.weight was replaced",
    lambda m: _adds(m.blocks[1].up, "weight", (5, 7)): r"parameter blocks\.1\.up\.weight was replaced",
    lambda m: _adds(m.blocks[1], "late", (3,)): r"parameter blocks\.1\.late was replaced, added",
    lambda m: m.frozen.requires_grad_(): r"parameter frozen was replaced, added or made trainable",
    lambda m: m.blocks[1].up.register_parameter("bias", None): r"parameter blocks\.1\.up\.bias was removed",
}
"""Changes of a wrapped model, and what the next call says."""


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2_overlap"])
@on_ranks(1)
def test_a_replaced_parameter_is_named_at_the_next_sync(kind: str) -> None:
    for change, message in CHANGES.items():
        model = build(kind, toy())
        model.finish_grad_sync()
        model.zero_grad_buffer()
        change(model.module)
        with pytest.raises(WrapError, match=message):
            model.finish_grad_sync()
        with pytest.raises(WrapError, match=message):
            model.start_param_sync()


def _train_step(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    model.zero_grad_buffer()
    loss_of(model, batches(0)[0]).backward()
    finalize_model_grads([model])
    optimizer.step()


@pytest.mark.parametrize("kind", ["ddp", "zero1_overlap", "zero2"])
@on_ranks(1)
def test_no_step_updates_parameters_after_one_has_moved(kind: str) -> None:
    for change, message in CHANGES.items():
        model = build(kind, toy())
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
        _train_step(model, optimizer)
        model.finish_param_sync()
        change(model.module)
        before = {name: value.clone() for name, value in model.module.state_dict().items()}
        model.zero_grad_buffer()
        with pytest.raises((WrapError, OptimizerError), match=message):
            model.finish_grad_sync()
            optimizer.step()
        after = model.module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


@on_ranks(2)
def test_parameters_are_checked_once_a_step() -> None:
    trained = sum(parameter.requires_grad for parameter in toy().parameters())
    for kind in WRAPPERS:
        model = build(kind, toy())
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
        _train_step(model, optimizer)
        with (
            mock.patch.object(ParamPlacement, "check", autospec=True, side_effect=ParamPlacement.check) as wrapper,
            mock.patch.object(
                MainParam, "check_storage", autospec=True, side_effect=MainParam.check_storage
            ) as storage,
        ):
            for _ in range(3):
                _train_step(model, optimizer)
        expected = (0, 3 * trained) if kind == "fsdp2" else (3, 0)
        assert (wrapper.call_count, storage.call_count) == expected, kind


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
            with pytest.raises(ShardstackError, match=r"AdamW was to step.*get_megatron_optimizer"):
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
