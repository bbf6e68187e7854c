"""A fixed sample of compositions in which every pair of values meets that may meet.

Greedy: the next composition is the one that covers most missing pairs for the work of its training, of a number of
candidates that begin with a missing pair and are filled up value by value (as in AETG; Cohen, Dalal, Fredman and
Patton, 1997), or that are one of those already chosen under another wrapper, which share what they are compared with.
Pairs in a composition that is refused cover nothing: there the training has not met them.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.compositions.compare import adds_in_one_order
from tests.compositions.composition import AXES, WRAPPER_AXES, Composition
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
    ("pipeline", "GPipe"),
    ("pipeline", "Interleaved1F1B"),
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

CANDIDATES = 100
"""From which each composition of the sample is chosen, of either kind."""


START = 4
"""Micro-batches that take as long as wrapping a model and gathering its weights at the end."""

SLOWER = {"zero3": 1.5, "fsdp2": 2.0}
"""Times that a micro-batch takes under these wrappers, where it takes 1 under the others."""

TORCH_STEPS = 20
"""Micro-batches that take as long as steps of torch's optimizer on DTensors, for each dimension of their mesh."""

TWIN = 1.35
"""Worth of a pair that is compared with DDP's bits too, where one that is compared with one process alone has 1."""

Reference = tuple[str, Composition]


def references(composition: Composition) -> frozenset[Reference]:
    """Returns what a composition is compared with: one process, and where the bits are the same, DDP."""
    twin = {("DDP", composition.plain)} if adds_in_one_order(composition) else set()
    return frozenset({("one process", composition.serial), *twin})


def work(composition: Composition, known: frozenset[Reference] = frozenset()) -> float:
    """Returns the cost of a composition and of its references that are not known, in micro-batches of a rank."""
    total = sum(map(_work, composition.parts))
    for kind, reference in references(composition) - known:
        total += _work(reference) if kind == "one process" else sum(map(_work, reference.plain_parts))
    return total


def _work(part: Composition) -> float:
    steps = STEPS if part.continues == "no" else STEPS / 2
    layers = 1.5 if part.depth == "four" else 1.0  # not twice: embeddings and the head stay
    by_torch = TORCH_STEPS * (1 + part.is_hybrid) if part.is_fsdp2 and part.steps_by_torch else 0
    return part.shape.ranks * (SLOWER.get(part.wrapper, 1.0) * (START + steps * layers * part.number) + by_torch)


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
    if fixed.get("pipeline") in ("Interleaved1F1B", "ZBVZeroBubble"):  # whose virtual stages take a layer each
        fixed = {"depth": "four", "embeddings": "untied"} | fixed
    if fixed.get("evaluates") == "the average inside whole_parameters":
        fixed = {"averaged": "equally"} | fixed
    if fixed.get("dropout") == "by stages":
        fixed = {"pipeline": "1F1B"} | fixed
    if fixed.get("jitter") == "yes":
        fixed = {"experts": "balanced by losses"} | fixed
    # What rules ask for, the most often last: a precision, micro-batches that can be dealt out, ranks, a wrapper.
    helpful = ("precision", "micro_batches", "layout", "wrapper")
    free = {axis: SAMPLED[axis] for axis in helpful if axis not in fixed}
    simple = Composition(**fixed)
    for values in itertools.product(*free.values()):
        composition = simple.replaced(**dict(zip(free, values, strict=True)))
        if is_sampled(composition):
            return composition
    return None


@functools.cache
def short_sample() -> tuple[Composition, ...]:
    """Returns those of the sample that run each time: in them every value meets every engine, fp32 and a low
    precision (`facts`)."""
    return _read("each time")


@functools.cache
def sample() -> tuple[Composition, ...]:
    """Returns the compositions of `SAMPLE`, in which every allowed pair meets at least once."""
    return short_sample() + _read("long")


def _read(part: str) -> tuple[Composition, ...]:
    return tuple(Composition(**values) for values in json.loads(SAMPLE.read_text(encoding="utf-8"))[part])


_ENGINES = {"zero3": "slots", "fsdp2": "FSDP2"}


