"""Muon gives the bits of one process under every wrapper and number of ranks, and continues from any checkpoint."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.base.errors import ConfigError, warn_once
from core.base.module_protocol import FusedRows
from core.distributed import TorchFullyShardedDataParallelConfig, finalize_model_grads, wrap_model
from core.models.gpt import GPTModel
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.muon import matrices, matrix_owners
from core.optimizer.param_groups import ParamKey
from core.transformer import TransformerConfig
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_anywhere, run_distributed
from tests.unit._whole import whole
from tests.unit.dist_checkpointing._pieces import Shapes
from tests.unit.optimizer._squares import (
    CONFIGS,
    FLAT,
    Squares,
    assert_saved,
    build,
    continue_from,
    state_of,
    train,
    write,
)

STEPS = 2
SHAPES: Shapes = {
    "qkv.weight": ((72, 40), 0),
    "attention.weight": ((32, 12), 0),
    "frozen.weight": ((10, 13), 0),
    "gated.weight": ((20, 24), 0),
    "down.weight": ((24, 10), 1),
    "experts.weight": ((3, 6, 10), 1),
    "thin.weight": ((1, 31), None),
    "plain.weight": ((33, 17), None),
    "embedding.weight": ((14, 6), 0),
    "norm.weight": ((37,), None),
}
MARKS: dict[str, dict[str, Any]] = {
    "qkv.weight": {"fused_rows": FusedRows((("q", 16), ("k", 4), ("v", 4)), head_rows=4)},
    "attention.weight": {"fused_rows": FusedRows((("q", 4), ("gate", 4), ("k", 4), ("v", 4)), head_rows=4)},
    "gated.weight": {"fused_rows": FusedRows((("gate", 1), ("up", 1)))},
    "experts.weight": {"fused_rows": FusedRows((("gate", 1), ("up", 1)))},
    "embedding.weight": {"is_embedding_or_output_parameter": True},
}


class _Squares(Squares):
    """One module is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(SHAPES, 40.0, dtype)
        for name, param in self.named_parameters():
            vars(param).update(MARKS.get(name, {}))
            with torch.no_grad():
                param.copy_((param / 50).sin())
        self.get_parameter("frozen.weight").requires_grad_(False)


def _run(wrapper: str, tp: int, settings: dict[str, Any]) -> tuple[Any, MegatronOptimizer]:
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    settings = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1} | settings
    return build(lambda: _Squares(dtype), wrapper, tp, settings)


def _whole_state(wrapper: str, tp: int, settings: dict[str, Any], bucket: int) -> dict[str, Tensor]:
    before, matrix_owners.BUCKET_ELEMENTS = matrix_owners.BUCKET_ELEMENTS, bucket
    try:
        model, optimizer = _run(wrapper, tp, settings)
        train(model, optimizer, STEPS)
        state = state_of(model, optimizer)
        return {name: whole(tensor).clone() for name, tensor in state.items()}
    finally:
        matrix_owners.BUCKET_ELEMENTS = before


def _differing(wrapper: str, tp: int, settings: dict[str, Any], expected: dict[str, Tensor], bucket: int) -> list[str]:
    state = _whole_state(wrapper, tp, settings, bucket)
    assert state.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])]


CUT = [
    (2, "zero1", 2),
    (4, "zero1", 2),
    (4, "fsdp2", 2),
    (4, "ddp", 2),
    (4, "hybrid zero1", 1),
    (4, "hybrid fsdp2", 1),
]
CASES = [
    *((ranks, wrapper, 1) for ranks in (2, 4) for wrapper in CONFIGS if "hybrid" not in wrapper),
    *CUT,
    *((16, "fsdp2", 1), (16, "zero1", 1)),
]
HOLDERS = [("shards", "owners"), ("owners", "shards"), ("owners", "owners")]


def _is_quick(case: tuple[int, str, int, str]) -> bool:
    """Every wrapper with either holder, and on either number of ranks, but not each of these on each."""
    ranks, *_, holder = case
    if case[:3] in CUT:
        return CUT.index(case[:3]) % 2 == (holder == "owners")
    return ranks < 16 and holder == ("owners" if ranks == 4 else "shards")


