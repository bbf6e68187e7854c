"""Measures what keeping survivors of lost ranks costs: copies of each step in memory, and the time after a loss.

    python benchmarks/lost_ranks.py [WRAPPER ...] [--only time|memory|losses] [--rounds 15] [--losses 10]

time: two steps of 4 micro-batches of one sequence of 256 tokens with copies, the last one waited for, next to the same
steps without, on two gloo ranks of one thread each, which are of one machine or stand for two. memory: bytes of the
copies and bytes sent next to their formulas. losses: seconds from the kill -9 of one of two ranks of `examples/gpt` to
the next step in its log: replaced, also by a spare process, left out, and all restarted from a checkpoint of the step
before. Exits with 1 when a limit is exceeded, or a formula is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

import torch.distributed as dist
from _gpt import MICRO_BATCHES, backward, build_model, micro_batches
from _history import record
from _measure import PairedRatio, interleaved_seconds, machine, run_on_ranks, section
from _report import MIB, arguments, check_names, exit_status

from core.base.files import make_folders

LIMIT, RANKS, STEPS = 1.03, 2, 2
VOCABULARY, SEQUENCE = 2048, 256
WRAPPERS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-1": {"data_parallel_sharding_strategy": "optim"},
    "ZeRO-3": {},
    "FSDP2": {},
}
MOST_SPARES = 5
"""Processes that wait as spares, of some hundred MB each."""
REST_BYTES = 0.01
"""What copies may hold more than parameters and moments: padding, random state; a share of the formula."""
PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "gpt" / "pretrain_gpt.py"
LOSS_FLAGS = ("--micro-batch-size", "2", "--global-batch-size", "8", "--seq-length", "64", "--eval-iters", "0")


def _training(name: str, machines: int, root: Path | None) -> tuple[Callable[[], None], Any, int]:
    """Returns steps of a model, its copies if there is a root for them, and its parameters."""
    from core import parallel_state
    from core.base.module_protocol import unwrap_model
    from core.dist_checkpointing import model_state_dict
    from core.dist_checkpointing.host_copies import HostCopies
    from core.dist_checkpointing.model_state import named_for_checkpoint
    from core.distributed import (
        DistributedDataParallelConfig,
        FullyShardedDataParallelConfig,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
        wrap_model,
    )
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    kinds = {"ZeRO-3": FullyShardedDataParallelConfig, "FSDP2": TorchFullyShardedDataParallelConfig}
    module = build_model(SEQUENCE, VOCABULARY)
    count = sum(parameter.numel() for parameter in module.parameters())
    model = wrap_model(module, module.config, kinds.get(name, DistributedDataParallelConfig)(**WRAPPERS[name]))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0), [model])
    data = [tokens % VOCABULARY for tokens in micro_batches(1, SEQUENCE)]

    def state() -> dict[str, Any]:
        return named_for_checkpoint(model_state_dict(unwrap_model(model)), optimizer.state_tensors())

    def step(copies: Any = None) -> None:
        model.zero_grad_buffer()
        for index, tokens in enumerate(data):
            if index < MICRO_BATCHES - 1:
                with model.no_sync():
                    backward(model, tokens)
            else:
                backward(model, tokens)
        finalize_model_grads([model])
        if copies is not None:
            copies.wait()
        optimizer.step()
        if copies is not None:
            copies.start(state(), {}, 0)

    step()  # so that the optimizer has its moments
    copies = None
    if root is not None:
        node = dist.get_rank() % machines
        folder = root / f"machine{node}"
        make_folders(folder)
        copies = HostCopies(folder, 0, state(), {}, 0, node)

    def steps() -> None:
        for _ in range(STEPS):
            step(copies)
        if copies is not None:
            copies.wait()

    return steps, copies, count


def measure_time(name: str, machines: int, root: Path, rounds: int) -> dict[str, list[float]]:
    without, with_copies = _training(name, machines, None)[0], _training(name, machines, root)
    seconds = interleaved_seconds({"without": without, "with": with_copies[0]}, rounds)
    with_copies[1].close()
    return seconds


def measure_bytes(name: str, machines: int, root: Path) -> tuple[int, int, int, int]:
    """Returns bytes of a version, bytes sent, bytes of both versions' files on all machines, and parameters."""
    _, copies, count = _training(name, machines, root)
    copies.close()
    dist.barrier()
    on_disk = sum(path.stat().st_blocks * 512 for path in root.rglob("*.bin"))
    return copies.num_bytes, copies.num_bytes_sent, on_disk, count


def formula_bytes(name: str, machines: int, count: int) -> tuple[float, float]:
    """Returns bytes of a version on a rank, and those that it sends, of fp32 parameters and two moments."""
    if machines == 1:
        return 12 * count / RANKS, 0.0
    if name == "DDP":
        return 12 * count * machines / RANKS, 0.0
    if name == "ZeRO-1":
        return 4 * count * machines / RANKS + 2 * 8 * count / RANKS, 8 * count / RANKS
    return 2 * 12 * count / RANKS, 12 * count / RANKS


def in_memory() -> Path:
    return Path(tempfile.mkdtemp(prefix="benchmark-copies-", dir="/dev/shm"))


