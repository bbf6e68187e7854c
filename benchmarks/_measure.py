"""Measures benchmarks: paired rounds, high-water marks, and counters of the loopback interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing as mp
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the checkout that this file is in
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: its profiler would announce itself

import _history
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class PairedRatio:
    """The ratios of candidate to baseline, one a round: their median and the 95 % interval of that median."""

    ratios: tuple[float, ...]

    @staticmethod
    def of(candidate: Sequence[float], baseline: Sequence[float]) -> PairedRatio:
        """Pairs the two round by round."""
        return PairedRatio(tuple(c / b for c, b in zip(candidate, baseline, strict=True)))

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    def interval(self, resamples: int = 10_000) -> tuple[float, float]:
        """Percentile bootstrap (Efron, 1979), seeded, so that equal rounds give equal intervals."""
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(self.ratios, k=len(self.ratios))) for _ in range(resamples))
        return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]

    def holds(self, limit: float) -> bool:
        """False when the whole interval is above the limit."""
        return self.interval()[0] <= limit

    def verdict(self, limit: float) -> str:
        """Returns whether the limit holds, as text; fewer than 15 rounds decide nothing."""
        if limit == float("inf"):
            return ""
        if len(self.ratios) < 15:
            return f", limit {limit}: 15 rounds would decide"
        return f", limit {limit}: {'holds' if self.holds(limit) else 'EXCEEDED'}"

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.median:.3f} x  (95 % interval {low:.3f} to {high:.3f}, {len(self.ratios)} rounds)"


def interleaved_seconds(
    candidates: dict[str, Callable[[], None]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every candidate in every round, the slowest rank's; each round reverses the order of the last."""
    from core.base import device

    for _ in range(warmup):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds):
        names = list(candidates)
        for name in names if index % 2 == 0 else reversed(names):
            _synchronize()
            device.barrier()
            started = time.perf_counter()
            candidates[name]()
            _synchronize()
            taken = time.perf_counter() - started
            slowest = torch.tensor(taken, dtype=torch.float64, device=device.current_device())
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def high_water_bytes() -> int:
    """Returns the most memory that this process has had resident (`VmHWM`), bytes."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_high_water() -> None:
    """Makes the high-water mark start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_of_two_steps(build: Callable[[], Callable[[], None]]) -> int:
    """Returns how far the high-water mark rises while a candidate is built and steps twice, bytes.

    Imports are made before, and the first step makes the optimizer's state.
    """
    import core.distributed
    import core.optimizer  # noqa: F401

    reset_high_water()
    base = high_water_bytes()
    step = build()
    step()
    step()
    return high_water_bytes() - base


def interleaved_peaks(
    measure: Callable[..., int], ranks: int, names: Sequence[str], launches: int, *args: Any
) -> dict[str, list[int]]:
    """Peaks of the larger rank of every candidate in every launch; `measure` is called with `args` and a name."""
    peaks: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(launches):
        for name, values in peaks.items():
            values.append(max(run_on_ranks(measure, ranks, *args, name)))
    return peaks


