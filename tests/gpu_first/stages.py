"""What is run, in the order in which it tells most, each stage in at most eight minutes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tests.gpu_machine import EXAMPLE, PYTEST, gpu_files

MOST_MINUTES = 8
NEW_CASES = ("moe", "muon", "offload-activations")
"""Functional cases of the code that is newest."""
_NEW = ("/moe/", "/weights/", "muon", "averaged_weights", "offload")
"""Parts of the paths of its tests."""
_EMPTY = "no-rows or dropped-rows-alone"
"""Tests in which no expert has a row. A kernel that fails there takes its process with it: they run last."""
_LANES = ("/streams/", "/comm/", "one_rank_through_the_backend")


@dataclass(frozen=True)
class Command:
    """One process of a stage, with a time limit."""

    name: str
    minutes: float
    arguments: tuple[str, ...]
    """Arguments of this Python. ``{parts}`` is the folder of its results."""
    needs: tuple[str, ...] = ()
    """Modules in addition to torch and numpy."""
    is_golden: bool = False
    """Writes or compares golden values."""


@dataclass(frozen=True)
class Stage:
    """Some commands that one call can run."""

    name: str
    tells: str
    commands: tuple[Command, ...]

    @property
    def minutes(self) -> float:
        """Limit of all commands together."""
        return sum(command.minutes for command in self.commands)


def stages() -> list[Stage]:
    """Returns all stages."""
    files = [file for file in gpu_files() if not file.startswith("tests/functional")]
    new = [file for file in files if any(part in file for part in _NEW)]
    lanes = [file for file in files if file not in new and any(part in file for part in _LANES)]
    kernels = [file for file in files if file not in (*new, *lanes)]
    first_rows = ("--ladder", "plain", "loss in parts", "--profile", "{parts}/profile")
    others = ("--ladder", "fsdp2", "zero3", "flash attention", "fused attention", "unfused attention")
    return [
        Stage(
            "speed",
            "how many launches the host may be ahead, streams of hooks; tokens a second of 1 B parameters",
            (Command("assumptions", 1, ("-m", "tests.gpu_first.assumptions")), _speed("first rows", 6, *first_rows)),
        ),
        Stage(
            "kernels",
            "kernels, one rank through the lane and NCCL bit for bit, delays that change no bit, steps out of memory",
            (_tests("kernels", 4, *kernels), _tests("lanes", 3, *lanes)),
        ),
        Stage(
            "comparison",
            "FSDP2's wrapper compared with bare fully_shard; ZeRO-3; attention kernels",
            (_speed("against", 4, "--wrapper", "fsdp2", "--against", "fully_shard"), _speed("other rows", 4, *others)),
        ),
        Stage(
            "golden",
            "wrappers agree, runs resume and repeat, models of real size train",
            (_cases("golden values", 8, f"not ({' or '.join(NEW_CASES)})"),),
        ),
        Stage(
            "new",
            "experts, Muon, offloaded activations, averages and streams of weights",
            (
                _tests("new code", 3, *new, which=f"not ({_EMPTY})"),
                _cases("new cases", 4, " or ".join(NEW_CASES)),
                _tests("no rows", 1, *(file for file in new if file.endswith("test_expert_kernels.py")), which=_EMPTY),
            ),
        ),
        Stage(
            "large",
            "tokens a second of 3, 4 and 1 B parameters, with eight micro-batches a step",
            (_accumulated("3b", 3), _accumulated("4b", 3), _accumulated("1b", 2)),
        ),
    ]


def _speed(name: str, minutes: float, *arguments: str) -> Command:
    return Command(name, minutes, ("benchmarks/gpt_throughput.py", "--results", "{parts}", *arguments))


def _accumulated(preset: str, minutes: float) -> Command:
    return _speed(preset, minutes, "--preset", preset, "--micro-batches", "8", "--steps", "5")


def _tests(name: str, minutes: float, *files: str, which: str = "", jobs: int = 4) -> Command:
    jobs = min(jobs, os.cpu_count() or 1)
    pytest = ("-m", "pytest", "-v", "-m", "gpu", "-n", str(jobs), "--dist", "worksteal", "--durations", "10")
    limit = ("--timeout", str(int(60 * minutes / 2)))  # a test that hangs is named, and others still run
    report = f"--junitxml={{parts}}/{name.replace(' ', '-')}.xml"
    return Command(name, minutes, (*pytest, *limit, report, *(("-k", which) if which else ()), *files), PYTEST)


def _cases(name: str, minutes: float, which: str) -> Command:
    tests = _tests(name, minutes, "tests/functional/test_cases.py", which=which, jobs=8)
    return Command(name, minutes, tests.arguments, (*PYTEST, *EXAMPLE), is_golden=True)