def report_time(name: str, machines: int, rounds: int) -> bool:
    root = in_memory()
    try:
        seconds = run_on_ranks(measure_time, RANKS, name, machines, root, rounds)[0]
    finally:
        shutil.rmtree(root)
    ratio = PairedRatio.of(seconds["with"], seconds["without"])
    record(f"{name}, {machines} machines", ratio)
    medians = ", ".join(f"{statistics.median(values) / STEPS:.2f} s {text}" for text, values in seconds.items())
    print(f"  {name:8} {machines} machine(s): {medians}: {ratio}{ratio.verdict(LIMIT)}", flush=True)
    return ratio.holds(LIMIT)


def report_bytes(name: str, machines: int) -> bool:
    root = in_memory()
    try:
        of_ranks = run_on_ranks(measure_bytes, RANKS, name, machines, root)
    finally:
        shutil.rmtree(root)
    expected, sent = formula_bytes(name, machines, of_ranks[0][3])
    version, sent_bytes = (max(of_rank[i] for of_rank in of_ranks) for i in (0, 1))
    memory = of_ranks[0][2]
    record(f"{name}, {machines} machines: memory / formula", memory / (2 * RANKS * expected))
    print(
        f"  {name:8} {machines} machine(s): a version {version / MIB:.1f} MiB a rank, formula {expected / MIB:.1f}; "
        f"sent {sent_bytes / MIB:.1f}, formula {sent / MIB:.1f}; memory of all {memory / MIB:.1f}, formula "
        f"{2 * RANKS * expected / MIB:.1f}",
        flush=True,
    )
    pairs = ((version, expected), (sent_bytes, sent), (memory, 2 * RANKS * expected))
    return all(abs(found - formula) <= REST_BYTES * 12 * of_ranks[0][3] for found, formula in pairs)


def seconds_after_losses(policy: str, corpus: Path, folder: Path, losses: int) -> list[float]:
    """Kills a rank of a run every so many steps. Returns the seconds from each kill to the next step in the log."""
    kind, *spare = policy.split()
    command = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", str(RANKS), "--on-lost-rank", kind]
    command += ["--spare-processes", str(losses)] if spare else []
    if policy == "restart":
        command += ["--max-restarts", str(losses)]
    command += [str(PROGRAM), *LOSS_FLAGS, "--train-iters", "100000", "--log-interval", "1", "--keep-last", "2"]
    command += ["--save-interval", "1" if policy == "restart" else "1000", "--use-distributed-optimizer"]
    command += ["--data-path", str(corpus), "--save", str(folder), "--load", str(folder)]
    path = os.pathsep.join([str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "SHARDSTACK_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with Path(f"{folder}.txt").open("w") as said:
        run = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    found = []
    try:
        for _ in range(losses):
            _wait_for_step(run, folder, _step(folder) + 3)
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            killed_at, before = time.monotonic(), _step(folder)
            os.kill(int(children[1]), signal.SIGKILL)  # not a spare: those start last
            time.sleep(0.02)  # a line that is under way
            _wait_for_step(run, folder, max(before, _step(folder)) + 1)
            found.append(time.monotonic() - killed_at)
    finally:
        run.kill()
        run.wait()
    return found


def _step(folder: Path) -> int:
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def _wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    while _step(folder) < step:
        if run.poll() is not None:
            raise SystemExit(f"the run ended:\n{Path(f'{folder}.txt').read_text()[-4000:]}")
        time.sleep(0.01)


def report_losses(losses: int) -> None:
    from corpus import prepare

    with tempfile.TemporaryDirectory(prefix="benchmark-lost-") as scratch:
        text = Path(scratch, "text.txt")
        text.write_text("\n".join(f"the square of {i} is {i * i}, and its cube is {i**3}" for i in range(4000)))
        prepare([text], Path(scratch, "numbers"), tokenizer="byte", split_on="line")
        medians = {}
        for policy in ("replace", "replace by a spare", "shrink", "restart"):
            count = min(losses, {"shrink": RANKS - 1, "replace by a spare": MOST_SPARES}.get(policy, losses))
            found = seconds_after_losses(
                policy, Path(scratch, "numbers"), Path(scratch, policy.replace(" ", "-")), count
            )
            medians[policy] = statistics.median(found)
            print(f"  {policy:18} {count} kills: median {medians[policy]:.2f} s, worst {max(found):.2f} s", flush=True)
        for policy in ("replace", "replace by a spare", "shrink"):
            record(f"{policy} / restart", medians[policy] / medians["restart"])


def main() -> int:
    parser = arguments(__doc__, ("time", "memory", "losses"), WRAPPERS, of="wrapper")
    parser.add_argument("--losses", type=int, default=10, help="ranks killed in each run")
    asked = parser.parse_args()
    check_names(parser, asked.wrappers, WRAPPERS)
    print(machine())
    within = True
    if asked.only in (None, "time"):
        with section(f"a step with copies, next to one without, on {RANKS} ranks"):
            for name in asked.wrappers or ("ZeRO-1", "ZeRO-3"):
                for machines in (1, 2):
                    within &= report_time(name, machines, asked.rounds)
    if asked.only in (None, "memory"):
        with section("bytes of the copies"):
            for name in asked.wrappers or WRAPPERS:
                for machines in (1, 2):
                    within &= report_bytes(name, machines)
    if asked.only in (None, "losses"):
        with section(f"from kill -9 of one of {RANKS} ranks to the next step"):
            report_losses(asked.losses)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
