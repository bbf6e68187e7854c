"""Measures what `compile_units` saves: time of a step with compiled layers and with eager ones, on the CPU.

    python benchmarks/compiled_units.py [WRAPPER ...] [--rounds 15]

Both take turns in the same processes, on two gloo ranks of one thread each: a training step of a GPT of Llama's shape
of 50 M parameters in fp32, one sequence of 512 tokens a rank, clipped, with AdamW. Compilation is not timed. Exits
with 1 when the limit is exceeded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _llama import Preset, matrix_parameters
from _llama_training import Training
from _measure import interleaved_seconds, machine, run_on_ranks, section
from _report import arguments, check_names, exit_status, judge, print_spread

RANKS = 2
LIMIT = 0.95
PRESET = Preset(layers=12, hidden=512, heads=8, groups=4, ffn=1408, vocabulary=28_672, sequence=512, samples=1)
EAGER, COMPILED = "eager", "compiled"
WRAPPERS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-1": {"data_parallel_sharding_strategy": "optim", "overlap_param_gather": True},
}


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    fields = {EAGER: WRAPPERS[name], COMPILED: WRAPPERS[name] | {"compile_units": True}}
    steps = {text: Training(PRESET, {"bf16": False}, settings).step for text, settings in fields.items()}
    return interleaved_seconds(steps, rounds)


def main() -> int:
    parser = arguments(__doc__, (), WRAPPERS, of="wrapper")
    asked = parser.parse_args()
    check_names(parser, asked.wrappers, WRAPPERS)
    print(f"{machine()}; {matrix_parameters(PRESET) / 1e6:.1f} M parameters in matrices")
    within = True
    for name in asked.wrappers or ["DDP"]:
        with section(f"{name}, {RANKS} ranks"):
            seconds = run_on_ranks(measure, RANKS, name, asked.rounds)[0]
            for text, values in seconds.items():
                print_spread(text, values, "s")
            within &= judge("time", seconds[COMPILED], seconds[EAGER], LIMIT)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
