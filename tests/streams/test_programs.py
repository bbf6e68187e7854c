"""What programs do next to a step: streams of their own, errors in the middle, copies of batches, checkpoints."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from core.comm import background_copies, streams
from core.comm.background_copies import BackgroundCopies
from core.dist_checkpointing.saving import HostStaging
from core.distributed.engine import gradients
from core.distributed.engine.gradients import BucketReduction
from core.distributed.flat import buffer
from core.distributed.model.offloaded_activations import offload_activations
from core.distributed.plan.parts import UnitTransform
from core.training.data import DeviceBatches
from tests.streams.process import assert_no_race, simulate
from tests.streams.recorder import HOST
from tests.streams.steps import Case, groups_of, inputs, make_step, train, wrapped


@pytest.mark.parametrize("wrapper", ["zero1", "zero2", "zero3", "fsdp2"])
def test_a_users_stream_averages_the_weights(wrapper: str) -> None:
    """The side stream is the first to read parameters that are being gathered; the forward waits all the same."""
    assert_no_race(train, Case(wrapper, between="average"))


def _fails_in_a_reduction(case: Case) -> None:
    """Drops a step whose third reduction runs out of memory after it has begun, and trains on."""
    reduce, calls = BucketReduction.reduce, list[int]()

    def fail_third(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            args[1].mul_(1.0)  # type: ignore[attr-defined]  # as fp16 does: the lane writes the whole gradient
            raise torch.OutOfMemoryError("planted")
        reduce(*args)  # type: ignore[arg-type]

    with groups_of(case):
        model, optimizer = wrapped(case)
        with mock.patch.object(BucketReduction, "reduce", fail_third), pytest.raises(torch.OutOfMemoryError):
            make_step(case, model, optimizer)
        gc.collect()
        torch.zeros(64)  # takes the memory of what was freed
        model.zero_grad_buffer()
        make_step(case, model, optimizer)
        assert len(calls) >= 3


@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_an_error_in_a_lane_frees_no_memory_in_use(wrapper: str) -> None:
    assert_no_race(_fails_in_a_reduction, Case(wrapper, micro_batches=1))


def _on_main(program: Callable[[], None]) -> None:
    program()


def _on_a_side_stream(program: Callable[[], None]) -> None:
    with streams.stream(streams.Stream()):
        program()


def _stages_checkpoints() -> None:
    """Copies a state that training goes on to write, as `AsyncSaver` does, while a thread writes the copies."""
    staging, state = HostStaging(), {"weight": torch.ones(8), "moment": torch.zeros(8)}
    for _ in range(3):
        for tensor in state.values():
            tensor.add_(1.0)
        copies = staging.copy(list(state.values()))
        thread = threading.Thread(target=lambda held: [copy.tolist() for copy in held], args=(copies,))
        thread.start()
        for tensor in state.values():
            tensor.add_(1.0)
        thread.join()


@pytest.mark.parametrize("where", [_on_main, _on_a_side_stream])
def test_a_checkpoint_is_staged_while_training_goes_on(where: Callable[[Callable[[], None]], None]) -> None:
    assert simulate(where, _stages_checkpoints).races == {}


def _keeps_copies(waits: bool) -> None:
    """Copies a state in the background, as `HostCopies` does, and writes it once the copy has ended."""
    copies, kept = BackgroundCopies(), [torch.empty(40, device=HOST) for _ in range(3)]
    state = [torch.zeros(40), torch.ones(40), torch.zeros(10, 4)]
    with mock.patch.object(background_copies, "CHUNK_BYTES", 64), ThreadPoolExecutor(1) as thread:
        for step in range(3):
            for tensor in state:
                tensor.fill_(float(step))
            after = copies.begin(state) if waits else streams.Event()
            running = thread.submit(copies.copy, kept, state, after)
            torch.ones(64).mul_(2.0)  # the next step goes on
            running.result()
            assert [copy.tolist() for copy in kept] == [[float(step)] * 40] * 3


def test_copies_in_the_background_wait_for_what_is_queued() -> None:
    report = assert_no_race(_keeps_copies, True)
    assert any("background_copies" in line for line in report.operations)
    assert simulate(_keeps_copies, False).races  # without the point behind what is queued


def _copies_batches() -> None:
    """Reads batches that are copied ahead, and drops each once it is used."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(6):
            yield {"tokens": streams.pinned([4], torch.int64).fill_(number), "document_starts": torch.zeros(1, 4)}

    with DeviceBatches(batches()) as copied:
        for batch in copied:
            assert not batch["tokens"].is_pinned()
            for _ in range(3):
                torch.empty(4).copy_(batch["tokens"])


def test_batches_are_copied_on_a_side_stream() -> None:
    assert_no_race(_copies_batches)


def _offloads_activations(depth: int, offloads: bool) -> None:
    """Trains layers whose activations, of 8 KiB each, are large next to their weights."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)))
    offload_activations(
        UnitTransform(modules=(layer,), recomputes="none", is_compiled=False, offloads=offloads) for layer in layers
    )
    for _ in range(2):
        layers(torch.ones(256, 8)).square().mean().backward()


def test_offloaded_activations_are_free_after_two_layers() -> None:
    activation, of_weights = 256 * 8 * 4, 2 * 4 * (8 * 8 + 8)
    few, many = (assert_no_race(_offloads_activations, depth, True).most_bytes for depth in (4, 12))
    assert many - few <= 8 * of_weights
    few, many = (simulate(_offloads_activations, depth, False).most_bytes for depth in (4, 12))
    assert many - few >= 8 * activation  # the inputs of layers, which the activation functions' outputs are


class _WithGradient(nn.Module):
    """Computes a gradient through another offloaded layer in the middle of its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.outer = nn.Linear(8, 8)
        self._inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(
            self._inner[0](x.detach().requires_grad_()).sum(), [*self._inner[0].parameters()][:1]
        )
        output: Tensor = torch.tanh(self.outer(x)) * slope.mean()
        return output


def _offloads_around_a_backward() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    outer = _WithGradient(inner)
    offload_activations(
        UnitTransform(modules=(layer,), recomputes="none", is_compiled=False, offloads=True)
        for layer in (inner, outer)
    )
    for _ in range(2):
        outer(torch.ones(256, 8)).square().mean().backward()


def test_a_backward_within_a_forward_leaves_offloading_intact() -> None:
    assert_no_race(_offloads_around_a_backward)


OFFLOADED = {"cpu_offload": True, "param_dtype": "bf16"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduce_every_micro_batch": True},
        {"num_distributed_optimizer_instances": 2},
        {"overlap_grad_reduce": False},
    ],
    ids=str,
)
def test_offloaded_shards_are_copied_while_the_host_goes_on(settings: dict[str, object]) -> None:
    report = assert_no_race(train, Case("zero3", OFFLOADED | settings), ranks=4)
    assert any(line.startswith("host") for line in report.operations), "nothing was in the host's memory"
    reducing = (gradients.__file__, buffer.__file__)
    assert not [wait for wait in report.waits if wait.startswith(reducing)]


def _reads_gradients(case: Case) -> None:
    """Reads this rank's gradients on the host, after each of two steps."""
    with groups_of(case):
        model, optimizer = wrapped(case)
        for _ in range(2):
            make_step(case, model, optimizer)
            model.zero_grad_buffer()
            model(inputs(case)).float().sum().backward()
            model.finish_grad_sync()
            for group in model.engine.buckets:
                group.grads.shard.clone()


def test_the_host_reads_offloaded_gradients_once_they_are_there() -> None:
    report = assert_no_race(_reads_gradients, Case("zero3", OFFLOADED))
    assert report.operations["host"] > 10
