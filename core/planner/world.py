"""The fake environment of a simulated run: process groups that send nothing, lanes, neighbouring stages, and a host.

Each takes a place that the library has for it (`shardstack.base.device.Seam`), or is one of torch's modes. Collectives
run at once, on the thread that calls them, and experts are given equally many tokens. A real step that is compared
with a simulated one runs with the same lanes and the same model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from .. import parallel_state
from ..base.errors import ConfigError
from ..comm.lane import LANES, CommLane, Handle
from ..pipeline_parallel.stages import Stage
from ..tensor_parallel.groups import expert_tensor_group, group_size, pad_vocab_size
from ..tensor_parallel.random import seed_everything
from ..training.config import PretrainConfig
from ..training.data import Batch
from ..training.state import build_gpt, make_groups
from ..transformer.lora import add_lora, freeze_matching, freeze_parameters
from ..transformer.module import Float16Module
from ..transformer.moe.router import TopKRouter, best_experts
from ..transformer.moe_config import MoEConfig
from .phantom import replaced_in_torch
from .recorder import Recorder


def resolved(config: PretrainConfig, on_gpu: bool) -> PretrainConfig:
    """Returns the settings, with what depends on the device resolved.

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


def copies_to_host(recorder: Recorder) -> AbstractContextManager[None]:
    """Makes moves between an accelerator and its host copies from one memory to the other.

    Torch and this library move offloaded tensors by ``to`` with ``non_blocking``, which does nothing where both are
    the CPU.
    """
    to = Tensor.to

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "non_blocking" not in kwargs or not tensor.is_floating_point() or not isinstance(args[0], torch.device):
            return to(tensor, *args, **kwargs)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not recorder.is_on_host(tensor):
            recorder.as_host_memory(copy)
        return copy.copy_(tensor)

    return replaced_in_torch(Tensor, "to", move)


class _Lane(CommLane):
    def submit(self, run: Callable[[], None]) -> Handle:
        run()
        return HeldUntilWait(run)


class HeldUntilWait(Handle):
    """A collective that has ended, and holds its tensors until it is waited for, as on an accelerator."""

    def __init__(self, held: Any) -> None:
        self._held = held  # until `wait`

    def wait(self) -> None:
        self._held = None


class HeldByWork(HeldUntilWait):
    """A collective on the CPU, where gloo's work holds its tensors for as long as it lives."""

    def wait(self) -> None:
        pass


def collectives_at_once() -> AbstractContextManager[None]:
    """Makes lanes run each task at once, on the thread that submits it."""
    return LANES.replaced(lambda device, number: _Lane())


class LoneStage(Stage):
    """A pipeline stage whose neighbours do not exist: they agree with it, and what it sends is held as if they did.

    Args:
        note: called with the stage, a pass and its micro-batch, before each pass.
        sent: holds a tensor that is being sent, until it is waited for.
    """

    def __init__(
        self, note: Callable[[int, str, int], None], sent: Callable[[Tensor], Handle], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._note_pass, self._sent = note, sent

    def note(self, what: str, micro_batch: int, peer: int | None = None) -> None:
        if peer is None:
            self._note_pass(self.stage_index, what, micro_batch)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [*map(self._holding, super().get_fwd_send_ops(fwd_chunk_id))]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [*map(self._holding, super().get_bwd_send_ops(bwd_chunk_id))]

    def _holding(self, op: dist.P2POp) -> dist.P2POp:
        isend, hold, peer = op.op, self._sent, op.group_peer

        def send(tensor: Tensor, *, group: Any, tag: int, **unused: Any) -> Handle:
            isend(tensor, group=group, tag=tag, group_dst=peer)
            return hold(tensor)

        op.op = send
        return op

    # Neighbours agree that they know the shapes of what they exchange.

    def _warmup_forward_vote(self, *unused: Any, **also_unused: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    _warmup_backward_result = _warmup_forward_vote


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
    vocab_size = pad_vocab_size(config.data.vocab_size or 0, config.gpt.make_vocab_size_divisible_by)
    stages = nn.ModuleList()
    for vp_stage in [None] if virtual is None else range(virtual):
        with torch.device("meta" if config.ddp.shards_parameters else "cpu"):
            stages.append(build_gpt(config, vocab_size, vp_stage))
        add_lora(stages[-1], config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
    # The run checks patterns over all stages, of which others are not built here.
    freeze = freeze_parameters if config.model.pipeline_model_parallel_size == 1 else freeze_matching
    for stage in stages:
        freeze(stage, config.gpt.freeze)
        for module in stage.modules():
            if isinstance(module, TopKRouter):
                module.choose = _choose_in_turn
    if config.ddp.shards_parameters or not (config.model.fp16 or config.model.bf16):
        return stages
    return nn.ModuleList(Float16Module(config.model, stage) for stage in stages)


def _choose_in_turn(scores: Tensor, config: MoEConfig) -> Tensor:
    """Chooses experts in turn and ignores their scores, so that all get equally many tokens."""
    places = best_experts(scores, config)
    return torch.arange(places.numel()).remainder_(scores.shape[-1]).view_as(places)