def facts(composition: Composition) -> set[tuple[str, str, str]]:
    """Returns the values of a composition, each with its engine (buckets, slots or FSDP2), and with fp32 or a low
    precision."""
    kinds = (_ENGINES.get(composition.wrapper, "buckets"), "fp32" if composition.precision == "fp32" else "low")
    return {(kind, axis, getattr(composition, axis)) for kind in kinds for axis in AXES}


def _enough(chosen: Sequence[Composition]) -> list[Composition]:
    """Returns compositions, few and with little work, that have the facts of all."""
    missing = set().union(*map(facts, chosen))
    found: list[Composition] = []
    while missing:
        found.append(max(chosen, key=lambda c: len(facts(c) & missing) / work(c)))
        missing -= facts(found[-1])
    for composition in sorted(found, key=work, reverse=True):
        others = [other for other in found if other is not composition]
        if facts(composition) <= set().union(*map(facts, others)):
            found = others
    return found


def _chosen(missing: dict[Pair, None], candidates: Callable[[], Sequence[Composition]]) -> Iterator[Composition]:
    """Yields the best of some candidates for its work, until no pair is missing; takes its pairs from `missing`."""
    known: frozenset[Reference] = frozenset()
    while missing:
        best = max(candidates(), key=lambda c: _worth(c, missing) / work(c, known))
        known |= references(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
        yield best


def write_sample(seed: int = 2) -> int:
    """Chooses a new sample, as after a change of `AXES`; returns how many compositions it has."""
    draw = random.Random(seed)
    allowed = allowed_pairs()
    missing = dict.fromkeys(allowed)
    chosen: list[Composition] = []

    def candidates() -> list[Composition]:
        found = [_from_pair(draw.choice(list(missing)), allowed, missing, draw) for _ in range(CANDIDATES)]
        return found + [_filled(draw.choice(chosen), WRAPPER_AXES, missing, draw) for _ in range(CANDIDATES) if chosen]

    for best in _chosen(missing, candidates):
        chosen.append(best)
    chosen = _needed(chosen)
    short = _enough(chosen)
    parts = {"each time": [c for c in chosen if c in short], "long": [c for c in chosen if c not in short]}
    text = ",\n".join(f"{json.dumps(part)}: [\n{_lines(of_part)}\n]" for part, of_part in parts.items())
    SAMPLE.write_text(f"{{{text}}}\n", encoding="utf-8")
    return len(chosen)


def _lines(compositions: list[Composition]) -> str:
    """Returns the values that differ from the first of their axis, a line for each composition."""
    compositions.sort(key=lambda c: (c.ranks, c.layout, repr(c)))
    given = [{axis: getattr(c, axis) for axis in AXES if getattr(c, axis) != AXES[axis][0]} for c in compositions]
    return ",\n".join(map(json.dumps, given))


def _needed(chosen: list[Composition]) -> list[Composition]:
    """Drops compositions whose pairs all meet in others, the most work first."""
    met = Counter(pair for composition in chosen for pair in pairs_of(composition))
    for composition in sorted(chosen, key=work, reverse=True):
        pairs = pairs_of(composition)
        if all(met[pair] > 1 for pair in pairs):
            chosen = [other for other in chosen if other is not composition]
            met.subtract(pairs)
    return chosen


def _worth(composition: Composition, missing: dict[Pair, None]) -> float:
    return len(pairs_of(composition) & missing.keys()) * (TWIN if adds_in_one_order(composition) else 1.0)


def _from_pair(
    pair: Pair, allowed: dict[Pair, Composition], missing: dict[Pair, None], draw: random.Random
) -> Composition:
    """Adds to a pair the values on other axes that meet most others for the first time."""
    return _filled(allowed[pair], [axis for axis in AXES if axis not in dict(pair)], missing, draw)


def _filled(found: Composition, axes: Sequence[str], missing: dict[Pair, None], draw: random.Random) -> Composition:
    """Chooses the values on these axes, one by one in any order, that meet most others for the first time."""
    for axis in draw.sample(axes, len(axes)):
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
