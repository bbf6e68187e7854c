"""Trains a dense GPT on one GPU, or the CPU, in one process, and prints how fast, compared with the chip.

    python benchmarks/gpt_throughput.py [--preset 1b] [--wrapper ddp] [--ladder [ROW ...]] [--profile FOLDER]
    python benchmarks/gpt_throughput.py --wrapper fsdp2 --against bare [--rounds 15]

A step is forward, backward, clipping and AdamW in bf16 with fp32 masters, through this project's wrapper, optimizer
and training step; `bare` is the same model with torch's own clipping and AdamW. For each row it prints tokens a
second; model TFLOP a second, of the products that the model's formula needs and not of what is computed again; its
percent of the datasheet and of a matrix product measured in this run, before the first row; and peak memory.

`--ladder` adds a technique a row, then other wrappers and attention kernels; with names it runs these rows alone.
`--profile` writes a trace and a page of where the step went, of each row. `--against` runs steps of two wrappers in
turn and prints the ratio of their times; it exits with 1 where FSDP2 takes over 1.01 times as long as torch's own
`fully_shard` in the same dtypes. Next to `bare` there is no limit: on one rank torch's FSDP2 copies parameters and
gradients, about 22 bytes a parameter, and `bare` does not. With `--micro-batches` a step adds up the gradients of so
many. On a GPU a report is written to `benchmarks/results/`; `--save` and `--no-save` choose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _llama import PRESETS, Preset, matrix_parameters, model_flops
from _llama_training import WRAPPERS, Training
from _measure import PairedRatio, interleaved_seconds
from _rates import device_name, matmul_tflops, median_seconds, peak_bytes, reset_peak
from _report import check_names, judge, print_spread
from _step_picture import as_svg, from_profile
from _throughput_report import Report, Result, datasheet_tflops, print_result
from _throughput_rows import Row, rows_of
from torch.profiler import ProfilerActivity, profile, record_function

LIMITS = {("fsdp2", "fully_shard"): 1.01}
"""Of the time of a wrapper's step, compared with that of another."""

STEPS_A_TURN = {"cuda": 5, "cpu": 1}
"""With which two wrappers take turns, by the device: on a GPU the host runs ahead within a turn, as in training."""


def measure(row: Row, preset: Preset, steps: int, matmul: float, folder: Path | None) -> Result:
    """Trains `steps` steps; with a folder profiles one more."""
    from core.base import device

    here = device.current_device()
    reset_peak(here)
    training = row.training(preset)
    preset = training.preset
    seconds = median_seconds(training.step, here, steps)
    peak, loss = peak_bytes(here), training.loss()
    shares = None if folder is None else write_profile(training, folder)
    tflops = model_flops(preset) / seconds / 1e12
    datasheet = datasheet_tflops(device_name(here))
    return Result(
        name=row.name,
        wrapper=row.wrapper,
        techniques=[one.name for one in row.techniques],
        steps=steps,
        seconds=seconds,
        tokens_per_second=preset.tokens / seconds,
        tflops=tflops,
        percent_of_datasheet=None if datasheet is None else 100 * tflops / datasheet,
        percent_of_matmul=100 * tflops / matmul,
        peak_gib=peak / 2**30,
        loss=loss,
        profile=shares,
    )


def compare(candidate: Row, baseline: Row, preset: Preset, rounds: int, device_type: str) -> dict[str, Any]:
    """Lets two wrappers take turns in this process; returns the ratio of their times, its interval and its limit."""
    count = STEPS_A_TURN[device_type]
    turns: dict[str, Callable[[], None]] = {}
    for row in (candidate, baseline):
        step = row.training(preset).step

        def turn(step: Callable[[], None] = step) -> None:
            for _ in range(count):
                step()

        turns[row.wrapper] = turn
    seconds = interleaved_seconds(turns, rounds)
    for wrapper, values in seconds.items():
        print_spread(f"{wrapper}, turns of {count}", values, "s")
    limit = LIMITS.get((candidate.wrapper, baseline.wrapper), float("inf"))
    is_within = judge(
        f"time, {candidate.wrapper} / {baseline.wrapper}", seconds[candidate.wrapper], seconds[baseline.wrapper], limit
    )
    ratio = PairedRatio.of(seconds[candidate.wrapper], seconds[baseline.wrapper])
    return {
        "candidate": str(candidate),
        "baseline": str(baseline),
        "ratio": ratio.median,
        "interval": ratio.interval(),
        "rounds": rounds,
        "steps_a_turn": count,
        "limit": None if limit == float("inf") else limit,
        "holds": is_within if rounds >= 15 and limit < float("inf") else None,
        "seconds": seconds,
    }


