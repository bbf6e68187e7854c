"""What to run first on a machine with a GPU, in the order in which it tells most: `make gpu-first`.

Simulated streams (`tests/streams`) show what they can on a CPU. These stages show the rest: whether kernels and NCCL
do what is assumed of them, what the simulation leaves out, numbers, and speed. A stage that fails does not end the
others. On a machine without a GPU it ends with one line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.gpu_machine import ROOT, gpu_files, reason_against

LAUNCHES, SLEEP_CYCLES, LONG_S = 5000, int(20e9), 0.5
"""Launches behind a kernel of about ten seconds; one that takes longer than `LONG_S` has waited for the device."""


@dataclass(frozen=True)
class Stage:
    """One thing to run."""

    name: str
    minutes: int
    tells: str
    command: tuple[str, ...]
    """Arguments of this Python."""


def stages() -> list[Stage]:
    """Returns what is run, the first ten minutes first."""
    files = gpu_files()
    quick = tuple(file for file in files if not file.startswith("tests/functional"))
    pytest = ("-m", "pytest", "-q", "-m", "gpu")
    return [
        Stage(
            *("tests", 3, "kernels, one rank through the lane and NCCL bit for bit, delays that change no bit"),
            (*pytest, "-n", "4", "--dist", "worksteal", *quick),
        ),
        Stage(
            *("assumptions", 2, "how many launches the host may be ahead, and which stream hooks of a backward have"),
            ("-m", "tests.gpu_first", "--assumptions"),
        ),
        Stage(
            *("out of memory", 1, "a backward that runs out of memory is dropped, and the next steps have their bits"),
            (*pytest, "tests/streams/test_delays.py", "-k", "memory"),
        ),
        Stage(
            *("golden values", 9, "wrappers agree, runs resume and repeat, models of real size train"),
            (*pytest, "-n", "6", "--dist", "worksteal", "tests/functional/test_cases.py", "--update-golden"),
        ),
        Stage(*("speed", 9, "tokens a second of each technique"), ("benchmarks/gpt_throughput.py", "--ladder")),
        Stage(
            *("overhead", 5, "FSDP2's wrapper next to a bare model"),
            ("benchmarks/gpt_throughput.py", "--wrapper", "fsdp2", "--against", "bare"),
        ),
    ]


def first_launch_that_waits(launch: Callable[[], object], launches: int = LAUNCHES) -> int | None:
    """Returns the number of the first launch that takes longer than `LONG_S`; None if none does."""
    for number in range(launches):
        start = time.monotonic()
        launch()
        if time.monotonic() - start > LONG_S:
            return number
    return None


def check_assumptions() -> int:
    """Prints what the design assumes of CUDA and was not measured; returns an exit status."""
    x = torch.zeros(1, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)
    number = first_launch_that_waits(lambda: x.add_(1))
    torch.cuda.synchronize()
    print(
        f"the host was {LAUNCHES} launches ahead of the device and did not wait"
        if number is None
        else f"the host waits for the device at launch {number}: what it reads late is not reached behind a hang"
    )
    weight, seen, main = torch.ones(4, device="cuda", requires_grad=True), list[bool](), torch.cuda.current_stream()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(torch.cuda.current_stream() == main))
    output = weight * 2
    output.register_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(torch.cuda.current_stream() == main)
        )
    )
    output.sum().backward()
    print(f"hooks and final callbacks of a backward run on the stream of the forward: {seen}")
    return 0 if seen == [True, True] else 1


def main(arguments: Sequence[str]) -> int:
    """Runs the stages, and prints what each has told; returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_first", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="run only stages with this in their name")
    parser.add_argument("--assumptions", action="store_true", help="measure what the design assumes, and nothing else")
    options = parser.parse_args(arguments)
    if (reason := reason_against()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    if options.assumptions:
        return check_assumptions()
    failed = []
    for stage in stages():
        if options.only in stage.name:
            print(f"\n==== {stage.name} ({stage.minutes} min): {stage.tells}", flush=True)
            if subprocess.run([sys.executable, *stage.command], cwd=ROOT, check=False).returncode:
                failed.append(stage.name)
    print(f"\n==== failed: {', '.join(failed)}" if failed else "\n==== all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
