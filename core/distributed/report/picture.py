"""Draws a wrapped model: units as boxes in the order of the model, with areas in proportion to bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import torch

from .facts import Held, ModelFacts, Tie, UnitFacts
from .rows import amount, count, dtype_names, fold, shorten, size

_WIDTH, _MARGIN = 1100.0, 10.0
_HEIGHT = 130.0
"""Height of the box with the most bytes per width."""
_NARROWEST, _ALIAS_WIDTH = 3.0, 12.0
_ARC_HEIGHT, _ALIAS_HEIGHT = 50.0, 36.0
_LETTER, _LABEL_STEP, _LONGEST_LABEL = 6.4, 15.0, 34
_SLANT = 32
"""Degrees by which names are rotated that do not fit next to each other; all in one direction, so that none cross."""


@dataclass(frozen=True)
class _Slot:
    """The place of a unit along the line; without a unit, of another name of a tied weight."""

    left: float
    width: float
    place: int
    unit: UnitFacts | None

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


def as_svg(facts: ModelFacts) -> str:
    """Returns the picture; the page's style sets the colours."""
    slots = _lay_out(facts)
    top = _MARGIN + (_ARC_HEIGHT if facts.ties else 0.0)
    line = top + max((_height(unit, unit.gathered) for unit in facts.units), default=0.0)
    bottom = line + max((_height(unit, unit.kept) for unit in facts.units), default=0.0)
    of_unit = {id(slot.unit): slot for slot in slots if slot.unit is not None}
    labels, depth, width = _labels(facts, of_unit, bottom)
    of_alias = {slot.place: slot for slot in slots if slot.unit is None}
    drawn = [part for slot in slots for part in _boxes(slot, line, top)]
    drawn += [part for tie in facts.ties for part in _tie(tie, of_unit[id(facts.units[tie.unit])], of_alias, top)]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {width:.0f} {bottom + depth:.0f}" role="img" aria-label="units of the model">',
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
            *drawn,
            *labels,
            f'<line class="axis" x1="{_MARGIN}" y1="{line:.1f}" x2="{_WIDTH - _MARGIN}" y2="{line:.1f}"/>',
            "</svg>",
        ]
    )


def dtypes_shown(facts: ModelFacts) -> list[tuple[str, tuple[torch.dtype, ...]]]:
    """Returns the style classes of the picture's colours, and the dtypes of each."""
    held = [h for unit in facts.units for h in (unit.kept, unit.gathered) if h is not None and h.nbytes]
    return list(dict.fromkeys((_colour(h), h.dtypes) for h in held))


def _colour(held: Held) -> str:
    name = dtype_names(held.dtypes)
    return name if name in ("fp32", "bf16", "fp16", "fp64") else "mixed"


def _bytes(unit: UnitFacts) -> int:
    return max(unit.kept.nbytes, unit.gathered.nbytes if unit.gathered is not None else 0, 1)


def _height(unit: UnitFacts, held: Held | None) -> float:
    return _HEIGHT * held.nbytes / _bytes(unit) if held is not None else 0.0


def _lay_out(facts: ModelFacts) -> list[_Slot]:
    """Places units along the line in the order of the model; they share the width that aliases leave."""
    found: list[tuple[int, UnitFacts | None]] = [(unit.place, unit) for unit in facts.units]
    found += [(place, None) for tie in facts.ties for place in tie.places[1:]]
    found.sort(key=lambda item: item[0])
    gap = min(3.0, 200.0 / max(len(found), 1))
    room = _WIDTH - 2 * _MARGIN - gap * (len(found) - 1)
    room -= sum(_ALIAS_WIDTH for _, unit in found if unit is None)
    room = max(room - _NARROWEST * len(facts.units), 1.0)
    total = sum(_bytes(unit) for unit in facts.units)
    slots, left = [], _MARGIN
    for place, unit in found:
        width = _ALIAS_WIDTH if unit is None else _NARROWEST + room * _bytes(unit) / total
        slots.append(_Slot(left, width, place, unit))
        left += width + gap
    return slots


def _boxes(slot: _Slot, line: float, top: float) -> Iterator[str]:
    unit = slot.unit
    if unit is None:
        yield _box("alias", slot, top, max(line - top, _ALIAS_HEIGHT))
        return
    said = f"{unit.name or '(the rest)'}: {count(unit.num_parameters)} parameters, keeps {amount(unit.kept)}"
    if unit.gathered is not None:
        said += f", gathers {amount(unit.gathered)}"
    said += f", sends {size(sum(entry.sent_bytes for entry in unit.traffic))} a step"
    yield f"<g><title>{escape(said)}</title>"
    if unit.gathered is not None:
        height = _height(unit, unit.gathered)
        yield _box(f"gathered {_colour(unit.gathered)}", slot, line - height, height)
    height = _height(unit, unit.kept)
    yield _box(_colour(unit.kept), slot, line, height)
    if unit.is_replicated:
        yield _box("", slot, line, height, 'fill="url(#hatch)"')
    yield "</g>"


def _box(style: str, slot: _Slot, top: float, height: float, more: str = "") -> str:
    drawn = more or f'class="{style}"'
    return f'<rect {drawn} x="{slot.left:.1f}" y="{top:.1f}" width="{slot.width:.1f}" height="{height:.1f}"/>'


def _tie(tie: Tie, holder: _Slot, aliases: dict[int, _Slot], top: float) -> Iterator[str]:
    for place in tie.places[1:]:
        start, end = holder.middle, aliases[place].middle
        peak = top - 2 * _ARC_HEIGHT + 10  # a quadratic curve rises half as high as its control point
        way = f"M {start:.1f} {top:.1f} Q {(start + end) / 2:.1f} {peak:.1f} {end:.1f} {top:.1f}"
        yield f'<path class="tie" d="{way}"><title>{escape(" = ".join(tie.names))}</title></path>'


def _labels(facts: ModelFacts, of_unit: dict[int, _Slot], bottom: float) -> tuple[list[str], float, float]:
    """Returns a label below each run of equal units, the height of all labels, and the width of the picture."""
    runs = [(of_unit[id(run.units[0])], of_unit[id(run.units[-1])], run.name) for run in fold(facts.units)]
    if all(len(name) * _LETTER <= last.left + last.width - first.left for first, last, name in runs):
        y = bottom + 16
        middles = [(first.left + last.left + last.width) / 2 for first, last, _ in runs]
        names = [
            f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(name)}</text>'
            for middle, (_, _, name) in zip(middles, runs, strict=True)
        ]
        return names, 30.0, _WIDTH
    drawn, at, depth, width = [], -_LABEL_STEP, 0.0, _WIDTH
    for first, last, name in runs:  # moved to the right if they overlap
        middle = (first.left + last.left + last.width) / 2
        at = max(middle, at + _LABEL_STEP)
        if at > _WIDTH - _MARGIN:
            break
        y, label = bottom + 16, shorten(name, _LONGEST_LABEL)
        depth = max(depth, len(label) * _LETTER * math.sin(math.radians(_SLANT)))
        width = max(width, at + len(label) * _LETTER * math.cos(math.radians(_SLANT)) + _MARGIN)
        drawn.append(f'<path class="leader" d="M {middle:.1f} {bottom + 2:.1f} L {at:.1f} {y - 6:.1f}"/>')
        drawn.append(
            f'<text x="{at:.1f}" y="{y:.1f}" transform="rotate({_SLANT} {at:.1f} {y:.1f})">{escape(label)}</text>'
        )
    return drawn, 30.0 + depth, width
