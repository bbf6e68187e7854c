"""Compares optimizer state in 8 and 16 bits with state in fp32: the time of an update, and bytes a parameter.

    python benchmarks/low_precision.py [FORMAT ...] [--only time|bytes] [--rounds 15] [--millions 4]

* ``time``: a step of AdamW without clipping on square matrices, one process of one thread. All formats take turns in
  it; parameters in fp32 are compared with moments in fp32, parameters in bf16 with moments and masters in fp32.
* ``bytes``: all that is kept of the parameters but gradients, compared with the formula. Limit: 1 % apart.

Without names all formats are measured. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _history import record
from _measure import interleaved_seconds, live_tensor_bytes, machine, run_on_ranks, section
from _report import arguments, check_names, exit_status, judge, print_spread

WIDTH = 1024
BYTES_LIMIT = 0.01
OF_MOMENT = {"fp32": 4, "bf16": 2, "dynamic8": 1 + 4 / 256, "linear8": 1 + 4 / 256}
OF_MASTER = {"fp32": 4, "bf16_with_rest": 2, "bf16": 0}
"""Bytes of an element. In 8 bits 256 of them have a scale in fp32; parameters in fp32 have no masters."""


@dataclass(frozen=True)
class Format:
    """What parameters, first and second moments, and masters are kept in."""

    parameters: str
    exp_avg_dtype: str
    exp_avg_sq_dtype: str
    main_params_dtype: str = "fp32"

    @property
    def num_bytes(self) -> float:
        """The formula: bytes of a parameter."""
        own = 4 if self.parameters == "fp32" else 2 + OF_MASTER[self.main_params_dtype]
        return own + OF_MOMENT[self.exp_avg_dtype] + OF_MOMENT[self.exp_avg_sq_dtype]


BASELINES = {"fp32": "fp32", "bf16": "bf16: fp32"}
"""What formats are compared with, by the dtype of their parameters."""
FORMATS = {
    "fp32": Format("fp32", "fp32", "fp32"),
    "bf16 moments": Format("fp32", "bf16", "bf16"),
    "dynamic8, bf16": Format("fp32", "dynamic8", "bf16"),
    "dynamic8": Format("fp32", "dynamic8", "dynamic8"),
    "linear8": Format("fp32", "linear8", "linear8"),
    "bf16: fp32": Format("bf16", "fp32", "fp32"),
    "bf16: fp32, with rest": Format("bf16", "fp32", "fp32", "bf16_with_rest"),
    "bf16: dynamic8, with rest": Format("bf16", "dynamic8", "dynamic8", "bf16_with_rest"),
    "bf16: dynamic8, bf16": Format("bf16", "dynamic8", "dynamic8", "bf16"),
}


def build(name: str, millions: int) -> Any:
    """Returns an optimizer over matrices of random numbers that have gradients."""
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    kept = FORMATS[name]
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)])
    model = model.to(torch.bfloat16 if kept.parameters == "bf16" else torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    formats: Any = {field: value for field, value in vars(kept).items() if field != "parameters"}
    return get_megatron_optimizer(
        OptimizerConfig(lr=1e-4, clip_grad=0.0, bf16=kept.parameters == "bf16", **formats), [model]
    )


def measure_time(names: Sequence[str], millions: int, rounds: int) -> dict[str, list[float]]:
    steps: dict[str, Callable[[], None]] = {name: build(name, millions).step for name in names}
    return interleaved_seconds(steps, rounds)


def measure_bytes(name: str, millions: int) -> float:
    """Returns the bytes of a parameter: itself, its master, its state, and what other code's writes are found by."""
    optimizer = build(name, millions)
    optimizer.step()
    params = {p.param for p in optimizer.main_params}
    states = [tensor for p in optimizer.main_params for tensor in optimizer.state[p.main].values()]
    tensors = [*params, *optimizer.held(params), *(tensor for tensor in states if isinstance(tensor, torch.Tensor))]
    return live_tensor_bytes(tensors) / sum(parameter.numel() for parameter in params)


def report_time(names: Sequence[str], millions: int, rounds: int) -> None:
    baselines = {BASELINES[FORMATS[name].parameters] for name in names}
    of_all = [name for name in FORMATS if name in names or name in baselines]
    seconds = run_on_ranks(measure_time, 1, of_all, millions, rounds)[0]
    for name in of_all:
        print_spread(name, [1e3 * second for second in seconds[name]], "ms")
        if name not in baselines:
            baseline = BASELINES[FORMATS[name].parameters]
            judge(f"{name} / {baseline}", seconds[name], seconds[baseline])


def report_bytes(names: Sequence[str], millions: int) -> bool:
    within = True
    for name in names:
        found, expected = run_on_ranks(measure_bytes, 1, name, millions)[0], FORMATS[name].num_bytes
        within &= (holds := abs(found / expected - 1) <= BYTES_LIMIT)
        record(f"{name} / formula", found / expected)
        print(f"  {name:30} {found:6.3f}   formula {expected:6.3f}{'' if holds else '  EXCEEDED'}", flush=True)
    return within


def main() -> int:
    parser = arguments(__doc__, ("time", "bytes"), FORMATS, of="format")
    parser.add_argument("--millions", type=int, default=4, help="matrices of 2^20 elements that are updated")
    chosen = parser.parse_args()
    names = chosen.formats or list(FORMATS)
    check_names(parser, names, FORMATS)
    print(machine())
    within = True
    if chosen.only in (None, "time"):
        with section(f"Time of an update of {chosen.millions} x 2^20 parameters"):
            report_time(names, chosen.millions, chosen.rounds)
    if chosen.only in (None, "bytes"):
        with section("Bytes of a parameter"):
            within &= report_bytes(names, chosen.millions)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
