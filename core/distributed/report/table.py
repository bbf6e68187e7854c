"""Collects facts about a wrapped model, unit by unit, from this rank's plan, and formats them as rows of a table.

Communicates nothing. A terminal's table and the page have the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import nn

from ...base.dtypes import SHORT_NAMES, dtype_name
from ...base.text import aligned, bytes_cell, fold_numbered, numbered_name
from ..plan import Plan, UnitPlan
from ..plan.parts import Kind, Traffic

RANGE = " … "
"""Joins the names of the first and the last parameter of a bucket."""


@dataclass(frozen=True)
class Memory:
    """Bytes and dtypes of one kind of memory."""

    nbytes: int
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class UnitFacts:
    """Parameters of one collective. Sizes are this rank's, after the tensor-parallel split, with padding."""

    name: str
    """Names of the unit's modules below the model, joined by " + ". Empty for the root unit."""
    kind: str
    """Classes of the unit's modules, or what a bucket contains."""
    num_parameters: int
    num_trainable: int
    kept: Memory
    """Parameters that this rank always keeps."""
    gathered: Memory | None
    """Parameters while they are gathered. None if they are always whole."""
    gradient: Memory
    """This rank's part of the reduced gradient."""
    after_forward: str
    """What happens to gathered parameters between forward and backward."""
    traffic: tuple[Traffic, ...]
    is_offloaded: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(entry.sent_bytes for entry in self.traffic)

    def like(self, other: UnitFacts) -> bool:
        """Returns whether two units are equal except for their names."""
        return replace(self, name=other.name) == other


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a wrapped model."""

    plan: Plan
    num_microbatches: int
    units: tuple[UnitFacts, ...]
    """Units in the order of their first parameters in the model, which is roughly the order of execution."""
    ties: tuple[tuple[str, ...], ...] = ()
    """All names of each weight that has several."""
    replicated: tuple[str, ...] = ()
    """Names of single parameters that are whole on every rank."""
    num_buffers: int = 0
    buffer_bytes: int = 0


def model_facts(plan: Plan, model: nn.Module, num_microbatches: int) -> ModelFacts:
    """Collects the facts about a plan and its model.

    Args:
        model: only its buffers are read.
        num_microbatches: micro-batches of a step.
    """
    units = sorted((unit for unit in plan.units if unit.params), key=lambda unit: min(p.place for p in unit.pieces))
    buffers, root = list(model.buffers()), plan.root
    frozen = [] if root.is_gathered else [p for piece in root.pieces if not piece.is_trained for p in piece.params]
    return ModelFacts(
        plan=plan,
        num_microbatches=num_microbatches,
        units=tuple(_unit_facts(plan, unit, num_microbatches) for unit in units),
        ties=tuple(param.names for unit in units for param in unit.params if len(param.names) > 1),
        replicated=tuple(param.name for param in sorted(frozen, key=lambda param: param.places)),
        num_buffers=len(buffers),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
    )


def _unit_facts(plan: Plan, unit: UnitPlan, num_microbatches: int) -> UnitFacts:
    pieces = unit.pieces
    name, kind = " + ".join(unit.names), " + ".join(dict.fromkeys(map(_class_name, unit.modules)))
    after_forward = "stays" if unit.stays_whole else f"1/{unit.kept_among}" if unit.kept_among else "freed"
    if not unit.is_gathered:  # a bucket, or what is frozen
        first, last = (pick(unit.params, key=lambda param: param.places[0]).name for pick in (min, max))
        name = "frozen" if unit.modules else first if first == last else f"{first}{RANGE}{last}"
        kind, after_forward = f"{len(unit.params)} parameter{'s' if len(unit.params) != 1 else ''}", "-"
    gathered = Memory(unit.gathered_bytes, _distinct(p.gathered_dtype for p in pieces))
    return UnitFacts(
        name=name,
        kind=kind,
        num_parameters=sum(piece.numel for piece in pieces),
        num_trainable=sum(piece.numel for piece in pieces if piece.is_trained),
        kept=Memory(unit.kept_bytes, _distinct(p.param_dtype for p in pieces)),
        gathered=gathered if unit.is_gathered else None,
        gradient=Memory(unit.gradient_bytes, _distinct(dtype for p in pieces for dtype in p.gradient_dtypes)),
        after_forward=after_forward,
        traffic=plan.traffic(num_microbatches, unit),
        is_offloaded=plan.settings.cpu_offload,
    )


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))


def _class_name(module: nn.Module) -> str:
    # fully_shard replaces a module's class by a subclass named FSDP...
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))


# ---- rows

COLUMNS = ("unit", "holds", "params", "kept", "gathered", "then", "gradient", "gathers", "reduces", "sent")
"""Columns of both tables, which the page explains. The first two are text, the others numbers."""

TEXT_COLUMNS = COLUMNS[:2]

_LARGE_SHARE = 0.5
"""Share of the parameters above which a unit is worth splitting: its gathered memory is most of the model."""

WIDTH = 119
"""Most characters of a line."""

_NARROWEST_COLUMNS = {"holds": 7, "unit": 12}
"""Least widths of the text columns, in the order in which they are narrowed."""


@dataclass(frozen=True)
class Line:
    """A line of the table: a unit, a run of equal units such as the layers of a stack, or the totals."""

    unit: UnitFacts
    """The first of the run."""
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The lines of a table, without the columns that say nothing of this model."""

    columns: tuple[str, ...]
    """Columns from `COLUMNS` that the table keeps."""
    lines: tuple[Line, ...]
    """The last one has the totals."""


