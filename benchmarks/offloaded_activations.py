"""Counts what a step holds on the device and on the host, with activations on the device, on the host or recomputed.

    python benchmarks/offloaded_activations.py [--layers 8] [--width 256] [--sequence 256]

Two gloo ranks of one thread run forward and backward of a GPT under each wrapper. Counts the bytes of all tensors that
the step makes: those in the copies of `offload_activations` as host memory, all others as device memory. They are
exact, and depend on no machine. Exits with 1 if offloading saves less than its copies without three layers'.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _gpt
import torch
from _history import Parser, record
from _measure import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
RANKS = 2
STRATEGIES = {"DDP": "no_shard", "ZeRO-2": "optim_grads", "ZeRO-3": "optim_grads_params", "FSDP2": ""}
PLAIN, ON_HOST = "on the device", "on the host"
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    ON_HOST: {"offload_activations": True},
    "recomputed": {"activation_checkpointing": "full"},
    "recomputed, inputs on the host": {"activation_checkpointing": "full", "offload_activations": True},
}


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, until they are freed, and their peaks.

    Attributes:
        place: where the tensors of the running operation are.
        peaks: the most bytes at one time, by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = PLAIN
        self.held, self.peaks = {PLAIN: 0, ON_HOST: 0}, {PLAIN: 0, ON_HOST: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        seen = {id(storage) for storage in map(_storage, tree_leaves((args, kwargs))) if storage is not None}
        for storage in map(_storage, tree_leaves(output)):
            if storage is not None and id(storage) not in seen:
                seen.add(id(storage))
                self._add(self.place, storage.nbytes())
                weakref.finalize(storage, self._add, self.place, -storage.nbytes())
        return output

    def _add(self, place: str, nbytes: int) -> None:
        self.held[place] += nbytes
        self.peaks[place] = max(self.peaks[place], self.held[place])


def _storage(leaf: Any) -> torch.UntypedStorage | None:
    is_dense = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
    return leaf.untyped_storage() if is_dense else None


def measure(strategy: str, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Returns this rank's peaks with each setting."""
    from core import parallel_state

    parallel_state.initialize_model_parallel()
    _gpt.LAYERS, _gpt.WIDTH, _gpt.VOCABULARY = options.layers, options.width, 512
    return {setting: _peaks(strategy, fields, options.sequence) for setting, fields in SETTINGS.items()}


def _peaks(strategy: str, fields: dict[str, Any], sequence: int) -> dict[str, int]:
    """Returns the peaks of the second of two steps, above its start."""
    from core.distributed import (
        DistributedDataParallelConfig,
        FullyShardedDataParallelConfig,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
        wrap_model,
    )
    from core.distributed.model import offloaded_activations

    memory = Memory()

    class OnHost(offloaded_activations._OnHost):
        def __init__(self, *arguments: Any) -> None:
            memory.place = ON_HOST
            super().__init__(*arguments)
            memory.place = PLAIN

    module = _gpt.build_model(sequence, 512)
    if not strategy:
        config: Any = TorchFullyShardedDataParallelConfig(**fields)
    else:
        kind = FullyShardedDataParallelConfig if strategy == "optim_grads_params" else DistributedDataParallelConfig
        config = kind(data_parallel_sharding_strategy=strategy, **fields)
    model = wrap_model(module, module.config, config)  # type: ignore[attr-defined]
    tokens = _gpt.micro_batches(2, sequence)[0]
    with mock.patch.object(offloaded_activations, "_OnHost", OnHost):
        for step in range(2):
            model.zero_grad_buffer()
            if step:
                memory.__enter__()
            _gpt.backward(model, tokens)
            finalize_model_grads([model])
    memory.__exit__(None, None, None)
    return memory.peaks


def main() -> None:
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--only", choices=STRATEGIES, action="append")
    options = parser.parse_args()
    saves = True
    for name in options.only or STRATEGIES:
        found = run_on_ranks(measure, RANKS, STRATEGIES[name], options)[0]
        whole = found[PLAIN][PLAIN]
        for setting, peaks in found.items():
            device, host = peaks[PLAIN], peaks[ON_HOST]
            record(f"{name}, activations {setting} / on the device", device / whole)
            of_device = f"{device / MIB:7.1f} MiB on the device ({device / whole:.2f} x)"
            print(f"{name:>7}, activations {setting:<31} {of_device}, {host / MIB:6.1f} MiB on the host", flush=True)
        saved, copied = whole - found[ON_HOST][PLAIN], found[ON_HOST][ON_HOST]
        of_layer = copied / max(1, options.layers - 1)
        print(f"{name:>7}: offloading saves {saved / MIB:.1f} MiB, the copies of {saved / of_layer:.1f} layers")
        saves &= saved >= copied - 3 * of_layer
    sys.exit(not saves)


if __name__ == "__main__":
    main()
