"""What a simulated run has around it: process groups without messages, the kernels of an accelerator, and a host.

Collectives run at once, on the thread that calls them, and experts are given equally many tokens. A real step that is
compared with a simulated one runs with the same functions.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from .. import parallel_state
from ..base.errors import ConfigError
from ..comm import collectives, lane
from ..comm.lane import CommLane, Handle
from ..distributed.flat.buffer import FlatBuffer
from ..distributed.model import offloaded_activations
from ..optimizer import clip_grads, exact_sums
from ..tensor_parallel import cross_entropy, weight_gradients
from ..tensor_parallel.groups import expert_tensor_group, group_size, pad_vocab_size
from ..tensor_parallel.random import seed_everything
from ..training.config import PretrainConfig
from ..training.data import Batch
from ..training.state import build_gpt, make_groups
from ..transformer.lora import add_lora, freeze_matching, freeze_parameters
from ..transformer.module import Float16Module
from ..transformer.moe import router
from .recorder import HOST, ON_HOST, Collective, Recorder


def _sum_on_device(grads: list[Tensor], count_zeros: bool) -> Tensor:
    return clip_grads._sum_on_device(grads, count_zeros, torch.device("cpu"))


ON_GPU: tuple[tuple[Any, str, Any], ...] = (
    (clip_grads, "_sum_on_host", _sum_on_device),
    (weight_gradients, "sums_rows", lambda weight: False),  # gradients of embeddings are dense
    (exact_sums, "CHUNK_ELEMENTS", exact_sums._DEVICE_CHUNK_ELEMENTS),
    (cross_entropy, "_CHUNK_ELEMENTS", cross_entropy._GPU_CHUNK_ELEMENTS),
    (cross_entropy, "_columns", functools.partial(cross_entropy._columns, is_cuda=True)),
)
"""What depends on a tensor's device: a module, its name, and its value for tensors of an accelerator."""


def resolved(config: PretrainConfig, on_gpu: bool) -> PretrainConfig:
    """Returns the settings with those of the device resolved.

    Raises:
        ConfigError: the setting's effect on memory is not simulated.
    """
    if config.optimizer.optimizer == "muon" and config.ddp.shards_updates:
        raise ConfigError(
            "optimizer is 'muon', which the planner simulates for replicated parameters alone: it does not know which "
            "parts other ranks hold; plan with 'adam', or with data_parallel_sharding_strategy 'no_shard'"
        )
    if config.data.vocab_size is None:
        raise ConfigError("vocab_size is not set, and the planner reads no corpus; add --vocab-size")
    ddp, model = replace(config.ddp, compile_units=False), config.model
    if on_gpu:  # where the fused kernels drop attention weights without storing them
        model = replace(model, attention_dropout=0.0)
    if on_gpu and not ddp.shards_parameters:
        overlaps_grads = True if ddp.overlap_grad_reduce is None else ddp.overlap_grad_reduce
        overlaps_params = ddp.shards_updates if ddp.overlap_param_gather is None else ddp.overlap_param_gather
        ddp = replace(ddp, overlap_grad_reduce=overlaps_grads, overlap_param_gather=overlaps_params)
    return replace(config, ddp=ddp, model=model)