def table(facts: ModelFacts) -> Table:
    """Returns the units, equal ones with consecutive numbers in one line, and their totals."""
    units = facts.units
    total = UnitFacts(
        name=f"all {len(units)}",
        kind="",
        num_parameters=sum(unit.num_parameters for unit in units),
        num_trainable=sum(unit.num_parameters for unit in units),
        kept=Memory(sum(unit.kept.nbytes for unit in units)),
        gathered=Memory(sum(unit.gathered.nbytes for unit in units if unit.gathered is not None)),
        gradient=Memory(sum(unit.gradient.nbytes for unit in units)),
        after_forward="",
        traffic=tuple(entry for unit in units for entry in unit.traffic),
    )
    runs = fold_numbered(units, attrgetter("name"), UnitFacts.like)
    lines = [(run[0], cells(run[0], _run_name(run))) for run in runs] + [(total, cells(total, total.name))]
    used = [
        index
        for index, column in enumerate(COLUMNS)
        if column in TEXT_COLUMNS or any(line[index] not in ("", "-") for _, line in lines)
    ]
    return Table(
        columns=tuple(COLUMNS[index] for index in used),
        lines=tuple(Line(unit, tuple(line[index] for index in used)) for unit, line in lines),
    )


def _run_name(units: Sequence[UnitFacts]) -> str:
    """Returns the unit's name, or ``decoder.layers.0-31 (32 x)``."""
    first, last = units[0].name, units[-1].name
    return f"{numbered_name(first, last)} ({len(units)} x)" if len(units) > 1 else first or "(the rest)"


def cells(unit: UnitFacts, name: str) -> tuple[str, ...]:
    """Returns a row of the table, in the order of `COLUMNS`. Numbers are of one unit of a run."""
    return (
        name,
        unit.kind,
        count(unit.num_parameters) + ("" if unit.num_trainable else " frozen"),
        amount(unit.kept) + (" host" if unit.is_offloaded else ""),
        amount(unit.gathered),
        unit.after_forward,
        bytes_cell(unit.gradient.nbytes) if unit.gradient.dtypes == unit.kept.dtypes else amount(unit.gradient),
        _calls(unit.traffic, "all-gather"),
        _calls(unit.traffic, "reduce-scatter", "all-reduce"),
        bytes_cell(unit.sent_bytes),
    )


def as_text(facts: ModelFacts) -> str:
    """Returns the headline, the table, and notes below it."""
    grid = table(facts)
    lines = [grid.columns, *(line.cells for line in grid.lines)]
    widths = _fit({column: max(len(line[i]) for line in lines) for i, column in enumerate(grid.columns)})
    rows = aligned([[*map(shorten, line[:2], widths.values()), *line[2:]] for line in lines], len(TEXT_COLUMNS))
    rule = "-" * max(map(len, rows))
    texts = [*notes(facts), recommendation(facts)]
    below = [note if len(note) <= WIDTH else f"{note[: WIDTH - 1]}…" for note in filter(None, texts)]
    return "\n".join([headline(facts), "", rows[0], rule, *rows[1:-1], rule, rows[-1], "", *below])


def _fit(widths: dict[str, int]) -> dict[str, int]:
    """Narrows the column of contents, then the column of names, until a line fits."""
    fitted = dict(widths)
    excess = sum(fitted.values()) + 2 * (len(fitted) - 1) - WIDTH
    for column, narrowest in _NARROWEST_COLUMNS.items():
        if excess > 0:
            cut = min(excess, max(fitted[column] - narrowest, 0))
            fitted[column] -= cut
            excess -= cut
    return fitted


