"""What `gpt_throughput.py` measured, as lines and as JSON, compared with the chip's datasheet."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _measure import machine, versions

RESULTS = Path(__file__).resolve().parent / "results"

DATASHEET_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0}
"""Dense bf16 of the SXM parts, without sparsity: NVIDIA's datasheets of the H100 and the H200. Whole names: the PCIe
and NVL parts of the same chips have less."""


@dataclass(frozen=True)
class Result:
    """What a row measured."""

    name: str
    wrapper: str
    techniques: list[str]
    steps: int
    """Timed steps."""
    seconds: float
    """Median of a step."""
    tokens_per_second: float
    tflops: float
    """Model TFLOP a second."""
    percent_of_datasheet: float | None
    """None where there is no datasheet of this device."""
    percent_of_matmul: float
    """Of the rate before the first row."""
    peak_gib: float
    loss: float
    profile: dict[str, float] | None
    """Shares of a profiled step, if one was profiled."""


@dataclass
class Report:
    """What a run measured; written as JSON."""

    device: str
    preset: dict[str, Any]
    machine: str = field(default_factory=machine)
    versions: dict[str, str | None] = field(default_factory=versions)
    datasheet_tflops: float | None = None
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    """Before the first row and after the last, bf16."""
    rows: list[Result] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the row."""
    ratios: list[dict[str, Any]] = field(default_factory=list)
    """Of the times of interleaved steps, for `--against`."""

    def write(self, *of: str) -> Path:
        """Writes it under a name of the parts `of`, and the date; returns the path."""
        day = datetime.datetime.now(tz=datetime.timezone.utc).date()
        name = "-".join(("gpt_throughput", *of, str(day))) + ".json"
        path = RESULTS / name
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def datasheet_tflops(device_name: str) -> float | None:
    """Returns the peak of a device in its datasheet; None of one that is not in `DATASHEET_TFLOPS`."""
    return DATASHEET_TFLOPS.get(device_name)


def print_result(row: object, result: Result) -> None:
    datasheet = result.percent_of_datasheet
    print(
        f"  {row}: {result.seconds:.4f} s, {result.tokens_per_second:.0f} tokens/s, {result.tflops:.3f} model "
        f"TFLOP/s, {'' if datasheet is None else f'{datasheet:.1f} % of the datasheet, '}"
        f"{result.percent_of_matmul:.1f} % of the matrix product, peak {result.peak_gib:.2f} GiB",
        flush=True,
    )
    if result.profile is not None:
        print("    profiled: " + ", ".join(f"{part} {share:.1%}" for part, share in result.profile.items()))