def write_profile(training: Training, folder: Path) -> dict[str, float]:
    """Profiles one step: `trace.json` for a trace viewer, and the page `step.svg`; returns the shares of its parts."""
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
    profiler.export_chrome_trace(str(folder / "trace.json"))
    times = from_profile(profiler, "training step", "update")
    title = f"One step of {training.preset.batch}, {device_name(training.device)}"
    (folder / "step.svg").write_text(as_svg(times, title))
    return times.shares()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: 1b on a GPU, small on a CPU")
    parser.add_argument("--samples", type=int, help="sequences of a micro-batch instead of the preset's")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a row")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="ddp", help="what is around the model")
    parser.add_argument("--against", choices=WRAPPERS, help="the wrapper to compare --wrapper with, in turns")
    parser.add_argument("--rounds", type=int, default=15, help="turns of --against; a limit needs 15")
    parser.add_argument("--ladder", nargs="*", metavar="ROW", help="a row for each technique, or for those named")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write each row's trace.json and step.svg")
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        help="write benchmarks/results/gpt_throughput-DEVICE-PRESET-WHAT-DATE.json; on a GPU by default",
    )
    asked = parser.parse_args(arguments)
    if asked.against == asked.wrapper:
        parser.error(f"--against {asked.against} is what --wrapper is; choose another")
    if asked.against and (asked.ladder is not None or asked.profile):
        parser.error("--against measures one comparison; drop --ladder and --profile")
    asked.rows = rows_of(asked.wrapper, asked.ladder is not None)
    if asked.ladder:
        check_names(parser, asked.ladder, [row.name for row in asked.rows])
        asked.rows = [row for row in asked.rows if row.name in asked.ladder]
    return asked


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    from core.base import device

    device.init_process_group()
    here = device.current_device()
    name = asked.preset or ("1b" if here.type == "cuda" else "small")
    preset = Preset(**asdict(PRESETS[name]) | {"micro_batches": asked.micro_batches})
    if asked.samples:
        preset = Preset(**asdict(preset) | {"samples": asked.samples})
    report = Report(device_name(here), {"name": name, **asdict(preset)})
    report.datasheet_tflops = datasheet_tflops(report.device)
    matmul = report.matmul_tflops["before"] = matmul_tflops(here)
    print(f"{report.machine}, {report.device}; bf16 matrix product {matmul:.3f} TFLOP/s")
    if report.datasheet_tflops is None:
        print(f"no percent of a datasheet: the peak of {report.device!r} is not in DATASHEET_TFLOPS")
    print(f"{name}: {matrix_parameters(preset) / 1e6:.1f} M parameters in matrices, {preset.batch} a step")
    # Rather than run the rest without the compiler.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        status = (
            _compare(asked, preset, report, here) if asked.against else _measure_rows(asked, preset, report, matmul)
        )
    after = report.matmul_tflops["after"] = matmul_tflops(here)
    print(f"bf16 matrix product after the last row {after:.3f} TFLOP/s")
    if asked.save if asked.save is not None else here.type == "cuda":
        what = f"{asked.wrapper}-against-{asked.against}" if asked.against else asked.wrapper
        print(f"written to {report.write(here.type, name, what + '-ladder' * (asked.ladder is not None))}")
    return status


def _compare(asked: argparse.Namespace, preset: Preset, report: Report, here: torch.device) -> int:
    """Adds the ratio of two wrappers to the report; returns 1 if it is above its limit or does not fit."""
    (candidate,), (baseline,) = asked.rows, rows_of(asked.against, False)
    try:
        report.ratios.append(compare(candidate, baseline, preset, asked.rounds, here.type))
    except torch.cuda.OutOfMemoryError:
        print("out of memory, which two models share; choose a smaller --preset, or fewer --samples")
        return 1
    return 1 if report.ratios[0]["holds"] is False else 0


def _measure_rows(asked: argparse.Namespace, preset: Preset, report: Report, matmul: float) -> int:
    """Adds every row to the report; returns 1 if one does not fit into the memory."""
    from core.base.errors import ConfigError

    status = 0
    for row in asked.rows:
        torch._dynamo.reset()  # what was compiled for other rows counts towards dynamo's limit of recompilations
        folder = asked.profile and (asked.profile if len(asked.rows) == 1 else asked.profile / _file_name(row.name))
        try:
            result = measure(row, preset, asked.steps, matmul, folder)
        except torch.cuda.OutOfMemoryError:
            report.not_measured[row.name] = "out of memory"
            status = status if row.may_run_out_of_memory else 1
        except ConfigError as error:  # the device cannot have it, and the message says which and why
            report.not_measured[row.name] = str(error)
        else:
            report.rows.append(result)
            print_result(row, result)
            continue
        print(f"  {row}: {report.not_measured[row.name]}", flush=True)
    return status


def _file_name(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
