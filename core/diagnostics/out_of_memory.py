"""Explains a failed allocation: where this rank's memory is, and which settings would save most of it here.

Memory is counted by category, from the tensors of the wrapper and of the optimizers that have stepped.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base import memory_categories as memory
from ..base.errors import MemoryLimitError
from ..base.memory_categories import is_out_of_memory, known_optimizers
from ..base.text import aligned, first_line, readable_bytes


def memory_by_category(wrapper: Any, device_type: str) -> dict[str, int]:
    """Returns the bytes of this rank's memory on a kind of device, for each of `memory.CATEGORIES`.

    A storage counts once, in the first category that has it. The last category is everything else that the process
    holds: of torch's allocations on an accelerator, of the resident set on the host, Python itself included.
    """
    held = wrapper.engine.held()
    kinds = [(kind, held[kind]) for kind in (memory.WHOLE_GRADIENTS, *held)]  # which are among the gradients too
    kinds += [(memory.OPTIMIZER_STATE, memory.optimizer_tensors(optimizer)) for optimizer in known_optimizers()]
    table = dict.fromkeys(memory.CATEGORIES, 0)
    for kind, nbytes in memory.held_storages(kinds, device_type).values():
        table[kind] += nbytes
    table[memory.REST] = max(0, held_bytes(device_type) - sum(table.values()))
    return table


def held_bytes(device_type: str) -> int:
    """Returns the bytes that this process holds on a kind of device, or 0 on a host that does not report them."""
    if device_type == "cuda":
        return int(torch.cuda.memory_allocated())
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return resident_pages * mmap.PAGESIZE


def table_lines(table: dict[str, int]) -> list[str]:
    """Formats the table: a line for each category that is not empty, and one for the sum."""
    rows = [(name, readable_bytes(size)) for name, size in table.items() if size]
    rows.append(("together", readable_bytes(sum(table.values()))))
    return [f"  {line}" for line in aligned(rows)]


_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGTP]iB)", re.IGNORECASE)
_POWERS = {unit: 1024**power for power, unit in enumerate(("bytes", "kib", "mib", "gib", "tib", "pib"))}
_NUM_SETTINGS = 3


class _DeviceMemoryError(MemoryLimitError, torch.OutOfMemoryError):
    """A `MemoryLimitError` that is also torch's error for an accelerator."""


class _HostMemoryError(MemoryLimitError, MemoryError):
    """A `MemoryLimitError` that is also Python's error for the host."""


def raise_out_of_memory(error: BaseException, wrapper: nn.Module) -> None:
    """Explains a failed allocation with a table of this rank's memory. Returns if `error` is another one.

    Raises:
        MemoryLimitError: from `error`; it is a `torch.OutOfMemoryError` or a `MemoryError` too, for the accelerator's
            memory and the host's.
    """
    if not is_out_of_memory(error):
        return
    on_device = isinstance(error, torch.OutOfMemoryError) or "cuda" in str(error).lower()
    message = _message(error, wrapper, "cuda" if on_device else "cpu")
    raise (_DeviceMemoryError if on_device else _HostMemoryError)(message) from error


def _message(error: BaseException, wrapper: Any, device_type: str) -> str:
    num_bytes = requested_bytes(str(error))
    table = memory_by_category(wrapper, device_type)
    settings = sorted(savings(wrapper, table, num_bytes, device_type), key=lambda item: -item[1])[:_NUM_SETTINGS]
    what = f"could not allocate {readable_bytes(num_bytes)} more" if num_bytes else "could not allocate more"
    lines = [
        f"rank {dist.get_rank()} {what} of {'the accelerator' if device_type == 'cuda' else 'the host'}'s memory. "
        "Where it is on this rank:",
        *table_lines(table),
        "What would save most here:",
        *(f"  {index}. {setting}: about {readable_bytes(size)}" for index, (setting, size) in enumerate(settings, 1)),
        f"The allocator said: {first_line(error)}",
    ]
    return "\n".join(lines)


def requested_bytes(message: str) -> int:
    """Reads the bytes that the failed allocation asked for from the allocator's message, or 0 if it has none."""
    match = _ASKED.search(message)
    return int(float(match[1]) * _POWERS[match[2].lower()]) if match else 0


def savings(wrapper: Any, table: dict[str, int], missing_bytes: int, device_type: str) -> Iterator[tuple[str, int]]:
    """Yields settings that the model does not use yet, with an estimate of the bytes that each would save this rank.

    Sharding over `n` ranks keeps ``1 / n`` of a tensor on each rank. Freeing gathered parameters keeps two units at a
    time, the one that runs and the next one. Recomputation keeps the activations of one layer. Half a micro-batch
    halves the activations; bf16 halves what is computed with.
    """
    plan, config = wrapper.plan, wrapper.config
    num_ranks, own = wrapper.process_group.size(), plan.settings
    spared_share = 1.0 - 1.0 / num_ranks
    is_fully_sharded = plan.shards_parameters
    units = [unit for unit in plan.units if unit.params] if is_fully_sharded else []
    num_units = max(1, len(units))
    # The last unit and the model itself stay gathered in any case: backward begins with them.
    stay_gathered = is_fully_sharded and sum(unit.is_freed and not unit.kept_among for unit in units) < num_units - 2
    recomputes = getattr(config, "recompute_granularity", None) == "full" or any(
        transform.recomputes != "none" for transform in plan.transforms
    )
    in_half = any(getattr(config, name, False) for name in ("bf16", "fp16")) or plan.root.precision.param_dtype
    parameters, gathered, gradients, whole_gradients, state, rest = (table[name] for name in memory.CATEGORIES)
    shards = parameters + gradients + state
    kept_whole = {"no_shard": shards, "optim": gradients + parameters}.get(plan.strategy, parameters)
    can_offload = is_fully_sharded and device_type == "cuda" and not own.cpu_offload
    ahead = is_fully_sharded and own.forward_prefetch + own.backward_prefetch > 0

    activations, in_use = rest * (1 - 1 / _num_layers(wrapper.module)), rest + missing_bytes
    freed_bytes, one_unit = gathered * max(0.0, 1 - 2 / num_units), parameters * num_ranks / num_units
    by_micro_batch = "reducing each micro-batch (reduce_every_micro_batch=True)"
    # Whether each applies, what it is with the setting that asks for it, and the bytes.
    candidates: list[tuple[bool, str, float]] = [
        (True, "half the micro-batch, with twice as many micro-batches", in_use / 2),
        (not recomputes, "recomputation of activations (activation_checkpointing='full')", activations),
        (not in_half, "computation in bf16 (config.bf16=True)", (gathered + in_use) / 2),
        (not is_fully_sharded, "full sharding (TorchFullyShardedDataParallelConfig)", spared_share * kept_whole),
        (stay_gathered, f"freeing gathered parameters after forward ({plan.request_to_free})", freed_bytes),
        (not own.reduce_every_micro_batch, by_micro_batch, spared_share * whole_gradients),
        (ahead, "no unit gathered ahead (forward_prefetch=0, backward_prefetch=0)", one_unit),
        (can_offload, "shards on the host (cpu_offload=True)", shards),
    ]
    for applies, setting, size in candidates:
        if applies and size >= 1:
            yield setting, int(size)


def _num_layers(module: nn.Module) -> int:
    """Returns the length of the model's longest module list, which holds a transformer's layers, at least 1."""
    lists = (submodule for submodule in module.modules() if isinstance(submodule, (nn.ModuleList, nn.Sequential)))
    return max((len(layers) for layers in lists), default=1) or 1