@pytest.mark.parametrize(
    ("ranks", "wrapper", "tp", "holder"),
    quick([(*case, holder) for case in CASES for holder in ("shards", "owners")], _is_quick),
    ids=str,
)
def test_every_wrapper_equals_one_process(ranks: int, wrapper: str, tp: int, holder: str):
    settings = {"muon_momentum_holder": holder, "bf16": wrapper == "zero2", "muon_split_qkv_per_head": tp > 1}
    settings["muon_scalar_optimizer"] = "lion" if wrapper in ("zero1", "fsdp2") else "adam"
    expected = _whole_state("serial", 1, settings, matrix_owners.BUCKET_ELEMENTS)
    assert run_distributed(_differing, ranks, wrapper, tp, settings, expected, 400) == [[]] * ranks


def _write(wrapper: str, tp: int, settings: dict[str, Any], folder: str) -> None:
    write(*_run(wrapper, tp, settings), STEPS, folder)


def _continue(wrapper: str, tp: int, settings: dict[str, Any], source: str, target: str) -> None:
    continue_from(source, *_run(wrapper, tp, settings), STEPS, target)


MOVES = [
    ((2, "zero1", 1), (4, "fsdp2", 2)),
    ((4, "zero3", 1), (1, "serial", 1)),
    ((1, "serial", 1), (2, "zero3 tensor", 1)),
    ((2, "ddp", 1), (4, "hybrid zero1", 1)),
    ((4, "fsdp2", 2), (2, "zero2", 1)),
]


@pytest.mark.parametrize(
    ("writer", "reader", "holders"),
    quick(
        [(*move, holders) for move in MOVES for holders in HOLDERS],
        lambda case: HOLDERS[MOVES.index(case[:2]) % len(HOLDERS)] == case[2],
    ),
)
def test_checkpoint_continues_under_any_wrapper(tmp_path: Path, writer, reader, holders):
    scalar = "lion" if writer[1] == "zero1" else "adam"
    settings = {"bf16": reader[1] == "zero2", "muon_scalar_optimizer": scalar}
    first, second = (settings | {"muon_momentum_holder": holder} for holder in holders)
    run_anywhere(_write, *writer, first, str(tmp_path / "first"))
    run_anywhere(_continue, *reader, second, str(tmp_path / "first"), str(tmp_path / "second"))
    assert_saved(tmp_path / "second", *_run("serial", 1, first), 2 * STEPS)


def _updates_of_micro_batches(wrapper: str, expected: dict[str, Tensor]) -> tuple[list[str], int]:
    model, optimizer = _run(wrapper, 1, {})
    with mock.patch.object(matrices, "orthogonalize", side_effect=matrices.orthogonalize) as counted:
        train(model, optimizer, STEPS, micro_batches=2)
    state = state_of(model, optimizer)
    return [name for name, t in expected.items() if not torch.equal(t, whole(state[name]))], counted.call_count


@pytest.mark.parametrize("wrapper", ["zero2", "fsdp2"])
def test_a_step_has_one_update_for_all_micro_batches(wrapper: str):
    model, optimizer = _run("serial", 1, {})
    train(model, optimizer, STEPS, micro_batches=2)
    expected = {name: t.detach().clone() for name, t in state_of(model, optimizer).items()}
    ranks = run_distributed(_updates_of_micro_batches, 2, wrapper, expected)
    assert [differing for differing, _ in ranks] == [[], []]
    matrices = len(optimizer.optimizer._matrices)  # type: ignore[attr-defined]
    assert sum(count for _, count in ranks) == STEPS * matrices


@on_ranks(2)
def test_a_model_that_starts_on_meta_keeps_its_matrices():
    parallel_state.initialize_model_parallel(1)
    tables = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, gated_linear_unit=True)
            model = GPTModel(config, vocab_size=64, max_sequence_length=16)
        wrapped = wrap_model(model, config, TorchFullyShardedDataParallelConfig())
        tables.append(get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=0.1), [wrapped]).describe())
    on_device, on_meta = tables
    assert on_device == on_meta
    assert re.search(r"linear_qkv\.weight +32x32 +q +muon", on_device) and "embedding or output" in on_device


@on_ranks(4)
def test_a_matrix_of_one_row_on_four_ranks_is_updated():
    torch.manual_seed(3)
    model = nn.Linear(24, 1)
    start = model.weight.detach().clone()
    parallel_state.initialize_model_parallel(1)
    wrapped = wrap_model(model, None, FLAT(data_parallel_sharding_strategy="optim"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_once.cache_clear()
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=1.0, weight_decay=0.0), [wrapped])
    wrapped(torch.ones(2, 24)).sum().backward()
    finalize_model_grads([wrapped])
    optimizer.step()
    moved = start - model.weight.detach()  # of a row, the update is the row over its norm
    assert torch.allclose(moved / moved.norm(), torch.full((1, 24), 24**-0.5))
    messages = [str(w.message) for w in caught]
    assert messages == ["4 ranks share Muon's update of 1 matrices, so that some own none"]


