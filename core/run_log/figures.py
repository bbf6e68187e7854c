"""What a log measures by itself: sums since its last line, over ranks, memory, times, and speed of the device."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import device
from ..comm.collectives import all_gather_by_backend
from ..comm.lane import HostRead
from ..comm.streams import Event
from ..dist_checkpointing.agreement import pipeline_ranks
from ..distributed.groups import is_expert_parameter
from ..optimizer.distrib_optimizer import groups_of_model


class Figures:
    """Sums of the steps since the last line, and what ranks know together.

    A rank's lead is the time from the end of a step to the end of the next forward. Until then ranks do not wait for
    each other's gradients, so that a rank with a slow device or loader shows. Under a wrapper that gathers parameters
    in forward they wait there, and differ less.

    Args:
        model: what the loop calls; None leaves out the skew.
        averages: whether losses of ranks are averaged.
        flop_share: share of all devices' peak that a token in a second takes; None if it is unknown.
    """

    def __init__(self, model: nn.Module | None, *, averages: bool, flop_share: float | None) -> None:
        self._group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._averages, self._flop_share = averages, flop_share
        if model is not None and self._group is not None:
            model.register_forward_hook(self._after_forward)
        # When the last step ended, until the next forward does. A point in time, an event on a GPU.
        self._step_ended: Any = None
        self._clear()

    def _clear(self) -> None:
        # Sums since the last line: `add` adds, and `take` clears them.
        self._loss: Tensor | float = 0.0
        self._num_losses, self._tokens, self._steps, self._seconds = 0, 0, 0, 0.0
        # Points in time at which leads begin and end. The hook of the forward adds, and `take` clears them.
        self._leads: list[tuple[Any, Any]] = []

    def add(self, loss: Tensor | float | None, tokens: int, seconds: float) -> None:
        """Adds a step. Reads nothing from a device."""
        if loss is not None:
            self._loss = self._loss + (loss.detach().double().mean() if isinstance(loss, Tensor) else loss)
            self._num_losses += 1
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1

    def end_step(self) -> None:
        """Begins this rank's lead."""
        self._step_ended = _now()

    def _after_forward(self, *_: Any) -> None:
        if self._step_ended is not None and not torch.compiler.is_compiling():  # the first micro-batch
            self._leads.append((self._step_ended, _now()))
            self._step_ended = None

    def take(self, values: Mapping[str, Any], *, reads: bool) -> dict[str, Any]:
        """Exchanges the ranks' numbers, and starts anew. All ranks call it together.

        Args:
            values: more numbers, of which tensors are read.
            reads: False: return nothing, and do not wait for the device.

        Returns:
            the numbers of a line by name.

        Raises:
            OutOfStepError: not all ranks called it.
        """
        lead = sum(_seconds(*points) for points in self._leads) / max(len(self._leads), 1)
        own = torch.tensor([0.0, self._num_losses, lead, peak_memory_bytes()], dtype=torch.float64)
        own = own.to(device.current_device())
        own[0] = self._loss
        rows = own.view(1, -1)
        if self._group is not None:
            rows = own.new_empty(self._group.size(), len(own))
            all_gather_by_backend(rows, own.view(1, -1), self._group, what="the figures of the log")
        steps, seconds, counted = self._steps, self._seconds, self._tokens
        self._clear()
        if not reads:
            return {}
        tokens = float(counted)  # they may be a tensor
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        numbers = [rows.view(-1), *(value.detach().reshape(1).to(rows) for value in tensors.values())]
        read = HostRead(torch.cat(numbers)).wait()
        losses, counts, leads, memory = (read[kind : rows.numel() : len(own)] for kind in range(len(own)))
        if not self._averages:
            losses, counts = losses[:1], counts[:1]
        line: dict[str, Any] = {"loss": sum(losses) / sum(counts)} if any(counts) else {}
        line |= {"step_s": seconds / steps, "memory_bytes": int(max(memory))}
        if tokens:
            line["tokens_per_s"] = tokens / seconds
        if tokens and self._flop_share is not None:
            line["mfu"] = tokens / seconds * self._flop_share
        if len(leads) > 1 and any(leads):
            line |= {"skew": max(leads) * len(leads) / sum(leads), "slowest_rank": leads.index(max(leads))}
        return {**line, **values, **dict(zip(tensors, read[rows.numel() :], strict=True))}


def peak_memory_bytes() -> int:
    """Returns this rank's peak memory in bytes: what torch allocated on its GPU, else what the process had in RAM."""
    if device.device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_peak_flops() -> float | None:
    """Returns the dense 16-bit FLOP/s of this rank's GPU by its datasheet, or None if it is not known.

    From the planner's table, which knows modules of SXM and their like. Cards for PCIe are slower.
    """
    if device.device_type() != "cuda":
        return None
    name = torch.cuda.get_device_name().upper()
    if "PCIE" in name or "NVL" in name:
        return None
    table = json.loads(Path(device.__file__).with_name("hardware.json").read_text("utf-8"))
    return next((float(entry["peak_flops"]) for entry in table if entry["name"].upper() in name), None)


def model_flops_per_token(chunks: Sequence[nn.Module]) -> float | None:
    """Returns 6 operations for each parameter of the whole model, however it is sharded. All ranks call it.

    (Kaplan et al., 2020: forward and backward, without attention's products.) None for a model with experts, of which
    a token meets some.
    """
    groups = groups_of_model(chunks)
    params = {p for chunk in chunks for p in chunk.parameters() if not getattr(p, "shared", False)}
    cut_over = 1 if groups.tp is None else groups.tp.size()
    own = sum(p.numel() * (cut_over if getattr(p, "tensor_model_parallel", False) else 1) for p in params)
    of_stages = pipeline_ranks(groups).all_gather((own, any(map(is_expert_parameter, params))))
    return None if any(has_experts for _, has_experts in of_stages) else 6.0 * sum(count for count, _ in of_stages)


def _now() -> Any:
    if device.device_type() != "cuda":
        return time.perf_counter()
    event = Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
