"""Trains a dense GPT on one GPU, or the CPU, in one process, and prints how fast, compared with the chip.

    python benchmarks/gpt_throughput.py [--preset 1b] [--micro-batches 8] [--wrapper ddp] [--ladder [ROW ...]]
                                        [--profile FOLDER] [--results FOLDER]
    python benchmarks/gpt_throughput.py --wrapper fsdp2 --against fully_shard [--rounds 15]

A step is forward, backward, clipping and AdamW in bf16 with fp32 masters, through this project's wrapper, optimizer
and training step. `bare` and `fully_shard` are the same model with torch's own clipping and AdamW, without a wrapper
and under torch's `fully_shard`. With `--micro-batches` a step adds up the gradients of so many micro-batches.

First, in seconds, the rates of a matrix product and of a copy are measured. Then each row prints the seconds since the
start; tokens a second; model TFLOP a second, of the products that the model's formula needs, causal attention, and
not of what is computed again; MFU, its percent of the datasheet; its percent of the matrix product; and peak memory.
A second line counts what the update reads and writes (`_passes.py`), and how long a copy of as many bytes takes.

`--ladder` adds a technique a row, then other wrappers and attention kernels; with names it runs these rows alone, in
the order given. `--profile` writes a trace and a page of where the step went, of each row. `--against` runs steps of
two wrappers in turn and prints the ratio of their times. It exits with 1 where FSDP2 takes over 1.01 times as long as
`fully_shard`, in the same dtypes. Next to `bare` there is no limit: on one rank torch's FSDP2 copies parameters and
gradients, about 22 bytes a parameter, and `bare` does not.

A report is written after every row, on a GPU by default; `--results` (default `benchmarks/results/`), `--save` and
`--no-save` choose. A run that is killed leaves the rows that it finished, and ``"finished": false``. A row that fails
does not end the run, which then exits with 1; "unfused attention" may run out of memory. In a copy of the files
without git the environment variable `SHARDSTACK_COMMIT` says the commit.
"""

from __future__ import annotations

import argparse
import io
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1]))  # core, where it is not installed

import _clock  # before torch, to count the seconds of its import
import torch
from _history import Parser, record
from _llama import PRESETS, Preset, matrix_parameters
from _llama_training import WRAPPERS, Training
from _measure import PairedRatio, interleaved_seconds
from _rates import device_name
from _report import check_names, judge, print_spread
from _throughput_measure import details, measure, measure_rates
from _throughput_report import RESULTS, Report, datasheet_tflops, new_path, profile_line
from _throughput_rows import Row, rows_of

LIMITS = {("fsdp2", "fully_shard"): 1.01}
"""Of the time of a wrapper's step, compared with that of another."""

STEPS_A_TURN = {"cuda": 5, "cpu": 1}
"""With which two wrappers take turns, by the device: on a GPU the host runs ahead within a turn, as in training."""


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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="default: 1b on a GPU, small on a CPU")
    parser.add_argument("--samples", type=_positive, help="sequences of a micro-batch instead of the preset's")
    parser.add_argument("--micro-batches", type=_positive, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=_positive, help="timed steps of a row, 20 by default")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="ddp", help="what is around the model")
    parser.add_argument("--against", choices=WRAPPERS, help="the wrapper to compare --wrapper with, in turns")
    parser.add_argument("--rounds", type=_positive, help="turns of --against, 15 by default; a limit needs 15")
    parser.add_argument("--ladder", nargs="*", metavar="ROW", help="a row for each technique, or for those named")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write each row's trace.json.gz and step.svg")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write the report there; made if it is missing")
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        help="write gpt_throughput-DEVICE-PRESET-WHAT-DATE.json; by default on a GPU, and with --results",
    )
    asked = parser.parse_args(arguments)
    if asked.against == asked.wrapper:
        parser.error(f"--against {asked.against} is what --wrapper is; choose another")
    if asked.against and (asked.ladder is not None or asked.profile or asked.steps):
        parser.error("--against measures one comparison, in --rounds; drop --ladder, --profile and --steps")
    if asked.rounds and not asked.against:
        parser.error("--rounds are those of --against; drop it, or take --steps")
    asked.steps, asked.rounds = asked.steps or 20, asked.rounds or 15
    if asked.results and asked.save is False:
        parser.error("--no-save writes no report for --results; drop one of the two")
    for folder in filter(None, (asked.results, asked.profile)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"the folder {folder} cannot be made: {error.strerror}; name another")
    asked.rows = rows_of(asked.wrapper, asked.ladder is not None)
    if asked.ladder:
        rows = {row.name: row for row in asked.rows}
        check_names(parser, asked.ladder, rows)
        asked.rows = [rows[name] for name in dict.fromkeys(asked.ladder)]
    return asked


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # also where it is a pipe, whose reader may outlive a killed run
        sys.stdout.reconfigure(line_buffering=True)
    asked = parse(arguments)
    from core.base import device
    from core.rendezvous import default_group

    default_group.init_process_group()
    here = device.current_device()
    name = asked.preset or ("1b" if here.type == "cuda" else "small")
    preset = replace(PRESETS[name], micro_batches=asked.micro_batches)
    if asked.samples:
        preset = replace(preset, samples=asked.samples)
    command = sys.argv[1:] if arguments is None else arguments
    report = Report(command, device_name(here), {"name": name, **asdict(preset)})
    report.datasheet_tflops = datasheet_tflops(report.device)
    print(f"{_clock.stamp()} {report.machine}, {report.device}")
    if report.datasheet_tflops is None:
        print(f"no MFU: the peak of {report.device!r} is not in DATASHEET_TFLOPS")
    else:
        print(f"MFU is in percent of {report.datasheet_tflops:g} TFLOP/s, of the datasheet")
    print(f"{name}: {matrix_parameters(preset) / 1e6:.1f} M parameters in matrices, {preset.batch} a step")
    measure_rates(report, "before", here)
    path = _path_of(asked, here, name)
    report.save(path)
    # Rather than run the rest without the compiler.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        status = (_compare if asked.against else _measure_rows)(asked, preset, report, path)
    measure_rates(report, "after", here)
    report.finished = True
    report.save(path)
    if path is not None:
        print(f"written to {path}")
    return status


