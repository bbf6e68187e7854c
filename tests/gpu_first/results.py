"""The folder of a run's results, and its archive: what comes home from a lent machine.

`log.txt` has everything that was printed, `results.json` the machine, the commit and how each command ended, `parts`
what the commands wrote: reports of throughput after each row, of tests, profiles. The archive has all of this, and the
golden values that the run wrote. It is packed again after each command, so that a run that is cut off has one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu_first.checkout import Checkout
from tests.gpu_first.commands import Outcome
from tests.gpu_machine import ROOT, gpu_slug

SCHEMA = 1
CASES = ROOT / "tests" / "functional" / "cases"
LOG, SUMMARY, PARTS, GOLDEN = "log.txt", "results.json", "parts", "golden"


@dataclass(frozen=True)
class Machine:
    """Where results are from."""

    device: str
    """The GPU's name."""
    versions: dict[str, str | None]
    """Of torch, CUDA, the driver and others."""


def this_machine(environment: Mapping[str, str]) -> Machine:
    """Asks a process of its own: one that has used the GPU keeps a part of its memory.

    Raises:
        ValueError: torch cannot use the GPU; one line.
    """
    program = (
        "import json, sys; sys.path.insert(0, 'benchmarks'); import torch, _measure; "
        "print(json.dumps([torch.cuda.get_device_name(0), _measure.versions()]))"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise ValueError("torch sees a GPU and did not say which in 120 s; look at nvidia-smi") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"torch sees a GPU and cannot use it: {last}")
    return Machine(*json.loads(ended.stdout.splitlines()[-1]))


@dataclass
class Results:
    """A folder that is written from the first command on."""

    folder: Path
    checkout: Checkout
    machine: Machine
    began: datetime = field(default_factory=lambda: datetime.now(tz=UTC))
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    """By stage and command."""
    _since: float = field(default_factory=time.time)
    """When the run began: golden values of this GPU that are newer are its own."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a line is written: commands print on a thread of their own."""

    def __post_init__(self) -> None:
        self.parts.mkdir(parents=True)

    @property
    def parts(self) -> Path:
        return self.folder / PARTS

    @property
    def archive(self) -> Path:
        """Named so that archives of several runs can be in one folder."""
        return self.folder / f"gpu-first-{gpu_slug(self.machine.device)}-{self.began:%Y-%m-%d-%H%M%S}.tar.gz"

    def write(self, text: str) -> None:
        """Prints text, which ends with its line, and adds it to the log."""
        with self._lock, (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(text)
            print(text, end="", flush=True)

    def add(self, stage: str, command: str, outcome: Outcome) -> None:
        """Notes how a command ended, and packs everything that there is."""
        self.outcomes.setdefault(stage, {})[command] = outcome
        self.save()

    def save(self) -> None:
        """Writes the summary and packs the archive."""
        summary = self.folder / SUMMARY
        summary.write_text(json.dumps(self.summary(), indent=1) + "\n", encoding="utf-8")
        new = self.archive.with_suffix(".new")
        with tarfile.open(new, "w:gz") as archive:
            for path in [self.folder / LOG, summary, *sorted(p for p in self.parts.rglob("*") if p.is_file())]:
                archive.add(path, path.relative_to(self.folder).as_posix())
            for path in self._golden_values():
                archive.add(path, f"{GOLDEN}/{path.parent.name}/{path.name}")
        new.replace(self.archive)

    def summary(self) -> dict[str, Any]:
        """Returns what `results.json` has."""
        return {
            "schema": SCHEMA,
            "date": self.began.isoformat(timespec="seconds"),
            "device": self.machine.device,
            "driver": self.machine.versions.get("driver"),
            "versions": self.machine.versions,
            **asdict(self.checkout),
            "stages": {
                stage: {name: asdict(outcome) for name, outcome in commands.items()}
                for stage, commands in self.outcomes.items()
            },
        }

    def _golden_values(self) -> list[Path]:
        files = CASES.glob(f"*/golden_values_{gpu_slug(self.machine.device)}.json")
        return sorted(path for path in files if path.stat().st_mtime >= self._since - 1)


def golden_arguments(slug: str, *, update: bool) -> tuple[str, ...]:
    """Returns arguments of pytest for the golden values of a GPU.

    Values of this GPU are compared, and those that are missing written. `update` writes all.

    Raises:
        ValueError: there are none of this GPU, and some of another.
    """
    if update:
        return ("--update-golden",)
    devices = {path.stem.removeprefix("golden_values_") for path in CASES.glob("*/golden_values_*.json")} - {"cpu"}
    if devices and slug not in devices:
        raise ValueError(
            f"golden values are of {', '.join(sorted(devices))}, and this GPU is {slug}; --update-golden writes its "
            "own next to them"
        )
    return ("--write-missing-golden",)
