"""A step reads nothing from the device but one copy, a step late; CPU tensors take the same way as a GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from core import parallel_state
from core.comm import host_read
from core.comm.record import record_of
from core.device import current_device
from core.distributed import wrap_model
from core.errors import OptimizerError
from core.optimizer import clip_grads, get_megatron_optimizer
from core.tensor_parallel import cross_entropy, vocab_embedding
from core.training.running_step import RunningStep, StepResult
from core.training.state import build_scheduler
from core.training.train_step import train_step
from core.transformer.module import Float16Module
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.training._configs import small_config
from tests.unit.training.test_train_step import batches, model_of

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique_consecutive", "_unique2", "masked_select")
"""Operations of `torch.ops.aten` whose results the host waits for."""

READING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")


class _NoReadsBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class _NoReadsAbove(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert not (name in READING_METHODS and isinstance(args[0], Tensor)), f"Tensor.{name} waits for the device"
        assert not (name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values())), "Tensor.to('cpu')"
        return func(*args, **(kwargs or {}))


class _Reads:
    """What the one function that may read has read: how often, and how many micro-batches had begun by then."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.forwards = 0

    def note_forward(self, *unused: Any) -> None:
        self.forwards += 1

    def __call__(self, numbers: Tensor) -> list[float]:
        self.at.append(self.forwards)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return [float(number) for number in numbers.tolist()]


@contextmanager
def _watched() -> Iterator[_Reads]:
    """Fails on every read but those through `core.comm.host_read`, which it counts; nothing is known in advance."""
    reads = _Reads()
    with (
        mock.patch.object(host_read, "_to_list", reads),
        mock.patch.object(clip_grads, "known_on_host", lambda value: None),
        # What looks at ids on the CPU alone, and at which rows of a table are in use.
        mock.patch.object(vocab_embedding, "check_ids"),
        mock.patch.object(cross_entropy, "check_ids"),
        mock.patch.object(vocab_embedding, "embedding", lambda ids, weight, adds_rows: F.embedding(ids, weight)),
        _NoReadsBelow(),
        _NoReadsAbove(),
    ):
        yield reads


WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "zero2": {"data_parallel_sharding_strategy": "optim_grads"},
    "zero3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "fsdp2": {"use_torch_fsdp2": True},
}


NUM_STEPS = 4

Watch = Callable[[], AbstractContextManager["_Reads"]]


def _steps(
    changes: dict[str, Any], watch: Watch | None = _watched
) -> tuple[list[int], list[StepResult], list[Tensor]]:
    """Makes steps of two micro-batches, the third of which the device has to skip.

    Args:
        watch: a context that fails on reads; None waits for each step.
    """
    config = small_config(**{**changes, "lr_warmup_iters": 2}, global_batch_size=4 * dist.get_world_size())
    parallel_state.initialize_model_parallel()
    model = model_of(config).to(current_device())
    if (config.model.bf16 or config.model.fp16) and not config.use_torch_fsdp2:
        model = Float16Module(config.model, model)
    model = wrap_model(model, config.model, config.ddp)
    adam = get_megatron_optimizer(config.optimizer, [model])
    scheduler = build_scheduler(config, adam)
    rank = parallel_state.get_data_parallel_rank()
    data = [{name: t.to(current_device()) for name, t in batch.items()} for batch in batches(rank, 2 * NUM_STEPS)]
    data[4]["loss_mask"][:] = torch.inf

    running: list[RunningStep] = []
    with nullcontext(_Reads()) if watch is None else watch() as reads:
        model.register_forward_hook(reads.note_forward)
        for step in range(NUM_STEPS):
            running.append(train_step(model, adam, scheduler, iter(data[2 * step : 2 * step + 2]), 2))
            if watch is None:
                running[-1].result()
        running[-1].result()
    results = [step.result() for step in running]
    assert [step.updated for step in results] == [True, True, False, True]
    assert scheduler.num_steps == 3 and adam.state_scalars()["step"] == 3
    assert results[2].lr == results[3].lr  # the schedule has waited for the step that was skipped
    model.settle_parameters()
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
    late, at_once = (run_distributed(_steps, 2, changes, watch) for watch in (_watched, None))
    for (_, results, weights), (_, expected, expected_weights) in zip(late, at_once, strict=True):
        assert math.isnan(results[2].loss) and math.isnan(expected[2].loss)
        assert [r for r in results if r.updated] == [r for r in expected if r.updated]
        assert all(map(torch.equal, weights, expected_weights))
        assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize(
    ("wrapper", "mode"),
    quick(
        product(WRAPPERS, ({}, {"reproducible_across_ranks": True})),
        lambda case: not case[1] or case[0] in ("zero1", "fsdp2"),
    ),
    ids=str,
)
def test_the_host_reads_once_a_step_and_a_step_late(wrapper: str, mode: dict[str, Any]) -> None:
    for at, _, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | mode):
        # The first is of the second step: each before its update, when its two micro-batches are queued.
        assert at == [4, 6, 8, 8]