def _path_of(asked: argparse.Namespace, device: torch.device, preset: str) -> Path | None:
    """Returns the file for the report of a run, which it creates; None if none is to be written."""
    by_default = device.type == "cuda" or asked.results is not None
    if not (by_default if asked.save is None else asked.save):
        return None
    what = f"{asked.wrapper}-against-{asked.against}" if asked.against else asked.wrapper
    return new_path(asked.results or RESULTS, device.type, preset, what + "-ladder" * (asked.ladder is not None))


def _compare(asked: argparse.Namespace, preset: Preset, report: Report, path: Path | None) -> int:
    """Adds the ratio of two wrappers to the report; returns 1 if it is above its limit or does not fit."""
    from core.base import device

    (candidate,), (baseline,) = asked.rows, rows_of(asked.against, False)
    try:
        report.ratios.append(compare(candidate, baseline, preset, asked.rounds, device.current_device().type))
    except torch.cuda.OutOfMemoryError:
        print("out of memory, which two models share; choose a smaller --preset, or fewer --samples")
        return 1
    report.save(path)
    print(f"{_clock.stamp()} compared")
    return 1 if report.ratios[0]["holds"] is False else 0


def _measure_rows(asked: argparse.Namespace, preset: Preset, report: Report, path: Path | None) -> int:
    """Adds every row to the report; returns 1 if one fails, or does not fit into the memory and should."""
    from core.base.errors import ConfigError

    status = 0
    for row in asked.rows:
        torch._dynamo.reset()  # what was compiled for other rows counts towards dynamo's limit of recompilations
        try:
            training, result = measure(row, preset, asked.steps, report)
        except torch.cuda.OutOfMemoryError:
            reason, is_failure = "out of memory", not row.may_run_out_of_memory
        except ConfigError as error:  # the device cannot have it, and the message says which and why
            reason, is_failure = str(error), False
        except Exception as error:  # the machine is lent for minutes: other rows are worth having
            traceback.print_exc()
            reason, is_failure = _line_of(error), True
        else:
            report.rows.append(result)
            record(f"{report.preset['name']}, {row} / matrix products", result.percent_of_matmul / 100)
            report.save(path)
            print(f"{_clock.stamp()} {row}: {result}")
            is_alone = len(asked.rows) == 1
            folder = asked.profile and (asked.profile if is_alone else asked.profile / row.name.replace(" ", "-"))
            status = max(status, _add_details(row, training, report, path, folder))
            del training  # before the next row, which has memory for one
            continue
        report.not_measured[row.name] = reason
        report.save(path)
        print(f"{_clock.stamp()} {row}: {reason}")
        status = max(status, int(is_failure))
    return status


def _add_details(row: Row, training: Training, report: Report, path: Path | None, folder: Path | None) -> int:
    """Adds to the last result what is looked at once its time is known; returns 1 where something fails."""
    status = 0
    for name, look in details(training, report, folder):
        try:
            detail = look()
        except Exception as error:  # the row's time is worth having without it
            traceback.print_exc()
            report.not_measured[f"{name} of {row.name}"] = _line_of(error)
            if not (row.may_run_out_of_memory and isinstance(error, torch.cuda.OutOfMemoryError)):
                status = 1
        else:
            report.rows[-1] = replace(report.rows[-1], **{name: detail})
            report.save(path)
            print(f"    {detail if name == 'update' else profile_line(detail)}")  # what is printed is in the file
            continue
        report.save(path)
    return status


def _line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
