"""A step reads nothing from the device but one copy, a step late; CPU tensors take the same way as a GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from core import parallel_state
from core.base import fused
from core.base.device import current_device
from core.base.errors import OptimizerError
from core.comm.record import record_of
from core.distributed import wrap_model
from core.optimizer import get_megatron_optimizer
from core.tensor_parallel import model_parallel_manual_seed
from core.training.state import build_scheduler
from core.training.train_step import RunningStep, StepResult, train_step
from core.transformer.module import Float16Module
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.training._configs import batches, model_of, small_config
from tests.unit.training._reads import Reads, watched

WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "zero2": {"data_parallel_sharding_strategy": "optim_grads"},
    "zero3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "fsdp2": {"use_torch_fsdp2": True},
}


FEATURES = {
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "linear",
    "cross_entropy_fusion_vocab_chunk_size": 10,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""The loss in parts, and dropout; they go with packed documents."""

NUM_STEPS = 4

Watch = Callable[[list[Tensor]], AbstractContextManager[Reads]]


def _steps(
    changes: dict[str, Any], watch: Watch | None = watched, packed: bool = False, unwatched: int = 0
) -> tuple[list[int], list[StepResult], list[Tensor]]:
    """Makes steps of two micro-batches, the third of which the device has to skip.

    Args:
        watch: given tensors in the host's memory, a context that fails on reads; None waits for each step.
        packed: pack documents into the batches.
        unwatched: steps before the watch begins.
    """
    degrees = {name: changes.get(name, 1) for name in ("tensor_model_parallel_size", "context_parallel_size")}
    parallel_state.initialize_model_parallel(**degrees)
    model_parallel_manual_seed(5)
    replicas = parallel_state.get_data_parallel_world_size()
    config = small_config(**{**changes, "lr_warmup_iters": 2}, global_batch_size=4 * replicas)
    model = model_of(config).to(current_device())
    if (config.model.bf16 or config.model.fp16) and not config.use_torch_fsdp2:
        model = Float16Module(config.model, model)
    model = wrap_model(model, config.model, config.ddp)
    adam = get_megatron_optimizer(config.optimizer, [model])
    scheduler = build_scheduler(config, adam)
    data = batches(config, parallel_state.get_data_parallel_rank(), 2 * NUM_STEPS, packed)
    data[4]["loss_mask"][:] = torch.inf

    running: list[RunningStep] = []
    with ExitStack() as stack:
        reads = Reads()
        for step in range(NUM_STEPS):
            if watch is not None and step == unwatched:
                reads = stack.enter_context(watch([batch["document_starts"] for batch in data if packed]))
                model.register_forward_hook(reads.note_forward)
            running.append(train_step(model, adam, scheduler, iter(data[2 * step : 2 * step + 2]), 2))
            if watch is None:
                running[-1].result()
        running[-1].result()
    results = [step.result() for step in running]
    assert [step.has_update for step in results] == [True, True, False, True]
    assert scheduler.num_steps == 3 and adam.state_scalars()["step"] == 3
    assert results[2].lr == results[3].lr  # the schedule has waited for the step that was skipped
    model.engine.parameters.settle()
    return reads.at, results, [main.clone() for group in adam.param_groups for main in group["params"]]


PRECISIONS = ({}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 256.0})


@pytest.mark.parametrize(
    ("wrapper", "precision"),
    quick(
        product(WRAPPERS, PRECISIONS),
        lambda case: case in (("zero1", PRECISIONS[2]), ("zero3", PRECISIONS[0]), ("fsdp2", PRECISIONS[1])),
    ),
    ids=str,
)
def test_steps_without_a_wait_have_the_same_bits(wrapper: str, precision: dict[str, Any]) -> None:
    changes = WRAPPERS[wrapper] | precision
    late, at_once = (run_distributed(_steps, 2, changes, watch) for watch in (watched, None))
    for (_, results, weights), (_, expected, expected_weights) in zip(late, at_once, strict=True):
        assert math.isnan(results[2].loss) and math.isnan(expected[2].loss)
        assert [r for r in results if r.has_update] == [r for r in expected if r.has_update]
        assert all(map(torch.equal, weights, expected_weights))
        assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize(
    ("wrapper", "mode"),
    quick(
        product(WRAPPERS, ({}, {"reproducible_across_ranks": True})),
        lambda case: bool(case[1]) == (case[0] in ("zero1", "fsdp2")),
    ),
    ids=str,
)
def test_the_host_reads_once_a_step_and_a_step_late(wrapper: str, mode: dict[str, Any]) -> None:
    for at, _, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | mode):
        # The first is of the second step: each before its update, when its two micro-batches are queued.
        assert at == [4, 6, 8, 8]


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"attention_dropout": 0.0},  # with a fused kernel
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"context_parallel_size": 2, "attention_dropout": 0.0},
)


@pytest.mark.parametrize(
    ("wrapper", "changes"),
    quick(product(WRAPPERS, CHANGES), lambda case: (case[0] == "fsdp2" and case[1]) or case == ("ddp", {})),
    ids=str,
)
def test_features_of_a_model_read_nothing(wrapper: str, changes: dict[str, Any]) -> None:
    for at, _, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | FEATURES | changes, watched, True):
        assert at == [4, 6, 8, 8]


@pytest.mark.parametrize("wrapper", ["zero1", "fsdp2"])
def test_an_adaptive_loss_scale_is_read_before_backward(wrapper: str) -> None:
    fp16 = {"fp16": True, "initial_loss_scale": 256.0, "hysteresis": 1}
    for at, results, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | fp16):
        first = [] if wrapper == "fsdp2" else [2]  # parameters in fp16: nothing is queued, so that all is looked at
        assert at == [*first, 3, 5, 7, 8]
        assert [result.loss_scale for result in results] == [256.0, 256.0, 256.0, 128.0]


@pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
def test_masters_cost_no_read_while_steps_follow_each_other(wrapper: str) -> None:
    for at, _, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | {"bf16": True}):
        assert at == [2, 4, 6, 8, 8]


def _steps_in_one_pass(changes: dict[str, Any]) -> tuple[list[int], list[StepResult], list[Tensor]]:
    """Makes the steps with the update that a GPU gets compiled, as its operations."""
    with mock.patch.object(fused, "COMPILED_ON", ["cpu"]), mock.patch.object(torch, "compile", lambda f, **_: f):
        return _steps(changes)


def test_an_update_in_one_pass_reads_nothing():
    for at, _, _ in run_distributed(_steps_in_one_pass, 2, WRAPPERS["ddp"] | {"bf16": True}):
        assert at == [2, 4, 6, 8, 8]


def _write_between_steps(resolved: str, *, is_counted: bool = True) -> list[float]:
    config = small_config(bf16=True, global_batch_size=2)
    parallel_state.initialize_model_parallel()
    model = wrap_model(Float16Module(config.model, model_of(config)), config.model, config.ddp)
    adam = get_megatron_optimizer(config.optimizer, [model])
    arguments = (model, adam, build_scheduler(config, adam))
    step = train_step(*arguments, iter(batches(config, 0, 1)), 1)
    if resolved == "result":
        step.result()
    weight = model.module.module.decoder.layers[0].mlp.linear_fc1.weight
    with torch.no_grad():
        (weight if is_counted else weight.data).fill_(4.0)
    if resolved == "reloaded":
        adam.reload_model_params()
    train_step(*arguments, iter(batches(config, 0, 1)), 1).result()
    return [weight.float().min().item(), weight.float().max().item()]


@pytest.mark.parametrize("resolved", ["result", "reloaded", "not at all"])
def test_a_write_between_steps_counts(resolved: str) -> None:
    (found,) = run_distributed(_write_between_steps, 1, resolved)
    assert all(abs(value - 4.0) < 0.5 for value in found)


@on_ranks(1)
def test_a_write_while_a_step_runs_raises_a_step_late() -> None:
    with pytest.raises(OptimizerError) as caught:
        _write_between_steps("not at all", is_counted=False)  # torch counts no write through `.data`
    message = str(caught.value)
    assert message.startswith("decoder.layers.0.mlp.linear_fc1.weight was written after a step")
    assert "reload_model_params()" in message


@contextmanager
def _watched_by_cuda(host_tensors: list[Tensor]) -> Iterator[Reads]:
    """Fails on every call that makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield Reads()
    finally:
        torch.cuda.set_sync_debug_mode("default")


REAL_SIZE = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048, "lr": 1e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256.0},
    "reproducible": {"reproducible_across_ranks": True},
    "features": FEATURES | {"bf16": True, "packed": True},
    "features in fp32": FEATURES | {"packed": True},
    "compiled": FEATURES | {"bf16": True, "packed": True, "attention_dropout": 0.0, "compile_units": True},
    "real size": REAL_SIZE | {"bf16": True},
    "real size, features": FEATURES
    | REAL_SIZE
    | {"bf16": True, "packed": True, "cross_entropy_fusion_vocab_chunk_size": None},
}
"""Settings of a run; `packed` as `_steps` takes it."""


def _compare_with_waiting(watch: Watch, wrapper: str, changes: dict[str, Any]) -> None:
    """Fails unless steps under a watch are those that are waited for; each in a group of its own."""
    changes = WRAPPERS[wrapper] | changes
    packed = changes.pop("packed", False)
    unwatched = 2 if "compile_units" in changes else 0  # the compiler may wait for the GPU
    found = []
    for one in (watch, None):
        torch._dynamo.reset()
        with one_rank_on_a_gpu() if watch is _watched_by_cuda else nullcontext():
            _, results, weights = _steps(changes, one, packed, unwatched)
            found.append(([r for r in results if r.has_update], weights))
            parallel_state.destroy_model_parallel()
    (results, weights), (expected, expected_weights) = found
    if "seq_length" in changes:  # beyond one block of queries kernels add in any order
        assert [r.loss for r in results] == pytest.approx([r.loss for r in expected], rel=1e-2)
        return
    assert results == expected and all(map(torch.equal, weights, expected_weights))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("wrapper", "settings"),
    [
        (w, s)
        for w, s in product(WRAPPERS, SETTINGS)
        if w not in ("zero1", "zero2") or s not in ("compiled", "real size")
    ],
)
def test_no_call_of_a_step_waits_for_the_gpu(wrapper: str, settings: str) -> None:
    _compare_with_waiting(_watched_by_cuda, wrapper, SETTINGS[settings])


@pytest.mark.parametrize(("wrapper", "settings"), [("ddp", "features in fp32"), ("fsdp2", "features")])
def test_steps_of_one_rank_without_a_wait_have_the_same_bits(wrapper: str, settings: str) -> None:
    run_distributed(_compare_with_waiting, 1, watched, wrapper, SETTINGS[settings])


@on_ranks(2)
def test_the_loss_is_not_queued_behind_gathers_of_parameters() -> None:
    _steps(WRAPPERS["zero1"], None)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    calls = [(call.kind, call.what) for call in record_of(group).calls]
    kinds = [("loss" if what == "the loss" else kind) for kind, what in calls if what != "the gradient norm"]
    gathers = [index for index, kind in enumerate(kinds) if kind == "all-gather"]
    losses = [index for index, kind in enumerate(kinds) if kind == "loss"]
    assert len(losses) == NUM_STEPS and kinds[losses[0] + 1] == "all-gather"
    assert all(kinds[index - 1] != "all-gather" for index in losses), (losses, gathers)
