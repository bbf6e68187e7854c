"""Trains the GPT of `make train` with experts and without for the same time, and compares the validation losses.

A token has as many active parameters in both. Time is that of one core, so that other work on the machine counts
little: both models get as many iterations as fit into --minutes, by the seconds of an iteration measured before.

.venv/bin/python benchmarks/moe_against_dense.py --minutes 10
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from _history import Parser, record
from _measure import machine, section

from core.run_log import read_log

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "gpt" / "pretrain_gpt.py"
MODELS = {
    "dense": (),
    "experts": (
        *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "256"),
        *("--moe-aux-loss-coeff", "0.01", "--moe-grouped-gemm"),
    ),
}


def train(model: str, iterations: int, folder: Path, *flags: str) -> float:
    """Trains in a process of its own, and returns its CPU seconds."""
    settings = ("--train-iters", str(iterations), "--save", str(folder), "--log-interval", "1000000", *flags)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SHARDSTACK_DEVICE": "cpu"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, PROGRAM, *MODELS[model], *settings],
        check=True,
        cwd=folder.parent,  # where the corpus is
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of_iteration(model: str, calibration: int, scratch: Path) -> float:
    """Returns the difference of a longer and a shorter run, for each iteration between them."""
    short, long = (
        train(model, number, scratch / f"{model}-{number}", "--eval-iters", "0")
        for number in (calibration, 4 * calibration)
    )
    return (long - short) / (3 * calibration)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each model, on one core")
    parser.add_argument("--calibration", type=int, default=20, help="iterations of the shorter of two calibrations")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    print(machine())
    losses = {}
    with tempfile.TemporaryDirectory() as scratch:
        train("dense", 1, Path(scratch, "corpus"), "--eval-iters", "0")  # makes the corpus
        section(f"{options.minutes:g} minutes of training each, seed {options.seed}")
        for model in MODELS:
            seconds = max(seconds_of_iteration(model, options.calibration, Path(scratch)), 1e-3)
            iterations = max(1, round(options.minutes * 60 / seconds))
            ends = ("--eval-interval", str(iterations), "--seed", str(options.seed))
            train(model, iterations, Path(scratch, model), *ends)
            losses[model] = read_log(Path(scratch, model, "log.jsonl"))[-1]["validation_loss"]
            print(f"{model:8}  {seconds:.3f} s an iteration  {iterations:5} iterations  loss {losses[model]:.4f}")
        same = Path(scratch, "same")
        train("dense", iterations, same, *ends)
        loss = read_log(same / "log.jsonl")[-1]["validation_loss"]
        print(f"dense, as many iterations as experts: loss {loss:.4f}")
    record(f"{options.minutes:g} minutes: loss of experts / dense", losses["experts"] / losses["dense"])
    verdict = "beats" if losses["experts"] < losses["dense"] else "does not beat"
    print(f"the model with experts {verdict} the dense model after the same time")


if __name__ == "__main__":
    main()