def _sent_elements(wrapper: str) -> tuple[int, int]:
    """Returns the elements that this rank sends to others in an update, and those of all matrices."""
    _, optimizer = _run(wrapper, 1, {})
    rule = optimizer.optimizer
    routes = [route for both in rule._owners._routes for route in both]  # type: ignore[attr-defined]
    rank = rule._owners.rank  # type: ignore[attr-defined]
    sent = [part for route in routes for to, parts in enumerate(route[0]) if to != rank for part in parts]
    return sum(part.numel for part in sent), sum(len(m.rows) * m.columns for m in rule._matrices)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wrapper", "copies"), [("ddp", 3), ("zero3 tensor", 0)])
def test_replicas_send_updates_alone_and_whole_matrices_stay(wrapper: str, copies: int):
    ranks = run_distributed(_sent_elements, 4, wrapper)
    assert sum(sent for sent, _ in ranks) == copies * ranks[0][1]


def test_owners_share_the_cost_and_keep_what_they_hold():
    assert matrix_owners.assign_owners([8, 5, 4, 3], [[], [], [], []], 2) == [0, 1, 1, 0]
    assert matrix_owners.assign_owners([4, 4], [[1], []], 2) == [1, 0]
    assert matrix_owners.assign_owners([9, 1], [[1], [1]], 2) == [1, 1]  # every matrix is whole on some rank
    assert matrix_owners.assign_owners([9], [[0, 1, 2]], 3) == [0]


_STAGES = {"layers.0.weight": (4, 4), "layers.1.weight": (4, 6), "layers.1.bias": (4,)}


def _builds_on_stages(settings: dict[str, Any], optimizers: dict[str, str], frozen: tuple[str, ...]) -> str:
    """Returns the error of this rank's stage, which has one of two layers; and else steps."""
    parallel_state.initialize_model_parallel(1, 2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = nn.Module()
    model.layers = nn.ModuleDict({str(stage): nn.Module()})
    for name, shape in _STAGES.items():
        if f".{stage}." in name:
            parameter = nn.Parameter(torch.ones(shape), requires_grad=name not in frozen)
            model.layers[str(stage)].register_parameter(name.rpartition(".")[2], parameter)
    overrides = {ParamKey(name=name): {"optimizer": kind} for name, kind in optimizers.items()}
    config = OptimizerConfig(optimizer="muon", lr=0.1, **settings)
    try:
        optimizer = get_megatron_optimizer(config, [model], overrides or None)
    except ConfigError as error:
        return str(error)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.share_state() if hasattr(optimizer, "share_state") else optimizer.state_tensors()
    return ""


@pytest.mark.parametrize(
    ("settings", "optimizers", "frozen", "message"),
    [
        ({"muon_exclude": ("layers.0.*",)}, {}, (), ""),
        ({"muon_exclude": ("layers.1.*",), "muon_momentum_holder": "owners"}, {}, (), ""),
        ({"muon_include": ("layers.1.weight",)}, {}, (), ""),
        ({}, {}, ("layers.0.weight",), ""),
        ({"muon_momentum_holder": "owners"}, {}, ("layers.1.weight", "layers.1.bias"), ""),
        ({}, {}, ("layers.1.weight",), ""),  # its bias alone is trained
        ({"muon_exclude": ("layers.2.*",)}, {}, (), "'layers.2.*' matches no parameter that is trained"),
        ({}, {}, ("layers.0.weight", "layers.1.weight"), "none of the 1 trained parameters is a matrix"),
        ({}, {}, (*_STAGES,), "the model has no trainable parameter"),
        ({"muon_include": ("layers.1.*",)}, {}, (), "requested for parameter layers.1.bias"),
        ({}, {"layers.0.*": "sgd"}, (), "gives parameter layers.0.weight the optimizer 'sgd'"),
    ],
    ids=str,
)
def test_checks_are_of_all_stages(settings, optimizers, frozen, message):
    first, second = run_distributed(_builds_on_stages, 2, settings, optimizers, frozen)
    assert first == second and (message in first if message else first == "")
