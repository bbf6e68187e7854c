"""A step of a planned run, run for real on gloo ranks: the peak of its tensors, and the bytes that it sends.

torch's profiler reports each allocation and release of the CPU's allocator, from before the model is built. It sees
one thread: collectives run at once, on the thread of the model, which then waits for gloo's threads to drop their
tensors. What only gloo allocates is left out: the inboxes of this library's direct exchange (`DIRECT_EXCHANGE`), and
the copies that gloo makes of what it gathers and reduce-scatters.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import parallel_state
from core.base.host_memory import transient_memory_seen_by_profilers
from core.distributed import wrap_model
from core.optimizer import get_megatron_optimizer
from core.planner.world import batches, build_model, collectives_at_once
from core.tensor_parallel.random import seed_everything
from core.training.config.arguments import parse_arguments
from core.training.state import build_scheduler, make_groups
from core.training.train_step import train_step

DIRECT_EXCHANGE = {"SHARDSTACK_DIRECT_EXCHANGE": "0"}


def real_steps(lines: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Runs each command line's second step, and returns this rank's peak bytes of tensors and the bytes that it sends.

    Every rank of a gloo group calls it.
    """
    return [_real_step(line) for line in lines]


def _real_step(line: Sequence[str]) -> tuple[int, int]:
    config = parse_arguments(line)
    make_groups(config)
    seed_everything(config.run.seed)
    gc.collect()  # tensors of the run before would count as released in this one
    with (
        mock.patch.dict(os.environ, DIRECT_EXCHANGE),
        mock.patch.object(dist.Work, "wait", _wait_and_rest),
        transient_memory_seen_by_profilers(),
        collectives_at_once(),
        _AtOnce(),
        warnings.catch_warnings(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        warnings.simplefilter("ignore")
        chunks = [wrap_model(stage, config.model, config.ddp) for stage in build_model(config)]
        optimizer = get_megatron_optimizer(config.optimizer, chunks)
        scheduler = build_scheduler(config, optimizer)
        number = config.num_microbatches(dist.get_world_size())
        train_step(chunks, optimizer, scheduler, batches(config), number).result()
        began = time.time_ns()
        train_step(chunks, optimizer, scheduler, batches(config), number).result()
    peak = _peak(profiler, began)
    with mock.patch.dict(os.environ, DIRECT_EXCHANGE), collectives_at_once(), _SentBytes() as sent:
        train_step(chunks, optimizer, scheduler, batches(config), number).result()
    parallel_state.destroy_model_parallel()
    return peak, sent.total


_wait = dist.Work.wait


def _wait_and_rest(work: dist.Work, *timeout: Any) -> bool:
    """Waits for a collective, and for gloo's thread to drop it: what that drops last, the profiler does not see."""
    ended = _wait(work, *timeout)
    time.sleep(0.003)
    return ended


class _AtOnce(TorchDispatchMode):
    """Ends collectives where they begin, without gloo's copies: gathers by broadcasts, and reduce-scatters a little
    at a time, by all-reduces."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("c10d::allreduce_", "c10d::broadcast_", "c10d::alltoall_base_"):
            output = func(*args, **(kwargs or {}))
            work = output if isinstance(output, torch.ScriptObject) else output[-1]
            dist.Work.unbox(work).wait()
            return output
        if func._schema.name not in ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_"):
            return func(*args, **(kwargs or {}))
        output, input_, group = args[0], args[1].view(-1), ProcessGroup.unbox(args[2])
        if func._schema.name == "c10d::_allgather_base_":
            parts = output.view(-1).chunk(group.size())
            parts[group.rank()].copy_(input_)
            for root, part in enumerate(parts):
                group.broadcast(part, root).wait()
            return output, FakeWork().boxed()
        first = group.rank() * output.numel()
        for start in range(0, input_.numel(), _PIECE):
            piece = input_[start : start + _PIECE].clone()
            group.allreduce([piece]).wait()
            begin, end = max(start, first), min(start + piece.numel(), first + output.numel())
            if begin < end:
                output.view(-1)[begin - first : end - first].copy_(piece[begin - start : end - start])
        return output, FakeWork().boxed()


_PIECE = 2**13  # elements


class _SentBytes(TorchDispatchMode):
    """Adds up what this rank sends in collectives: in a ring ``(n - 1) / n`` of the larger tensor, to all-reduce it
    twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name != "c10d::recv_":
            ranks = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)).size()
            sides = ([leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args[:2])
            largest = max(sum(tensor.nbytes for tensor in side) for side in sides)
            passes = 2 if "allreduce" in func._schema.name else 1
            self.total += largest if func._schema.name == "c10d::send" else passes * largest * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def _peak(profiler: profile, began: int) -> int:
    """Returns the most bytes that are allocated at a moment after `began`, in ns."""
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    held = peak = 0
    for moment, nbytes in changes:
        held += nbytes
        peak = max(peak, held) if moment >= began else held
    return peak
