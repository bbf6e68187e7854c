"""Measures a row of `gpt_throughput.py`: its time, its memory, the bytes of its update, and where a step went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _llama import Preset, model_flops
from _llama_training import Training
from _passes import Update
from _rates import copy_rate, device_name, matmul_tflops, median_seconds, peak_bytes, reset_peak
from _step_picture import as_svg, from_profile
from _throughput_report import Report, Result
from _throughput_rows import Row
from torch.profiler import ProfilerActivity, profile, record_function


def measure_rates(report: Report, when: str, device: torch.device) -> None:
    """Adds the rates of a matrix product and of a copy to the report, and prints them.

    Args:
        when: ``before`` the first row, or ``after`` the last.
    """
    reset_peak(device)  # frees models of rows before, which can have filled the memory
    matmul = report.matmul_tflops[when] = matmul_tflops(device)
    copy = report.copy_gb_per_second[when] = copy_rate(device)
    rows = {"before": "before the first row", "after": "after the last row"}[when]
    print(f"bf16 matrix product {matmul:.3f} TFLOP/s, copy {copy:.1f} GB/s read and written, {rows}")


def measure(row: Row, preset: Preset, steps: int, report: Report) -> tuple[Training, Result]:
    """Trains `steps` steps. Returns what trained too: `details` looks closer at it."""
    from core.base import device

    here = device.current_device()
    reset_peak(here)
    training = row.training(preset)
    preset = training.preset
    seconds = median_seconds(training.step, here, steps)
    peak, loss = peak_bytes(here), training.loss()
    flops = model_flops(preset)
    tflops = flops / seconds / 1e12
    result = Result(
        name=row.name,
        wrapper=row.wrapper,
        techniques=[one.name for one in row.techniques],
        samples=preset.samples,
        micro_batches=preset.micro_batches,
        tokens=preset.tokens,
        flops=flops,
        steps=steps,
        seconds=seconds,
        tokens_per_second=preset.tokens / seconds,
        tflops=tflops,
        mfu_percent=None if report.datasheet_tflops is None else 100 * tflops / report.datasheet_tflops,
        percent_of_matmul=100 * tflops / report.matmul_tflops["before"],
        peak_gib=peak / 2**30,
        loss=loss,
    )
    return training, result


def details(training: Training, report: Report, folder: Path | None) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields fields of a `Result` that are measured once its time is known, each with the function that measures it.

    Args:
        folder: of a profile; None profiles nothing.
    """
    yield "update", lambda: Update.of(training, report.copy_gb_per_second["before"])
    if folder is not None:
        yield "profile", lambda: write_profile(training, folder)


def write_profile(training: Training, folder: Path) -> dict[str, float]:
    """Profiles one step: `trace.json.gz` for a trace viewer, and the page `step.svg`; returns the shares of its parts.

    Viewers (perfetto, chrome://tracing) read the compressed trace: that of a large step has hundreds of megabytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    update = training.optimizer.start_step
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (training.device.type == "cuda")

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function("update"):
            return update(*args, **kwargs)

    training.optimizer.start_step = marked
    try:
        with profile(activities=activities) as profiler, record_function("training step"):
            training.step()
            if training.device.type == "cuda":
                torch.cuda.synchronize()
    finally:
        del training.optimizer.start_step
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    times = from_profile(profiler, "training step", "update")
    title = f"One step of {training.preset.batch}, {device_name(training.device)}"
    (folder / "step.svg").write_text(as_svg(times, title))
    return times.shares()