def headline(facts: ModelFacts) -> str:
    """Says which wrapper has how many parameters on how many ranks."""
    parameters, plan = count(sum(unit.num_parameters for unit in facts.units)), facts.plan
    num_ranks = plan.groups.whole.size()
    whole = f"{plan.caller}: {parameters} parameters on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if num_ranks == 1:
        return whole
    experts = plan.groups.experts
    of_experts = "" if experts is None else f"; each expert on {experts.whole.size()} of them"
    if plan.num_shards == 1:
        return f"{whole}, replicated{of_experts}"
    num_replicas = plan.groups.num_replicas
    replicas = f", {num_replicas} replicas of each shard" if num_replicas > 1 else ""
    what = "everything"
    if any(unit.gathered is None for unit in facts.units):
        releases = any(piece.releases_grads for unit in plan.units for piece in unit.pieces)
        what = "gradients and optimizer state" if releases else "optimizer state"
    return f"{whole}, {what} sharded over {plan.num_shards}{replicas}{of_experts}"


def notes(facts: ModelFacts) -> list[str]:
    """Returns facts that have no column in the table."""
    traffic = [entry for unit in facts.units for entry in unit.traffic]
    batches = facts.num_microbatches
    kinds = [
        f"{calls} {kind}{'s' if calls > 1 else ''}"
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
        if (calls := sum(entry.calls for entry in traffic if entry.kind == kind))
    ]
    sent = bytes_cell(sum(unit.sent_bytes for unit in facts.units))
    of = f"a step of {batches} micro-batch{'es' if batches > 1 else ''}"
    lines = [f"{of}: {', '.join(kinds)}; each rank sends {sent}" if kinds else f"{of}: nothing is sent"]
    plan = facts.plan
    sharing = {"tensor-parallel": plan.tensor_parallel_size, "context-parallel": plan.context_parallel_size}
    among = " and ".join(f"{number} {kind}" for kind, number in sharing.items() if number > 1)
    if among:
        part = "one tensor-parallel part of the model; " if plan.tensor_parallel_size > 1 else ""
        lines.append(f"{part}what layers send among {among} ranks is not counted")
    if facts.ties:
        lines.append("tied: " + "; ".join(map(" = ".join, facts.ties)))
    if facts.num_buffers:
        plural = "s" if facts.num_buffers > 1 else ""
        lines.append(f"replicated: {facts.num_buffers} buffer{plural}, {bytes_cell(facts.buffer_bytes)}")
    if facts.replicated:
        lines.append(f"replicated and not trained: {', '.join(facts.replicated)}")
    lines.append(f"settings: {plan.changed_settings or 'all at their defaults'}")
    lines.append(f"read of the model's config: {plan.model_settings or 'nothing, it has no field that is read'}")
    return lines


def recommendation(facts: ModelFacts) -> str:
    """Says what would shard more, or which unit to split, or that units are balanced. Empty where nothing shards."""
    num_ranks = facts.plan.groups.shard.size() if facts.plan.num_shards > 1 else facts.plan.groups.whole.size()
    units = [unit for unit in facts.units if unit.num_trainable]
    gathered = [unit for unit in units if unit.gathered is not None]
    if num_ranks == 1 or not units:
        return ""
    if not gathered:
        saved = bytes_cell(sum(unit.kept.nbytes for unit in units) * (num_ranks - 1) // num_ranks)
        return f"To hold {saved} less of the parameters on each rank, take ZeRO-3 or FSDP2, which gather them by unit."
    total, largest = sum(unit.num_parameters for unit in gathered), max(gathered, key=attrgetter("num_parameters"))
    name, share = shorten(largest.name or "(the rest)", 30), largest.num_parameters / total
    if share > _LARGE_SHARE:
        return f"Split {name} ({share:.0%} of the parameters): name the classes of its layers in sub_modules_to_wrap."
    return f"Keep these units: the largest, {name}, has {share:.0%} of the parameters."


def count(number: int) -> str:
    """Formats a number of parameters as ``58.7 M``."""
    if number < 10_000:
        return str(number)
    limit, letter = next(entry for entry in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if number >= entry[0])
    return f"{number / limit:.1f} {letter}"


def amount(memory: Memory | None) -> str:
    """Formats bytes and their dtypes."""
    if memory is None or not memory.nbytes:
        return "-"
    return f"{bytes_cell(memory.nbytes)} {dtype_names(memory.dtypes)}".rstrip()


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Formats dtypes as ``bf16`` or ``bf16+fp32``."""
    return "+".join(SHORT_NAMES.get(dtype, dtype_name(dtype)) for dtype in dtypes)


def shorten(text: str, width: int) -> str:
    """Shortens a name to its end, and the name of a range to both ends."""
    if len(text) <= width:
        return text
    first, separator, last = text.partition(RANGE)
    if separator:  # shorten each name to its end
        room = (width - len(separator)) // 2
        return separator.join(
            f"…{name[len(name) - room + 1 :]}" if len(name) > room else name for name in (first, last)
        )
    front = (width - 1) // 3
    return f"{text[:front]}…{text[len(text) - (width - 1 - front) :]}"


def _calls(traffic: Iterable[Traffic], *kinds: Kind) -> str:
    return str(sum(entry.calls for entry in traffic if entry.kind in kinds) or "-")
