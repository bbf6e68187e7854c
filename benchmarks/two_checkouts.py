"""Compares this checkout with another one: time, peak memory and wire bytes of one optimizer step of each wrapper.

    python benchmarks/two_checkouts.py ../before [ROW ...] [--rounds 15] [--launches 1] [--ranks 2]

Each row starts gloo ranks of both checkouts, one thread each, which take steps in turns: those of the other checkout
wait meanwhile. Steps are 4 micro-batches. A checkout that lacks a row's wrapper is passed over. Exits with 1 where a
row is slower by more than 2 %, or needs more than 2 % more memory or bytes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _ddp_candidates import REPLICATED, ZERO1, ZERO2
from _gpt import backward, build_model, micro_batches
from _measure import PairedRatio, high_water_bytes, loopback_bytes, machine, reset_high_water, section
from _report import arguments, check_names, exit_status, judge, print_spread

LIMIT = 1.02


@dataclass(frozen=True)
class Row:
    """A wrapper, by the name of its config in `core.distributed`, and the size of a step."""

    config: str
    settings: Mapping[str, Any]
    samples: int = 2
    sequence: int = 256


_DDP, _FSDP2, _ZERO3 = (
    *("DistributedDataParallelConfig", "TorchFullyShardedDataParallelConfig", "FullyShardedDataParallelConfig"),
)
ROWS = {
    "DDP": Row(_DDP, {}),
    "DDP overlap": Row(_DDP, REPLICATED),
    "ZeRO-1": Row(_DDP, {"use_distributed_optimizer": True}),
    "ZeRO-1 overlap": Row(_DDP, ZERO1),
    "ZeRO-2": Row(_DDP, ZERO2),
    "FSDP2, 128 tokens": Row(_FSDP2, {}, samples=1, sequence=128),
    "FSDP2, 512 tokens": Row(_FSDP2, {}),
    "ZeRO-3, 128 tokens": Row(_ZERO3, {}, samples=1, sequence=128),
    "ZeRO-3, 512 tokens": Row(_ZERO3, {}),
}


# ---- in a rank


def serve(name: str, rank: int, world_size: int, store: str) -> None:
    """Builds a row's step; then takes it for each line of standard input, and prints the seconds."""
    sys.path.insert(0, str(Path.cwd()))  # `_measure` has put this checkout there
    import core.distributed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    if not hasattr(core.distributed, ROWS[name].config):
        print("absent", flush=True)
        return
    import core.optimizer

    if not Path(core.optimizer.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"core comes from {core.optimizer.__file__} and not from {Path.cwd()}")
    reset_high_water()
    base = high_water_bytes()
    step = _step(ROWS[name])
    step()
    step()
    print(high_water_bytes() - base, flush=True)
    for _ in sys.stdin:
        dist.barrier()
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started, flush=True)


def _step(row: Row) -> Callable[[], None]:
    from core import distributed, parallel_state
    from core.distributed import finalize_model_grads, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    module = build_model(row.sequence)
    model = wrap_model(module, module.config, getattr(distributed, row.config)(**row.settings))
    config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model], no_weight_decay_cond=lambda *unused: False)
    data = micro_batches(row.samples, row.sequence)

    def step() -> None:
        model.zero_grad_buffer()
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        finalize_model_grads([model])
        optimizer.step()
        # Else gathers would run in the other checkout's turn. Until 2026-11-27 the wrapper had it.
        (model.settle_parameters if hasattr(model, "settle_parameters") else model.engine.parameters.settle)()

    return step


# ---- in the program that compares


class Ranks:
    """Ranks of a checkout that have built a row's step, and take it when asked.

    Attributes:
        peak: bytes by which the high-water mark of the larger rank rose in building and two steps; None where the
            checkout lacks the wrapper.
    """

    def __init__(self, checkout: Path, name: str, num_ranks: int, store: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SHARDSTACK_DEVICE": "cpu", "WORLD_SIZE": str(num_ranks)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", name, str(rank), str(num_ranks), str(store)],
                env={**environment, "RANK": str(rank)},
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        # Of each turn's step, the slowest rank's seconds and the bytes that all sent; `take_turn` appends.
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        answers = self._answers()
        self.peak = None if "absent" in answers else max(map(int, answers))

    def take_turn(self) -> None:
        before = loopback_bytes()
        for process in self._processes:
            print("step", file=process.stdin, flush=True)
        self.seconds.append(max(map(float, self._answers())))
        self.bytes.append(loopback_bytes() - before)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline().strip() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a rank failed; its traceback is above")
        return answers


def compare(name: str, other: Path, rounds: int, launches: int, num_ranks: int) -> bool:
    """Prints the ratios of a row, and returns whether all are within the limit."""
    here = Path(__file__).resolve().parent.parent
    pairs: list[tuple[Ranks, Ranks]] = []
    for _ in range(launches):
        with (
            tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
            Ranks(here, name, num_ranks, Path(folder) / "this") as this,
            Ranks(other, name, num_ranks, Path(folder) / "other") as that,
        ):
            both = this, that
            if both[0].peak is None or both[1].peak is None:
                print("  one of the checkouts lacks this wrapper")
                return True
            for turn in range(rounds):
                for ranks in both if turn % 2 == 0 else reversed(both):
                    ranks.take_turn()
            pairs.append(both)

    def of(index: int, values: Callable[[Ranks], Sequence[float]]) -> list[float]:
        return [value for pair in pairs for value in values(pair[index])]

    within = True
    for what, unit, values in (
        ("step", "s", lambda ranks: ranks.seconds),
        ("peak memory", "MiB", lambda ranks: [ranks.peak]),
        ("bytes sent", "MiB", lambda ranks: [statistics.median(ranks.bytes)]),
    ):
        ours, theirs = of(0, values), of(1, values)
        print_spread(f"{what}, this", ours, unit)
        print_spread(f"{what}, other", theirs, unit)
        judge(what, ours, theirs)
        within = within and PairedRatio.of(ours, theirs).holds(LIMIT)
    return within


def main() -> int:
    parser = arguments(__doc__, (), launches=1)
    parser.add_argument("checkout", type=Path, help="the other checkout of this project")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(map(repr, ROWS))}; all without names")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    check_names(parser, args.rows, ROWS)
    if not (args.checkout / "core" / "distributed").is_dir():
        parser.error(f"{args.checkout} is no checkout of this project: it has no core/distributed")
    print(machine())
    within = True
    for name in args.rows or ROWS:
        with section(name):
            within = compare(name, args.checkout.resolve(), args.rounds, args.launches, args.ranks) and within
    return exit_status(within)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        raise SystemExit(main())
