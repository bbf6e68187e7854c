"""Saving and loading a training state compared with torch.distributed.checkpoint; how long training waits for a save.

    python benchmarks/checkpoints.py [--millions 500] [--rounds 15] [--only time|async|memory] [--folder FOLDER]

Two gloo ranks hold a model of that many million parameters, cut in halves along the first dimension, with Adam's two
moments, in fp32: 12 bytes a parameter over both. Both libraries save and load that one state.

* ``time``: seconds of a save and a load, compared with stock `save` and `load` as they come (whose files are forced to
  disk too). Limit: 1.1. A load is timed after the files were read once, as is, and with every hash compared.
* ``async``: how long training waits for an asynchronous save, over the seconds of a synchronous one; the first
  time, when the memory for the copies is allocated, and after that. Limit: 0.15 after that. In addition, how much
  longer a computation on all cores takes while a checkpoint is written.
* ``memory``: the rise of the high-water mark (`VmHWM`) of a rank over a save, a load and an asynchronous save; pages
  of mapped files count.

It takes three times 12 bytes a parameter of disk in FOLDER, a new one in the system's temporary folder by default; it
should be a disk, and not a file system in memory.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import Parser, record
from _measure import (
    PairedRatio,
    high_water_bytes,
    interleaved_seconds,
    machine,
    reset_high_water,
    run_on_ranks,
    section,
)

from core.dist_checkpointing import AsyncSaver, load, save
from core.dist_checkpointing.format.content_hash import box_hash

RANKS, WIDTH, VOCABULARY = 2, 1024, 32_768
LIMIT, STALL_LIMIT = 1.1, 0.15
MIB = 2**20

State = dict[str, DTensor]


def build_state(millions: int) -> State:
    """Returns the tensors of a GPT's layers and embedding, and two moments of each, as FSDP cuts them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = WIDTH if millions >= 100 else 256
    layers = max(1, round((millions * 1e6 - VOCABULARY * width) / (12 * width**2)))
    shapes = {"embedding.weight": (VOCABULARY, width)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.norm1.weight": (width,),
            f"layers.{layer}.qkv.weight": (3 * width, width),
            f"layers.{layer}.proj.weight": (width, width),
            f"layers.{layer}.norm2.weight": (width,),
            f"layers.{layer}.fc1.weight": (4 * width, width),
            f"layers.{layer}.fc2.weight": (width, 4 * width),
        }
    generator = torch.Generator().manual_seed(dist.get_rank())
    state: State = {}
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            local = torch.empty(shape[0] // dist.get_world_size(), *shape[1:]).normal_(generator=generator)
            state[f"{kind}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def local_bytes(state: State) -> int:
    return sum(tensor.to_local().nbytes for tensor in state.values())


def local_hashes(state: State) -> list[int]:
    locals_ = [tensor.to_local() for tensor in state.values()]
    return [box_hash(values, (0,) * values.ndim, values.shape) for values in locals_]


def stock_save(state: State, folder: Path) -> None:
    dcp.save(dict(state), checkpoint_id=folder)


def stock_load(state: State, folder: Path) -> None:
    dcp.load(dict(state), checkpoint_id=folder)


def timed(millions: int, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of both libraries, interleaved."""
    warnings.filterwarnings("ignore")
    root, state = Path(folder), build_state(millions)
    saves: dict[str, Callable[[], None]] = {
        "torch": lambda: stock_save(state, root / "torch"),
        "here": lambda: save(state, root / "here", metadata={}),
    }
    saving = interleaved_seconds(saves, rounds, warmup=1)
    saved = local_hashes(state)
    for tensor in state.values():
        tensor.to_local().zero_()
    loads: dict[str, Callable[[], None]] = {
        "torch": lambda: stock_load(state, root / "torch"),
        "here": lambda: _discard(load(state, root / "here")),
        "here, every hash compared": lambda: _discard(load(state, root / "here", verify=True)),
    }
    loading = interleaved_seconds(loads, rounds, warmup=1)
    return {"save": saving, "load": loading, "equal": local_hashes(state) == saved, "bytes": local_bytes(state)}


def _discard(_: Any) -> None:
    pass


def stalls(millions: int, rounds: int, folder: str) -> dict[str, Any]:
    """Returns the seconds for which training waits, of the whole save, and of a computation with and without a
    save."""
    root, state, saver = Path(folder), build_state(millions), AsyncSaver()
    matrix = torch.randn(512, 512)

    def compute() -> None:
        for _ in range(40):
            torch.mm(matrix, matrix)

    waits, computing = [], []

    def asynchronous() -> None:
        started = time.perf_counter()
        saver.save(state, root / "async", metadata={})
        waits.append(_slowest(time.perf_counter() - started))
        while saver.is_writing:
            started = time.perf_counter()
            compute()
            computing.append(time.perf_counter() - started)
        saver.wait()

    candidates: dict[str, Callable[[], None]] = {
        "save": lambda: save(state, root / "here", metadata={}),
        "asynchronous": asynchronous,
        "compute": compute,
    }
    seconds = interleaved_seconds(candidates, rounds, warmup=1)
    during_save = statistics.median(computing) if computing else float("nan")
    return {"seconds": seconds, "waits": waits, "compute during a save": during_save}


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def peak(what: str, millions: int, folder: str) -> int:
    """Bytes by which the high-water mark rises over one save or load."""
    warnings.filterwarnings("ignore")
    root, saver = Path(folder), AsyncSaver()
    small = build_state(1)  # code that is loaded at first use
    save(small, root / "small", metadata={})
    load(small, root / "small")
    stock_save(small, root / "small torch")
    stock_load(small, root / "small torch")
    state = build_state(millions)

    def save_asynchronously() -> None:
        saver.save(state, root / "here", metadata={})
        saver.wait()

    runs: dict[str, Callable[[], None]] = {
        "save, torch": lambda: stock_save(state, root / "torch"),
        "save": lambda: save(state, root / "here", metadata={}),
        "load, torch": lambda: stock_load(state, root / "torch"),
        "load": lambda: _discard(load(state, root / "here")),
        "load, every hash compared": lambda: _discard(load(state, root / "here", verify=True)),
        "asynchronous save": save_asynchronously,
    }
    dist.barrier()
    reset_high_water()
    before = high_water_bytes()
    runs[what]()
    return high_water_bytes() - before


MEMORY = ("save, torch", "save", "load, torch", "load", "load, every hash compared", "asynchronous save")


def show(what: str, seconds: dict[str, list[float]], name: str, limit: float = LIMIT) -> bool:
    """Prints the paired ratio of a candidate to torch's; whether the limit holds."""
    ratio = PairedRatio.of(seconds[name], seconds["torch"])
    medians = [statistics.median(seconds[which]) for which in ("torch", name)]
    record(f"{what}, {name}", ratio)
    print(f"  {name}: {medians[1]:.2f} s, torch {medians[0]:.2f} s: {ratio}{ratio.verdict(limit)}")
    return len(ratio.ratios) < 15 or ratio.holds(limit)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--millions", type=int, default=500, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("time", "async", "memory"))
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written, and removed in the end")
    options = parser.parse_args()
    print(machine())
    holds = True
    root = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    try:
        if options.only in (None, "time"):
            with section(f"seconds, {options.millions} M parameters with Adam's moments, {RANKS} ranks"):
                found = run_on_ranks(timed, RANKS, options.millions, options.rounds, str(root))[0]
                print(f"{found['bytes'] / MIB:.0f} MiB a rank; what was loaded is what was saved: {found['equal']}")
                print("save")
                holds &= show("save", found["save"], "here")
                print("load, from the page cache")
                holds &= show("load", found["load"], "here") & found["equal"]
                holds &= show("load", found["load"], "here, every hash compared")
        if options.only in (None, "async"):
            with section("an asynchronous save"):
                found = run_on_ranks(stalls, RANKS, options.millions, options.rounds, str(root))[0]
                seconds, waits = found["seconds"], found["waits"]
                ratio = PairedRatio.of(waits[1:], seconds["save"])  # the first allocated the memory of the copies
                record("training waits over a save", ratio)
                print(f"  training waits {statistics.median(waits[1:]):.3f} s, {waits[0]:.3f} s the first time")
                print(f"  over the {statistics.median(seconds['save']):.2f} s of a save: {ratio}", end="")
                print(ratio.verdict(STALL_LIMIT))
                holds &= len(ratio.ratios) < 15 or ratio.holds(STALL_LIMIT)
                alone = statistics.median(seconds["compute"])
                print(f"  from beginning to end {statistics.median(seconds['asynchronous']):.2f} s")
                print(f"  a computation takes {found['compute during a save'] / alone:.2f} x while it is written")
        if options.only in (None, "memory"):
            with section("rise of a rank's high-water mark"):
                for what in MEMORY:
                    ranks = run_on_ranks(peak, RANKS, what, options.millions, str(root))
                    print(f"  {what}: {max(ranks) / MIB:.0f} MiB")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
