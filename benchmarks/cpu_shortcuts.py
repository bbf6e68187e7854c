"""Measures what each shortcut of core buys under gloo: time and peak memory of a step with it, compared with without.

    python benchmarks/cpu_shortcuts.py [ROW ...] [--only time|memory] [--tokens 128 512] [--rounds 15] [--launches 5]

A row is a shortcut under a wrapper, and a name chooses all rows in whose name it is. Both candidates have the same
weights, data and settings and take turns in the same processes; peaks are those of processes of their own. Each is
checked once to use the shortcut, or not to. A step is 4 micro-batches, or as many as the environment's MICRO_BATCHES
says, of 1 x 128 or 2 x 256 tokens on two gloo ranks with one thread each, and ends with its last collective.
`_shortcuts.py` has the switches. Exits with 1, and names the rows, where no measurement shows that a shortcut saves
more than 3 %. All rows take hours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import MICRO_BATCHES, backward, build_model, micro_batches
from _history import record
from _measure import (
    PairedRatio,
    interleaved_peaks,
    interleaved_seconds,
    machine,
    peak_of_two_steps,
    run_on_ranks,
    section,
)
from _report import arguments, print_spread
from _shortcuts import SHORTCUTS, WRAPPERS

RANKS = 2
LEAST_SAVED = 0.03
"""Of the time or of the memory of a step without the shortcut."""
LEAST_ROUNDS = 5
"""Fewer decide nothing."""

SHAPES = {128: (1, 128), 512: (2, 256)}
"""Samples of a micro-batch and tokens of a sample, by the tokens of a micro-batch."""
ROWS = {f"{name}, {wrapper}": (name, wrapper) for name, one in SHORTCUTS.items() for wrapper in one.wrappers}
WITH, WITHOUT = "with it", "without"


def build(row: str, tokens: int, candidate: str) -> Callable[[], None]:
    """Returns a step of one candidate, after a first one that shows whether the shortcut is used."""
    name, wrapper = ROWS[row]
    shortcut, is_on = SHORTCUTS[name], candidate == WITH
    switched = nullcontext if is_on else shortcut.off
    built: list[Callable[[], None]] = []

    def first() -> None:
        built.append(_training(wrapper, *SHAPES[tokens], {} if is_on else shortcut.fields_off))
        built[0]()

    def step() -> None:
        with switched():
            built[0]()

    with switched():
        uses = shortcut.uses(first)
    assert (uses > 0) == is_on, f"{row}, {candidate}: the shortcut was used {uses} times"
    return step


def _training(wrapper: str, samples: int, sequence: int, fields: dict[str, object]) -> Callable[[], None]:
    import core.distributed
    from core import parallel_state
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    kind, settings = WRAPPERS[wrapper]
    module = build_model(sequence, **fields)
    model = core.distributed.wrap_model(module, module.config, getattr(core.distributed, kind)(**settings))
    config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model], no_weight_decay_cond=lambda *unused: False)
    data = micro_batches(samples, sequence)

    def step() -> None:
        model.zero_grad_buffer()
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        core.distributed.finalize_model_grads([model])
        optimizer.step()
        model.engine.parameters.settle()  # a gather that went on would meet the other candidate's switch

    return step


def measure_time(row: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({one: build(row, tokens, one) for one in (WITHOUT, WITH)}, rounds, warmup=1)


def measure_peak(row: str, tokens: int, candidate: str) -> int:
    return peak_of_two_steps(lambda: build(row, tokens, candidate))


def saves(what: str, values: dict[str, list[float]] | dict[str, list[int]], unit: str) -> bool:
    """Prints both candidates and their ratio, and returns whether its whole interval shows enough saved."""
    for name, found in values.items():
        print_spread(f"{what}, {name}", found, unit)
    ratio = PairedRatio.of(values[WITH], values[WITHOUT])
    record(what, ratio)
    low, high = ratio.interval()
    if len(ratio.ratios) < LEAST_ROUNDS:
        verdict = f"{LEAST_ROUNDS} rounds would decide"
    elif high < 1 - LEAST_SAVED:
        verdict = f"saves more than {LEAST_SAVED:.0%}"
    else:
        verdict = f"saves less than {LEAST_SAVED:.0%}" if low > 1 - LEAST_SAVED else "undecided"
    print(f"  {what}, {WITH} / {WITHOUT}: {ratio}: {verdict}", flush=True)
    return len(ratio.ratios) >= LEAST_ROUNDS and high < 1 - LEAST_SAVED


def measure(row: str, tokens: int, only: str | None, rounds: int, launches: int) -> bool:
    """Measures a row at one size; returns whether the shortcut saves enough of what was measured."""
    saved = False
    if only in (None, "time"):
        saved |= saves("time", run_on_ranks(measure_time, RANKS, row, tokens, rounds)[0], "s")
    if only in (None, "memory"):
        saved |= saves("peak", interleaved_peaks(measure_peak, RANKS, (WITHOUT, WITH), launches, row, tokens), "MiB")
    return saved


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, ("time", "memory"), ROWS, launches=5)
    parser.add_argument("--tokens", type=int, nargs="+", choices=SHAPES, default=list(SHAPES), help="a micro-batch's")
    asked = parser.parse_args(given)
    if unknown := [part for part in asked.rows if not any(part in row for row in ROWS)]:
        parser.error(f"no row has {', '.join(unknown)} in its name; there are {'; '.join(ROWS)}")
    print(machine())
    useless = []
    for row in ROWS:
        if asked.rows and not any(part in row for part in asked.rows):
            continue
        saved = False
        for tokens in asked.tokens:
            samples, sequence = SHAPES[tokens]
            with section(f"{row}: {RANKS} ranks, {MICRO_BATCHES} micro-batches of {samples} x {sequence}"):
                saved |= measure(row, tokens, asked.only, asked.rounds, asked.launches)
        if not saved:
            useless.append(row)
    what = asked.only or "time or memory"
    print(f"\nnot shown to save {LEAST_SAVED:.0%} of {what}: {'; '.join(useless) or 'none'}")
    return 1 if useless else 0


if __name__ == "__main__":
    sys.exit(main())
