"""What `gpt_throughput.py` measured, as lines and as JSON, compared with the chip's datasheet."""

from __future__ import annotations

import datetime
import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _measure import machine, versions
from _passes import Update

RESULTS = Path(__file__).resolve().parent / "results"

DATASHEET_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0}
"""Dense bf16 of the SXM parts, without sparsity: NVIDIA's datasheets of the H100 and the H200. Whole names: the PCIe
and NVL parts of the same chips have less."""


def datasheet_tflops(device_name: str) -> float | None:
    """Returns the peak of a device in its datasheet; None of one that is not in `DATASHEET_TFLOPS`."""
    return DATASHEET_TFLOPS.get(device_name)


@dataclass(frozen=True)
class Result:
    """What a row measured."""

    name: str
    wrapper: str
    techniques: list[str]
    samples: int
    """Sequences of a micro-batch."""
    micro_batches: int
    """Micro-batches of a step."""
    tokens: int
    """Tokens of a step."""
    flops: int
    """Operations of a step that the model's formula needs, causal attention."""
    steps: int
    """Timed steps."""
    seconds: float
    """Median of a step."""
    tokens_per_second: float
    tflops: float
    """Model TFLOP a second."""
    mfu_percent: float | None
    """Model FLOP utilization: `tflops` in percent of the datasheet; None where there is none of this device."""
    percent_of_matmul: float
    """Of the rate before the first row."""
    peak_gib: float
    loss: float
    update: Update | None = None
    """Set after the rest, and None where it could not be counted; so is `profile`."""
    profile: dict[str, float] | None = None
    """Shares of a profiled step, if one was profiled."""

    def __str__(self) -> str:
        mfu = "" if self.mfu_percent is None else f"{self.mfu_percent:.1f} % MFU, "
        return (
            f"{self.seconds:.4f} s, {self.tokens_per_second:.0f} tokens/s, {self.tflops:.3f} model TFLOP/s, {mfu}"
            f"{self.percent_of_matmul:.1f} % of the matrix product, peak {self.peak_gib:.2f} GiB"
        )


@dataclass
class Report:
    """What a run has measured so far. `save` writes it as JSON after every change."""

    command: list[str]
    """Arguments of the run."""
    device: str
    preset: dict[str, Any]
    """Its name and fields, with the micro-batches of a step."""
    finished: bool = False
    """Whether the run ended by itself: False in the file of one that was killed."""
    date: str = field(default_factory=lambda: _now().isoformat(timespec="seconds"))
    """When the run started, UTC."""
    machine: str = field(default_factory=machine)
    versions: dict[str, str | None] = field(default_factory=versions)
    """Of torch, CUDA and its libraries, the driver, and the commit."""
    datasheet_tflops: float | None = None
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    """Before the first row and after the last, bf16."""
    copy_gb_per_second: dict[str, float] = field(default_factory=dict)
    """Read and written by a copy on the device, before the first row and after the last."""
    rows: list[Result] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the row."""
    ratios: list[dict[str, Any]] = field(default_factory=list)
    """Of the times of interleaved steps, for `--against`."""

    def save(self, path: Path | None) -> None:
        """Replaces the file at `path` by this report, in one step: a run that is killed leaves the old or the new one.

        Args:
            path: from `new_path`; None writes nothing.
        """
        if path is None:
            return
        written = path.with_suffix(".tmp")
        written.write_text(json.dumps(asdict(self), indent=1) + "\n")
        written.replace(path)


def new_path(folder: Path, *of: str) -> Path:
    """Creates an empty file for a report, named after the parts `of` and the date, and a number if there is one.

    Makes the folder if it is missing. Two runs never get the same file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(("gpt_throughput", *of, str(_now().date())))
    for number in itertools.count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    return path


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)


def profile_line(shares: dict[str, float]) -> str:
    """Returns a line with the parts of a profiled step."""
    return "profiled: " + ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