def live_tensor_bytes(root_tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors; of a DTensor those of its local part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in root_tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def peak_allocation_above_start(run: Callable[[], None]) -> int:
    """Returns the most bytes that tensors held during `run` beyond those that lived before it, as the allocator
    reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    held = peak = 0
    for _, nbytes in sorted(changes):
        held += nbytes
        peak = max(peak, held)
    return peak


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent since the machine started."""
    line = next(s for s in Path("/proc/net/dev").read_text().splitlines() if s.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def wire_bytes_per_step(step: Callable[[], None], steps: int = 20) -> float:
    """Bytes over the loopback interface a step, both directions of all ranks, less those of an equally long pause."""
    dist.barrier()
    started, before = time.perf_counter(), loopback_bytes()
    for _ in range(steps):
        step()
    dist.barrier()
    sent, elapsed = loopback_bytes() - before, time.perf_counter() - started
    pause = min(elapsed, 20.0)
    before = loopback_bytes()
    time.sleep(pause)
    idle = (loopback_bytes() - before) * elapsed / pause
    dist.barrier()
    return (sent - idle) / steps


class CollectivePayload(TorchDispatchMode):
    """Counts collectives and the bytes that each must move: tensors in and out of this rank's calls.

    ``bytes`` are by the name of the collective; messages that this rank sends by hand, on any thread, count as
    ``message``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._patch = mock.patch.object(dist, "isend", self._send)
        self._isend = dist.isend

    def total(self) -> int:
        return sum(self.bytes.values())

    def __enter__(self) -> CollectivePayload:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def _send(self, tensor: torch.Tensor, **options: Any) -> Any:
        self.calls["message"] += 1
        self.bytes["message"] += tensor.numel() * tensor.element_size()
        return self._isend(tensor, **options)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name not in ("send", "recv_"):
            self.calls[name] += 1
            self.bytes[name] += _ring_bytes(name, args)
        return func(*args, **(kwargs or {}))


def _ring_bytes(name: str, args: Sequence[Any]) -> int:
    """What one rank sends in a ring: 2 (n - 1) / n of the tensor to all-reduce, (n - 1) / n to gather or scatter."""
    world = dist.get_world_size()
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor)]
    largest = max((t.numel() * t.element_size() for t in tensors), default=0)
    return largest * (world - 1) * (2 if name == "allreduce_" else 1) // world


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls `fn(*args)` on fresh gloo ranks, one thread each, and returns what each returned, in rank order."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        results = context.SimpleQueue()
        processes = [
            context.Process(target=_rank_main, args=(fn, args, rank, world_size, f"{folder}/store", results))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        while len(answers) < world_size:
            while results.empty():
                if any(process.exitcode not in (None, 0) for process in processes):
                    for process in processes:
                        process.kill()
                    raise SystemExit("a rank failed; its traceback is above")
                time.sleep(0.05)
            rank, answer = results.get()
            answers[rank] = answer
        for process in processes:
            process.join()
    return [answers[rank] for rank in range(world_size)]


def _rank_main(fn: Callable[..., Any], args: Any, rank: int, world_size: int, store_path: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), SHARDSTACK_DEVICE="cpu")
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results.put((rank, fn(*args)))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def section(title: str) -> Iterator[None]:
    """Prints a heading, and how long what follows took; rows of the history are of it."""
    _history.head(title)
    started = time.perf_counter()
    print(f"\n{title}\n{'-' * len(title)}", flush=True)
    yield
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)


def machine() -> str:
    """One line about where a result was measured."""
    return f"{processor()}, torch {torch.__version__}, Python {platform.python_version()}"


def processor() -> str:
    """Returns the name of the processor, and how many cores it has."""
    model = next(
        (s.split(":", 1)[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s),
        platform.processor() or "unknown processor",
    )
    return f"{model}, {os.cpu_count()} cores"


def versions() -> dict[str, str | None]:
    """Returns the versions that a figure depends on, by name; None for what is not here."""
    has_gpu = torch.cuda.is_available()  # without one a build for GPUs may lack their libraries
    cudnn = torch.backends.cudnn.version() if has_gpu else None
    nccl = torch.cuda.nccl.version() if has_gpu else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "triton": _triton(),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "commit": commit(),
    }


def _triton() -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def commit() -> str | None:
    """Returns the commit of this checkout, with `+` where files differ from it, but for results.

    Where git does not know it, as in a copy of the files, returns the environment variable `SHARDSTACK_COMMIT`, which
    the caller sets; None without it.
    """
    folder = str(Path(__file__).resolve().parent)
    head = _output_of("git", "-C", folder, "rev-parse", "HEAD")
    if head is None:
        return os.environ.get("SHARDSTACK_COMMIT") or None
    differs = ("status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return head + ("+" if _output_of("git", "-C", folder, *differs) else "")


def _output_of(*command: str) -> str | None:
    """Returns the first line that a program prints; None if it is missing, fails or prints none."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ended.stdout.splitlines()
    return lines[0].strip() if ended.returncode == 0 and lines else None
