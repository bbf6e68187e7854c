"""A wrapped model has the parameters with which it was wrapped, where they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.base.errors import OptimizerError, WrapError
from core.distributed import finalize_model_grads
from core.distributed.guards.changed_models import ParametersStay
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.main_params import MainParam
from core.optimizer.optimizer import MegatronOptimizer
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import WRAPPERS, batches, build, loss_of, toy


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
            mock.patch.object(ParametersStay, "_check", autospec=True, side_effect=ParametersStay._check) as wrapper,
            mock.patch.object(
                MainParam, "check_storage", autospec=True, side_effect=MainParam.check_storage
            ) as storage,
        ):
            for _ in range(3):
                _train_step(model, optimizer)
        expected = (3, 3 * trained) if kind == "fsdp2" else (3, 0)
        assert (wrapper.call_count, storage.call_count) == expected, kind


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
@on_ranks(1)
def test_no_loaded_state_is_gathered_after_one_has_moved(kind: str) -> None:
    model = build(kind, toy())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    scalars = optimizer.state_scalars()
    _moves(model.module)
    with pytest.raises(WrapError, match=CHANGES[_moves]):
        optimizer.load_state_scalars(scalars)
