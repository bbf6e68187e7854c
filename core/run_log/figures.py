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
from ..comm.collectives import all_gather
from ..comm.lane import HostRead
from ..dist_checkpointing.agreement import pipeline_ranks
from ..distributed.groups import is_expert_parameter
from ..optimizer.distrib_optimizer import groups_of_model
from ..optimizer.layer_norms import LayerNorms


class Figures:
    """Sums of the steps since the last line, and what ranks know together.

    Args:
        group: the ranks of the run; None means this one.
        averages: whether losses of ranks are averaged.
        flop_share: share of all devices' peak that a token in a second takes; None if it is unknown.
        leads: measures the time to the end of a forward; None leaves the skew out.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, averages: bool, flop_share: float | None, leads: Leads | None
    ) -> None:
        self._group, self._averages, self._flop_share, self._leads = group, averages, flop_share, leads
        self._clear()

    def _clear(self) -> None:
        # All since the last line: `add` adds, and `take` clears them.
        self._losses: list[Tensor | float] = []
        self._tokens, self._steps, self._seconds = 0, 0, 0.0

    def add(self, loss: Tensor | float | None, tokens: int, seconds: float) -> None:
        """Adds a step. Reads nothing from a device."""
        if loss is not None:
            # The mean is a new tensor: the loop may write another loss into this one's memory.
            self._losses.append(loss.detach().double().mean() if isinstance(loss, Tensor) else float(loss))
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1

    def take(self, values: Mapping[str, Any], norms: LayerNorms | None, *, reads: bool) -> dict[str, Any]:
        """Exchanges the ranks' numbers, and starts anew. All ranks call it together.

        Args:
            values: more numbers, of which tensors are read.
            norms: of the last step, read too.
            reads: False: return nothing, and do not wait for the device.

        Returns:
            the numbers of a line by name.

        Raises:
            OutOfStepError: not all ranks called it.
        """
        lead = 0.0 if self._leads is None else self._leads.mean_s()
        own = torch.tensor([0.0, len(self._losses), lead, peak_memory_bytes()], dtype=torch.float64)
        own = own.to(device.current_device())
        for loss in self._losses:
            own[0] += loss
        rows = own
        if self._group is not None:
            rows = own.new_empty(self._group.size() * len(own))
            all_gather(rows, own, self._group, what="the figures of the log")
        steps, seconds, tokens = self._steps, self._seconds, self._tokens
        self._clear()
        if not reads:
            return {}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        of_layers = None if norms is None else norms.take()
        numbers = [rows, *(value.detach().reshape(1).to(rows) for value in tensors.values())]
        read = HostRead(torch.cat(numbers if of_layers is None else [*numbers, of_layers])).wait()
        of_ranks = [read[index : index + len(own)] for index in range(0, len(rows), len(own))]
        losses = [total / count for total, count, *_ in (of_ranks if self._averages else of_ranks[:1]) if count]
        line: dict[str, Any] = {"loss": sum(losses) / len(losses)} if losses else {}
        line["step_s"] = seconds / steps
        if tokens:
            line["tokens_per_s"] = tokens / seconds
            if self._flop_share is not None:
                line["mfu"] = tokens / seconds * self._flop_share
        *_, leads, memory = zip(*of_ranks, strict=True)
        line["memory_bytes"] = int(max(memory))
        if len(leads) > 1 and any(leads):
            line |= {"skew": max(leads) * len(leads) / sum(leads), "slowest_rank": leads.index(max(leads))}
        read = read[len(rows) :]
        line |= {**values, **dict(zip(tensors, read, strict=False))}
        return line if norms is None or of_layers is None else line | norms.by_name(read[len(tensors) :])


def memory_kind() -> str:
    """Returns where `peak_memory_bytes` is measured: ``GPU`` or ``RAM``."""
    return "GPU" if device.device_type() == "cuda" else "RAM"


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


class Leads:
    """Measures how long this rank takes from the end of a step to the end of the next forward.

    Until then ranks do not wait for each other's gradients, so that a rank with a slow device or loader shows. Under a
    wrapper that gathers parameters in forward they wait there, and differ less.

    Args:
        model: what the loop calls.
    """

    def __init__(self, model: nn.Module) -> None:
        # Points in time, events on a GPU. `begin` and the hook of the forward add to them, `mean_s` clears them.
        self._pairs: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._hook = model.register_forward_hook(self._after_forward)

    def begin(self) -> None:
        """Notes the end of a step."""
        self._begun = _now()

    def _after_forward(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._begun is not None:  # the first micro-batch
            self._pairs.append((self._begun, _now()))
            self._begun = None

    def mean_s(self) -> float:
        """Returns the mean since the last call in seconds, 0 without any. Waits for the device's last forward."""
        pairs, self._pairs = self._pairs, []
        return sum(_seconds(*pair) for pair in pairs) / max(len(pairs), 1)

    def close(self) -> None:
        self._hook.remove()


def _now() -> Any:
    if device.device_type() != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