@contextmanager
def fake_world(config: PretrainConfig, world_size: int, rank: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ConfigError("a process group exists, and the planner makes one of its own; plan in another process")
    hook = sys.excepthook  # torch wraps it at each initialisation
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        make_groups(config)
        with torch.random.fork_rng(devices=()):
            seed_everything(config.run.seed)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = hook


def balanced_experts() -> AbstractContextManager[object]:
    """Makes routers give all experts equally many tokens, one after the other, whatever their scores."""
    best = router._best

    def in_turn(scores: Tensor, config: Any) -> Tensor:
        places = best(scores, config)
        return torch.arange(places.numel()).remainder_(scores.shape[-1]).view_as(places)

    return mock.patch.object(router, "_best", in_turn)


def activations_on_host(recorder: Recorder) -> AbstractContextManager[object]:
    """Keeps offloaded activations out of the device's memory, and records their copies as such."""
    on_host = offloaded_activations._OnHost
    begin, copy_back = on_host.__init__, on_host._copy_back

    def to_host(saved_tensor: Any, forward: Any, tensor: Tensor, stream: Any) -> None:
        first = len(recorder.events)
        begin(saved_tensor, forward, tensor, stream)
        recorder.sort_into(ON_HOST, [saved_tensor._host])
        recorder.events[first:] = [(recorder.where, Collective("to the host", tensor.nbytes, HOST))]

    def from_host(saved_tensor: Any) -> Any:
        first = len(recorder.events)
        copy, event = copy_back(saved_tensor)
        del recorder.events[first:]
        recorder.sort_into("", [copy])
        recorder.send(Collective("from the host", copy.nbytes, HOST), [], [copy])
        return copy, event

    return mock.patch.multiple(on_host, __init__=to_host, _copy_back=from_host)


@contextmanager
def shards_on_host(recorder: Recorder) -> Iterator[None]:
    """Keeps offloaded shards, and what is computed from them, out of the device's memory.

    Torch and this library move tensors between host and device by ``to`` with ``non_blocking``, which does nothing
    where both are the CPU. Here it copies to the other one.
    """
    zeros, to = FlatBuffer.zeros_for_shards, Tensor.to

    def zeros_on_host(buffer: FlatBuffer, numel: int, dtype: torch.dtype) -> Tensor:
        shards = zeros(buffer, numel, dtype)
        recorder.sort_into(ON_HOST, [shards])
        return shards

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "non_blocking" not in kwargs or not tensor.is_floating_point() or not isinstance(args[0], torch.device):
            return to(tensor, *args, **kwargs)
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not recorder.is_on_host(tensor):
            recorder.sort_into(ON_HOST, [on_host])
        return on_host.copy_(tensor)

    with mock.patch.object(FlatBuffer, "zeros_for_shards", zeros_on_host), mock.patch.object(Tensor, "to", move):
        yield


class _Lane(CommLane):
    """Runs each task at once, on the thread that submits it."""

    def submit(self, run: Callable[[], None]) -> Handle:
        run()
        return _Ended(run)


class _Ended(Handle):
    """A collective that has ended, and holds its tensors until it is waited for, as on an accelerator."""

    def __init__(self, held: Any) -> None:
        self._held = held  # until `wait`

    def wait(self) -> None:
        self._held = None


def _run_collective(kind: str, what: str, payload: Tensor, group: Any, start: Callable[[], Any]) -> Handle | None:
    if (work := start()) is None:
        return None
    work.wait()
    return _Ended(payload)


class _Held(_Ended):
    """The same on the CPU: gloo's work holds its tensors for as long as it lives."""

    def wait(self) -> None:
        pass


def exchanges_hold_what_is_sent(*, on_gpu: bool) -> AbstractContextManager[object]:
    """Makes exchanges between pipeline stages hold what they send, until it is waited for or longer."""
    exchange, kind = schedules._batch_p2p, _Ended if on_gpu else _Held

    def hold(ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        return [kind([op.tensor for op in ops if op.op is dist.isend])] if exchange(ops, desc) else []

    return mock.patch.object(schedules, "_batch_p2p", hold)


@contextmanager
def collectives_at_once() -> Iterator[None]:
    """Runs every collective of `core.comm` on the thread that calls it, which returns when it has ended."""
    with (
        mock.patch.object(lane, "_lane", lambda device, number: _Lane()),
        mock.patch.object(collectives, "_run", _run_collective),
    ):
        yield


def whole_size(parameter: Tensor) -> int:
    """Returns the elements of a parameter on all tensor-parallel and expert-parallel ranks."""
    if getattr(parameter, "shared_embedding", False) and not parallel_state.is_pipeline_first_stage():
        return 0  # counted there
    is_expert = not getattr(parameter, "allreduce", True)
    tp = group_size(expert_tensor_group()) if is_expert else parallel_state.get_tensor_model_parallel_world_size()
    ranks = parallel_state.get_expert_model_parallel_world_size() if is_expert else 1
    return parameter.numel() * ranks * (tp if getattr(parameter, "tensor_model_parallel", False) else 1)


def batches(config: PretrainConfig) -> Iterator[Batch]:
    """Yields micro-batches of one document each. All labels count, and tokens differ as far as the vocabulary goes."""
    shape = config.data.micro_batch_size, config.data.seq_length
    while True:
        tokens = (torch.arange(math.prod(shape)) % (config.data.vocab_size or 1)).view(shape)
        positions = torch.arange(shape[1]).expand(shape).contiguous()
        yield {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(shape)}


def build_model(config: PretrainConfig) -> nn.ModuleList:
    """Builds the rank's stages as ``examples/gpt/pretrain_gpt.py`` does: on meta where parameters are sharded."""
    virtual = config.model.virtual_pipeline_model_parallel_size
    stages = nn.ModuleList(_build_stage(config, stage) for stage in ([None] if virtual is None else range(virtual)))
    # The run checks patterns over all stages, of which others are not built here.
    freeze = freeze_parameters if config.model.pipeline_model_parallel_size == 1 else freeze_matching
    for stage in stages:
        freeze(stage, config.gpt.freeze)
    if config.ddp.shards_parameters or not (config.model.fp16 or config.model.bf16):
        return stages
    return nn.ModuleList(Float16Module(config.model, stage) for stage in stages)


def _build_stage(config: PretrainConfig, vp_stage: int | None) -> nn.Module:
    vocab_size = pad_vocab_size(config.data.vocab_size or 0, config.gpt.make_vocab_size_divisible_by)
    with torch.device("meta" if config.ddp.shards_parameters else "cpu"):
        model: nn.Module = build_gpt(config, vocab_size, vp_stage)
    add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
    return model