@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "fsdp2"])
def test_a_loss_scale_that_adapts_is_read_before_the_first_backward(wrapper: str) -> None:
    fp16 = {"fp16": True, "initial_loss_scale": 256.0, "hysteresis": 1}
    for at, results, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | fp16):
        first = [] if wrapper == "fsdp2" else [2]  # parameters in fp16: nothing is queued, so that all is looked at
        assert at == [*first, 3, 5, 7, 8]
        assert [result.loss_scale for result in results] == [256.0, 256.0, 256.0, 128.0]


@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
def test_masters_cost_no_read_while_steps_follow_each_other(wrapper: str) -> None:
    for at, _, _ in run_distributed(_steps, 2, WRAPPERS[wrapper] | {"bf16": True}):
        assert at == [2, 4, 6, 8, 8]


def _write_between_steps(resolved: str) -> list[float]:
    config = small_config(bf16=True, global_batch_size=2)
    parallel_state.initialize_model_parallel()
    model = wrap_model(Float16Module(config.model, model_of(config)), config.model, config.ddp)
    adam = get_megatron_optimizer(config.optimizer, [model])
    arguments = (model, adam, build_scheduler(config, adam))
    step = train_step(*arguments, iter(batches(0, 1)), 1)
    if resolved == "result":
        step.result()
    weight = model.module.module.decoder.layers[0].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.fill_(4.0)
    if resolved == "reloaded":
        adam.reload_model_params()
    train_step(*arguments, iter(batches(0, 1)), 1).result()
    return [weight.float().min().item(), weight.float().max().item()]


@pytest.mark.parametrize("resolved", ["result", "reloaded"])
def test_a_write_between_steps_counts(resolved: str) -> None:
    (found,) = run_distributed(_write_between_steps, 1, resolved)
    assert all(abs(value - 4.0) < 0.5 for value in found)


def _write_behind_a_running_step() -> str:
    with pytest.raises(OptimizerError) as caught:
        _write_between_steps("not at all")
    return str(caught.value)


def test_a_write_while_a_step_runs_raises_a_step_late() -> None:
    (message,) = run_distributed(_write_behind_a_running_step, 1)
    assert message.startswith("decoder.layers.0.mlp.linear_fc1.weight was written after a step")
    assert "reload_model_params()" in message


@contextmanager
def _watched_by_cuda() -> Iterator[_Reads]:
    """Fails on every call that makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield _Reads()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "precision",
    [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 256.0}, {"reproducible_across_ranks": True}],
    ids=str,
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_call_of_a_step_waits_for_the_gpu(wrapper: str, precision: dict[str, Any]) -> None:
    changes = WRAPPERS[wrapper] | precision
    with one_rank_on_a_gpu():
        _, results, weights = _steps(changes, _watched_by_cuda)
    with one_rank_on_a_gpu():
        _, expected, expected_weights = _steps(changes, None)
    assert [r for r in results if r.updated] == [r for r in expected if r.updated]
    assert all(map(torch.equal, weights, expected_weights))


def _calls_of_a_step() -> list[tuple[str, str]]:
    _steps(WRAPPERS["zero1"], None)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return [(call.kind, call.what) for call in record_of(group).calls]


def test_the_loss_is_not_queued_behind_gathers_of_parameters() -> None:
    for calls in run_distributed(_calls_of_a_step, 2):
        kinds = [("loss" if what == "the loss" else kind) for kind, what in calls if what != "the gradient norm"]
        gathers = [index for index, kind in enumerate(kinds) if kind == "all-gather"]
        losses = [index for index, kind in enumerate(kinds) if kind == "loss"]
        assert len(losses) == NUM_STEPS and kinds[losses[0] + 1] == "all-gather"
        assert all(kinds[index - 1] != "all-gather" for index in losses), (losses, gathers)
