"""A fixed sample of compositions in which every pair of values meets that may meet.

Greedy: the next composition is the one that covers most missing pairs for the work of its training, of a number of
candidates that begin with a missing pair and are filled up value by value (as in AETG; Cohen, Dalal, Fredman and
Patton, 1997). Pairs in a composition that is refused cover nothing: there the training has not met them.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path

from tests.compositions.compare import adds_in_one_order
from tests.compositions.composition import AXES, Composition
from tests.compositions.data import STEPS
from tests.compositions.refusals import refusal_of

Pair = tuple[tuple[str, str], tuple[str, str]]

SAMPLE = Path(__file__).with_name("sample.json")

LEFT_OUT = {
    ("compiled", "units"),
    ("layout", "dp4"),  # three ranks, and four in two groups, are in it
    ("layout", "tp4-sp"),
    ("layout", "hybrid-cp2"),
    ("layout", "dp2-tp2"),
    ("layout", "tp2-cp2-sp"),
    ("micro_batches", "5"),
    ("cut", "rows"),
    ("cut", "tensor"),
    ("tables", "objects"),
    ("policy", "a layer in fp32"),
    ("writes", "clamps data"),
}
"""Values that take long and differ little from others, or too long for every run of the tests; `make fuzz` draws
them."""

SAMPLED = {axis: [value for value in values if (axis, value) not in LEFT_OUT] for axis, values in AXES.items()}

CANDIDATES = 60
"""From which each composition of the sample is chosen."""


START = 4
"""Micro-batches that take as long as wrapping a model and gathering its weights at the end."""


def work(composition: Composition) -> float:
    """Returns the cost of a composition and of the same under DDP, in micro-batches of all ranks."""
    parts = list(composition.parts)
    if refusal_of(composition) is None and adds_in_one_order(composition):
        parts += composition.plain_parts
    micro_batches = composition.shape.dp * composition.number
    steps = STEPS if composition.continues == "no" else STEPS / 2
    layers = 1.5 if composition.depth == "four" else 1.0  # not twice: embeddings and the head stay
    return sum(part.shape.ranks * (START + steps * layers * micro_batches / part.shape.dp) for part in parts)


def pairs_of(composition: Composition) -> set[Pair]:
    """Returns a composition's pairs of values, in the order of the axes."""
    values = [(axis, getattr(composition, axis)) for axis in AXES]
    return set(itertools.combinations(values, 2))


def is_sampled(composition: Composition) -> bool:
    """Returns whether every value means something, nothing is refused, and nothing is left out."""
    is_left_out = any(getattr(composition, axis) == value for axis, value in LEFT_OUT)
    return not is_left_out and composition.is_meaningful and refusal_of(composition) is None


@functools.cache
def allowed_pairs() -> dict[Pair, Composition]:
    """Returns every pair of values that can meet in a training, with a composition in which it does."""
    found: dict[Pair, Composition] = {}
    for first, second in itertools.combinations(AXES, 2):
        for pair in itertools.product(((first, v) for v in SAMPLED[first]), ((second, v) for v in SAMPLED[second])):
            if pair not in found:
                composition = _with(pair)
                if composition is not None:
                    found |= {p: composition for p in pairs_of(composition) if p not in found}
    return found


def _with(pair: Pair) -> Composition | None:
    """Returns a simple composition with these two values; None where there is none."""
    fixed = dict(pair)
    if fixed.get("mistake") == "runs two units at once":  # which it takes two units in one slot to do
        fixed = {"wrapper": "zero3", "forward_prefetch": "0", "backward_prefetch": "0"} | fixed
    # What rules ask for, the most often last: a precision, micro-batches that can be dealt out, ranks, a wrapper.
    helpful = ("precision", "micro_batches", "layout", "wrapper")
    free = {axis: SAMPLED[axis] for axis in helpful if axis not in fixed}
    simple = Composition(**fixed)
    for values in itertools.product(*free.values()):
        composition = simple.replaced(**dict(zip(free, values, strict=True)))
        if is_sampled(composition):
            return composition
    return None


def sample() -> tuple[Composition, ...]:
    """Returns the compositions of `SAMPLE`, in which every allowed pair meets at least once."""
    return tuple(Composition(**values) for values in json.loads(SAMPLE.read_text(encoding="utf-8")))


def write_sample(seed: int = 2) -> int:
    """Chooses a new sample, as after a change of `AXES`; returns how many compositions it has."""
    draw = random.Random(seed)
    allowed = allowed_pairs()
    missing = dict.fromkeys(allowed)
    chosen: list[Composition] = []
    while missing:
        candidates = [_filled(draw.choice(list(missing)), allowed, missing, draw) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda c: len(pairs_of(c) & missing.keys()) / work(c))
        chosen.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    chosen.sort(key=lambda c: (c.ranks, c.layout, repr(c)))
    given = [{axis: getattr(c, axis) for axis in AXES if getattr(c, axis) != AXES[axis][0]} for c in chosen]
    SAMPLE.write_text("[\n" + ",\n".join(json.dumps(values) for values in given) + "\n]\n", encoding="utf-8")
    return len(chosen)


def _filled(
    pair: Pair, allowed: dict[Pair, Composition], missing: dict[Pair, None], draw: random.Random
) -> Composition:
    """Adds to a pair the values on other axes that meet most others for the first time."""
    found = allowed[pair]
    fixed = dict(pair)
    axes = [axis for axis in AXES if axis not in fixed]
    draw.shuffle(axes)
    for axis in axes:
        best, most = found, -1
        values = list(AXES[axis])
        draw.shuffle(values)
        for value in values:
            candidate = found.replaced(**{axis: value})
            if not is_sampled(candidate):
                continue
            gain = sum(
                _pair(axis, value, other, getattr(candidate, other)) in missing for other in AXES if other != axis
            )
            if gain > most:
                best, most = candidate, gain
        found = best
    return found


_ORDER = {axis: place for place, axis in enumerate(AXES)}


def _pair(axis: str, value: str, other: str, other_value: str) -> Pair:
    first, second = (axis, value), (other, other_value)
    return (first, second) if _ORDER[axis] < _ORDER[other] else (second, first)
