"""The shortcuts that `cpu_shortcuts.py` measures: how each is switched off, and how it shows that it is used."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from _ddp_candidates import REPLICATED, ZERO1, ZERO2

WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("DistributedDataParallelConfig", REPLICATED),
    "ZeRO-1": ("DistributedDataParallelConfig", ZERO1),
    "ZeRO-2": ("DistributedDataParallelConfig", ZERO2),
    "ZeRO-3": ("FullyShardedDataParallelConfig", {}),
    "FSDP2": ("TorchFullyShardedDataParallelConfig", {}),
}
"""The config of `core.distributed` that each is chosen by, and its fields."""

FLAT = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


@dataclass(frozen=True)
class Shortcut:
    """One way of core to save time or memory that a step can do without, with the same result."""

    wrappers: tuple[str, ...]
    uses: Callable[[Callable[[], None]], int]
    """Runs what it is given, and returns how often the shortcut was used meanwhile."""
    off: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Switches it off inside. Entered around the construction and each step, whose collectives all end inside."""
    fields_off: dict[str, Any] = field(default_factory=dict)
    """Of the model's config, without it."""


def _counted(target: str, is_use: Callable[..., bool] = lambda *call: True) -> Callable[[Callable[[], None]], int]:
    """Counts calls of a function of core for which `is_use(result, *arguments)` is true."""

    def uses(run: Callable[[], None]) -> int:
        function, found = pkgutil.resolve_name(target), []

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if is_use(result, *args):
                found.append(target)
            return result

        with mock.patch(target, counting):
            run()
        return len(found)

    return uses


def _is_true(result: bool, *unused: Any) -> bool:
    return result


def _replaced(target: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch(target, by)


# ---- what replaces a shortcut, where a constant does not


def _every_row(ids: torch.Tensor, weight: torch.Tensor, adds_rows: bool = False) -> torch.Tensor:
    return F.embedding(ids, weight)


class _KeepsNothing(list[torch.Tensor]):
    """In place of `gloo._idle_inboxes`: every exchange allocates."""

    def __setitem__(self, *unused: Any) -> None:
        pass


def _inboxes_kept(run: Callable[[], None]) -> int:
    from core.comm import gloo

    run()
    return len(gloo._idle_inboxes)


def _zeroing() -> AbstractContextManager[Any]:
    """Makes gradients zero at the beginning of a step, and the first one is added: no layer is lent memory then."""
    from core.distributed.flat.grad_slot import GradSlot

    clear = GradSlot.clear

    def clear_and_zero(slot: GradSlot) -> None:
        clear(slot)
        slot.show().zero_()
        slot.counts = True

    return mock.patch.object(GradSlot, "clear", clear_and_zero)


def _one_lane() -> AbstractContextManager[Any]:
    """Runs gathers and reductions of ZeRO-3 in one lane and one process group."""
    from core.comm.lane import comm_lane

    context = ExitStack()
    context.enter_context(mock.patch("core.distributed.flat.flat_engine.twin_group", lambda group: group))
    context.enter_context(
        mock.patch("core.distributed.flat.flat_engine.comm_lane", lambda device, number=0: comm_lane(device))
    )
    return context


def _is_second_lane(lane: Any, device: torch.device, *unused: Any) -> bool:
    from core.comm.lane import comm_lane

    return lane is not comm_lane(device)


def _torchs_memory() -> AbstractContextManager[Any]:
    from core.base.host_memory import transient_memory_seen_by_profilers

    return transient_memory_seen_by_profilers()


# ---- the shortcuts

SHORTCUTS = {
    # A layer computes a weight's gradient in the buffer, and the embedding brings the rows in use alone.
    "gradient fusion": Shortcut(
        (*FLAT, "FSDP2"),
        _counted("core.tensor_parallel.weight_gradients._Embedding.apply"),
        fields_off={"gradient_accumulation_fusion": False},
    ),
    # Each of its two parts alone.
    "lent memory": Shortcut(
        FLAT,
        _counted("core.distributed.flat.grad_slot.GradSlot.lend", lambda memory, *unused: memory is not None),
        _replaced("core.distributed.flat.grad_slot.GradSlot.lend", lambda slot: None),
    ),
    "rows in use": Shortcut(
        (*FLAT, "FSDP2"),
        _counted("core.tensor_parallel.weight_gradients._Embedding.apply"),
        _replaced("core.tensor_parallel.layers.embedding", _every_row),
    ),
    # The first gradient of a step is copied, rather than added to zeros.
    "no zeroing": Shortcut(
        ("DDP", "ZeRO-1"),
        _counted("core.distributed.flat.grad_slot.GradSlot.clear", lambda _, slot: not slot.counts),
        _zeroing,
    ),
    # Memory of a whole gradient serves the next bucket of its size. ZeRO-2 keeps none.
    "kept gradients": Shortcut(
        ("ZeRO-3",),
        _counted("core.base.host_memory.ReusedMemory.keeps", _is_true),
        _replaced("core.base.host_memory.ReusedMemory.keeps", lambda memory, numel: False),
    ),
    # Memory that comes and goes is the system's, rather than the C allocator's.
    "pages of the system": Shortcut(
        ("ZeRO-2", "ZeRO-3"), _counted("core.base.host_memory.host_pages"), _torchs_memory
    ),
    # Reductions do not wait for gathers.
    "second lane": Shortcut(
        ("ZeRO-3",), _counted("core.distributed.flat.flat_engine.comm_lane", _is_second_lane), _one_lane
    ),
    # Ranks exchange pieces without gloo's collectives.
    "direct exchange": Shortcut(
        ("DDP", "ZeRO-1", "ZeRO-3", "FSDP2"),
        _counted("core.comm.gloo._send"),
        lambda: mock.patch.dict(os.environ, SHARDSTACK_DIRECT_EXCHANGE="0"),
    ),
    "kept inboxes": Shortcut(
        ("DDP", "ZeRO-3", "FSDP2"), _inboxes_kept, lambda: mock.patch("core.comm.gloo._idle_inboxes", _KeepsNothing())
    ),
    # A reduction adds a message while it is in the cache, rather than all at once.
    "messages of 4 MiB": Shortcut(
        ("DDP", "ZeRO-3"),
        _counted(
            "core.comm.gloo.exchange_and_add",
            lambda _, output, *unused: output.nbytes > pkgutil.resolve_name("core.comm.gloo.CHUNK_BYTES"),
        ),
        _replaced("core.comm.gloo.CHUNK_BYTES", 2**40),
    ),
}
