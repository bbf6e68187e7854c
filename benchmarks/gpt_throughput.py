"""Trains a dense GPT on one GPU, or the CPU, in one process, and prints how fast, compared with the chip.

    python benchmarks/gpt_throughput.py [--preset 1b] [--ladder] [--profile FOLDER] [--save]

A step is forward, backward, clipping and AdamW in bf16 with fp32 masters, through this project's wrapper, optimizer
and training step. For each row it prints tokens a second; model TFLOP a second, of the products that the model's
formula needs and not of what is computed again; its percent of the datasheet and of a matrix product measured in this
run; and peak memory. `--ladder` adds a technique a row. `--profile` writes a trace and a page of where the last row's
step went.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _llama import PRESETS, Preset, Training, matrix_parameters, model_flops
from _measure import high_water_bytes, machine, reset_high_water
from _step_picture import as_svg, from_profile
from torch.profiler import ProfilerActivity, profile, record_function

GIB = 2**30
DATASHEET_TFLOPS = {"H100": 989.0, "H200": 989.0}
"""Dense bf16 of the SXM parts, without sparsity: NVIDIA's datasheets of the H100 and the H200."""


@dataclass(frozen=True)
class Technique:
    """What a row adds: fields of the model's config and of the wrapper's."""

    name: str
    model: dict[str, Any]
    wrapper: dict[str, Any]


LADDER = (
    Technique("plain", {}, {}),
    Technique("compiled layers", {}, {"compile_units": True}),
    Technique("loss in parts", {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}, {}),
    Technique("half of the activations", {}, {"compile_units": True, "activation_memory_budget": 0.5}),
    Technique(
        "selective recomputation", {}, {"activation_checkpointing": "selective", "activation_memory_budget": None}
    ),
    Technique("full recomputation", {}, {"activation_checkpointing": "full", "activation_memory_budget": None}),
)
"""Each row has the techniques above it too, but for those that set the same."""

DEFAULT = ("compiled layers", "loss in parts")
"""The techniques of a run without a ladder."""


@dataclass(frozen=True)
class Result:
    """One row."""

    techniques: list[str]
    seconds: float
    """Median of a step."""
    tokens_per_second: float
    tflops: float
    """Model TFLOP a second."""
    percent_of_datasheet: float | None
    percent_of_matmul: float
    peak_gib: float
    loss: float


def matmul_tflops(device: torch.device) -> float:
    """Returns the rate of a large bf16 matrix product on this device now."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _median_seconds(lambda: left @ right, device, 20)
    return 2 * size**3 / seconds / 1e12


def _median_seconds(run: Callable[[], Any], device: torch.device, count: int, warmup: int = 3) -> float:
    """Median seconds of a call; on a GPU between events, so that the host may run ahead as in training."""
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else high_water_bytes()


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_high_water()


def measure(preset: Preset, techniques: list[Technique], steps: int, matmul: float, folder: Path | None) -> Result:
    """Trains `steps` steps with these techniques; with a folder profiles one more."""
    from core import device

    here = device.current_device()
    _reset_peak(here)
    model_fields = {k: v for one in techniques for k, v in one.model.items()}
    wrapper_fields = {k: v for one in techniques for k, v in one.wrapper.items()}
    training = Training(preset, model_fields, wrapper_fields)
    seconds = _median_seconds(training.step, here, steps)
    peak, loss = _peak_bytes(here), training.loss()
    if folder is not None:
        write_profile(training, folder)
    tflops = model_flops(preset) / seconds / 1e12
    datasheet = _datasheet(here)
    return Result(
        techniques=[one.name for one in techniques],
        seconds=seconds,
        tokens_per_second=preset.samples * preset.sequence / seconds,
        tflops=tflops,
        percent_of_datasheet=None if datasheet is None else 100 * tflops / datasheet,
        percent_of_matmul=100 * tflops / matmul,
        peak_gib=peak / GIB,
        loss=loss,
    )


def write_profile(training: Training, folder: Path) -> None:
    """Profiles one step: `trace.json` for a trace viewer, and the page `step.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    update = training.optimizer.start_step
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (training.device.type == "cuda")

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function("update"):
            return update(*args, **kwargs)

    training.optimizer.start_step = marked  # type: ignore[method-assign]
    try:
        with profile(activities=activities) as profiler, record_function("training step"):
            training.step()
            if training.device.type == "cuda":
                torch.cuda.synchronize()
    finally:
        del training.optimizer.start_step
    profiler.export_chrome_trace(str(folder / "trace.json"))
    times = from_profile(profiler, "training step", "update")
    title = (
        f"One step of {training.preset.samples} x {training.preset.sequence} tokens, {_device_name(training.device)}"
    )
    (folder / "step.svg").write_text(as_svg(times, title))
    print("  profiled step: " + ", ".join(f"{part} {share:.1%}" for part, share in times.shares().items()))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _datasheet(device: torch.device) -> float | None:
    return next((rate for name, rate in DATASHEET_TFLOPS.items() if name in _device_name(device)), None)


def rungs(is_ladder: bool) -> list[list[Technique]]:
    """Returns the techniques of each row."""
    if not is_ladder:
        return [[one for one in LADDER if one.name in DEFAULT]]
    rows = []
    for index, last in enumerate(LADDER):
        kept = [one for one in LADDER[:index] if one.wrapper.keys().isdisjoint(last.wrapper)]
        rows.append([*kept, last])
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: 1b on a GPU, small on a CPU")
    parser.add_argument("--samples", type=int, help="sequences of a step instead of the preset's")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a row")
    parser.add_argument("--ladder", action="store_true", help="a row for each technique")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write the last row's trace.json and step.svg")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gpt_throughput-DEVICE-DATE.json")
    asked = parser.parse_args(arguments)
    from core import device

    device.init_process_group()
    here = device.current_device()
    name = asked.preset or ("1b" if here.type == "cuda" else "small")
    preset = PRESETS[name]
    if asked.samples:
        preset = Preset(**asdict(preset) | {"samples": asked.samples})
    matmul = matmul_tflops(here)
    print(f"{machine()}, {_device_name(here)}; bf16 matrix product {matmul:.3f} TFLOP/s")
    print(
        f"{name}: {matrix_parameters(preset) / 1e6:.1f} M parameters in matrices, {preset.samples} x {preset.sequence}"
    )
    rows = rungs(asked.ladder)
    results = []
    for techniques in rows:
        label = " + ".join(one.name for one in techniques) or "plain"
        try:
            result = measure(
                preset, techniques, asked.steps, matmul, asked.profile if techniques is rows[-1] else None
            )
        except torch.cuda.OutOfMemoryError:
            print(f"  {label}: out of memory", flush=True)
            continue
        results.append(result)
        datasheet = result.percent_of_datasheet
        print(
            f"  {label}: {result.seconds:.4f} s, {result.tokens_per_second:.0f} tokens/s, {result.tflops:.3f} model "
            f"TFLOP/s, {'' if datasheet is None else f'{datasheet:.1f} % of the datasheet, '}"
            f"{result.percent_of_matmul:.1f} % of the matrix product, peak {result.peak_gib:.2f} GiB",
            flush=True,
        )
    if asked.save:
        day = datetime.datetime.now(tz=datetime.timezone.utc).date()
        path = Path(__file__).resolve().parent / "results" / f"gpt_throughput-{here.type}-{day}.json"
        report = {
            "machine": machine(),
            "device": _device_name(here),
            "preset": {"name": name, **asdict(preset)},
            "matmul_tflops": matmul,
            "rows": [asdict(result) for result in results],
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")
    return 0 if len(results) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
