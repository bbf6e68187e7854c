"""A composition: one value for each axis of everything that a training combines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a world."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp


LAYOUTS = {
    "dp1": Layout(),
    "dp2": Layout(dp=2),
    "dp3": Layout(dp=3),
    "dp4": Layout(dp=4),
    "hybrid": Layout(dp=4),
    "hybrid-cp2": Layout(dp=2, cp=2),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "tp4-sp": Layout(tp=4, sequence_parallel=True),
    "cp2": Layout(cp=2),
    "dp2-tp2": Layout(dp=2, tp=2),
    "dp2-tp2-sp": Layout(dp=2, tp=2, sequence_parallel=True),
    "dp2-cp2": Layout(dp=2, cp=2),
    "tp2-cp2-sp": Layout(tp=2, cp=2, sequence_parallel=True),
}
"""``hybrid`` layouts shard within two ranks and replicate across two."""

WRAPPER_AXES = (
    *("wrapper", "buckets", "overlap", "reduces", "reshard", "overrides", "forward_prefetch"),
    *("backward_prefetch", "kept", "collectives", "cut", "offload", "replicated", "idle_slots", "compiled"),
    *("whole_gradients", "streams", "mistake"),
)
"""What no number depends on."""


def _one_of(*values: str) -> Any:
    """Returns an axis with these values; the first is the simplest, to which failures shrink."""
    return field(default=values[0], metadata={"values": values})


@dataclass(frozen=True, kw_only=True)
class Composition:
    """One value for each axis; it is shown with what differs from the first values."""

    # ---- layout and wrapper
    layout: str = _one_of(*LAYOUTS)
    pipeline: str = _one_of("none", "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    wrapper: str = _one_of("ddp", "zero1", "zero2", "fsdp2", "zero3")
    buckets: str = _one_of("one", "small", "three")
    overlap: str = _one_of("none", "gradients", "both")
    reduces: str = _one_of("each step", "each micro-batch")
    reshard: str = _one_of("yes", "no", "two ranks")
    overrides: str = _one_of("none", "first kept", "all but first kept", "root freed")
    forward_prefetch: str = _one_of("1", "0", "3")
    backward_prefetch: str = _one_of("1", "0", "3")
    kept: str = _one_of("ends", "none", "all")
    collectives: str = _one_of("auto", "torch")
    cut: str = _one_of("auto", "flat", "rows", "tensor", "blocks")
    offload: str = _one_of("no", "yes")
    replicated: str = _one_of("nothing", "an mlp", "norms")
    idle_slots: str = _one_of("kept", "poisoned")
    compiled: str = _one_of("no", "units")
    whole_gradients: str = _one_of("no", "yes")
    streams: str = _one_of("no", "kept over steps")
    # ---- precision
    precision: str = _one_of("fp32", "bf16", "fp16")
    policy: str = _one_of("default", "reduce in fp32", "by dtypes", "a layer in fp32")
    # ---- model
    depth: str = _one_of("two", "four")
    embeddings: str = _one_of("tied", "untied")
    widths: str = _one_of("even", "odd")
    heads: str = _one_of("all", "grouped", "one group")
    experts: str = _one_of("none", "balanced by losses", "balanced by a bias", "over ranks", "balanced over replicas")
    jitter: str = _one_of("no", "yes")
    base: str = _one_of("floating", "packed")
    recompute: str = _one_of("none", "full", "selective", "units", "products of units")
    activations: str = _one_of("on the device", "on the host")
    trained: str = _one_of("all", "without embedding", "without a layer", "adapters", "one norm", "a layer at times")
    unused: str = _one_of("nothing", "on some ranks", "in some steps", "ever")
    layers: str = _one_of("once", "twice", "share a weight")
    tables: str = _one_of("none", "views", "objects", "attributes", "read by the model")
    buffers: str = _one_of("read", "written in place", "assigned")
    memory: str = _one_of("in rows", "strided")
    dropout: str = _one_of("no", "yes", "by stages")
    start: str = _one_of("drawn", "meta", "ranks differ")
    # ---- batch
    micro_batches: str = _one_of("1", "2", "3", "5")
    lengths: str = _one_of("equal", "ragged")
    loss: str = _one_of("mean", "per token")
    documents: str = _one_of("one", "packed")
    forwards: str = _one_of("one by one", "two before a backward")
    # ---- optimizer
    optimizer: str = _one_of("sgd", "adam", "sgd without momentum", "torch's sgd", "muon")
    rates: str = _one_of("one", "two")
    clip: str = _one_of("no", "yes")
    decay: str = _one_of("none", "matrices", "all")
    schedule: str = _one_of("constant", "warm-up and decay")
    averaged: str = _one_of("no", "exponentially", "equally")
    # ---- loop, and what happens in between
    loop: str = _one_of("written out", "train_step", "train_step on a loader")
    evaluates: str = _one_of(
        *("never", "between micro-batches", "between steps", "before the update", "after the update"),
        *("in inference mode", "the average inside whole_parameters"),
    )
    fails: str = _one_of("never", "forward", "backward", "overflow")
    mistake: str = _one_of(
        *("none", "steps before finalizing", "finalizes twice", "finalizes after a failed backward"),
        *("writes what is gathered", "runs two units at once"),
    )
    writes: str = _one_of("nothing", "clamps", "loads", "averages", "clamps data")
    gradients: str = _one_of("kept", "one set to None", "halved")
    hooks: str = _one_of("none", "halve a gradient")
    zeroes: str = _one_of("wrapper", "optimizer", "module", "never")
    continues: str = _one_of("no", "fsdp2 on dp1", "zero1 on dp2", "ddp on tp2", "zero2 on cp2", "fsdp2 on dp2-tp2")

    def __post_init__(self) -> None:
        _check(vars(self))

    def __repr__(self) -> str:
        given = [
            f"{axis}={getattr(self, axis)!r}" for axis, values in AXES.items() if getattr(self, axis) != values[0]
        ]
        return f"Composition({', '.join(given)})"

    @property
    def shape(self) -> Layout:
        return _shape(self.layout, self.pipeline != "none")

    @property
    def parts(self) -> tuple[Composition, ...]:
        """The composition up to the checkpoint, and what continues from it, with the settings that mean something
        there."""
        first = self.replaced(continues="no")
        if self.continues == "no":
            return (first,)
        wrapper, layout = self.continues.split(" on ")
        second = first.replaced(wrapper=wrapper, layout=layout, pipeline="none")
        return (first, (second if _may_share_experts(second) else second._with_whole_experts()).settled())

    @property
    def plain(self) -> Composition:
        """The composition under DDP, which adds in one order and shards nothing: without what belongs to a wrapper."""
        policy = "reduce in fp32" if self.policy == "by dtypes" else self.policy
        layout = {"hybrid": "dp4", "hybrid-cp2": "dp2-cp2"}.get(self.layout, self.layout)
        first = {axis: AXES[axis][0] for axis in WRAPPER_AXES}
        # One stage adds a tied weight's gradients in another order, and draws other masks.
        keeps_stages = self.embeddings == "tied" or self.dropout == "by stages"
        pipeline = self.pipeline if keeps_stages else "none"
        return self.replaced(**first, layout=layout, pipeline=pipeline, policy=policy).settled()

    @property
    def plain_parts(self) -> tuple[Composition, ...]:
        return tuple(part.plain for part in self.parts)

    @property
    def serial(self) -> Composition:
        """The composition in one process: with as many replicas, none of them cut."""
        alone = self.plain._with_whole_experts()
        found = alone.replaced(layout=f"dp{self.shape.dp}", pipeline="none", continues="no").settled()
        return found.replaced(dropout=self.dropout)  # by stages too, whose masks one process draws again

    def _with_whole_experts(self) -> Composition:
        return self.replaced(experts="balanced by losses") if self.experts == "over ranks" else self

    @property
    def ranks(self) -> int:
        return max(part.shape.ranks for part in self.parts)

    @property
    def is_fsdp2(self) -> bool:
        return self.wrapper == "fsdp2"

    @property
    def runs_units_twice(self) -> bool:
        """Whether a backward reaches a unit of FSDP2 from two forwards, and reduces the gradient of each by itself."""
        return self.is_fsdp2 and (self.layers == "twice" or self.forwards != "one by one")

    @property
    def steps_by_torch(self) -> bool:
        return self.optimizer == "torch's sgd"

    @property
    def virtual_stages(self) -> int | None:
        """Pipeline stages of each rank; None where it has one."""
        return 2 if self.pipeline in ("Interleaved1F1B", "ZBVZeroBubble") else None

    @property
    def is_hybrid(self) -> bool:
        return self.layout.startswith("hybrid")

    @property
    def shards_over(self) -> int:
        """Ranks that share what the wrapper shards."""
        return self.shape.dp * self.shape.cp // (2 if self.is_hybrid else 1)

    @property
    def number(self) -> int:
        return int(self.micro_batches)

    def replaced(self, **values: str) -> Composition:
        _check(values)
        found = object.__new__(Composition)  # without a look at the other axes: a sample is chosen from a million
        vars(found).update(vars(self), **values)
        return found

    def settled(self) -> Composition:
        """Returns the composition with the first value on each axis that means nothing here."""
        found = self
        for axis, values, means_something in RULES:
            if getattr(found, axis) in (values or AXES[axis][1:]) and not means_something(found):
                found = found.replaced(**{axis: AXES[axis][0]})
        return found

    @property
    def is_meaningful(self) -> bool:
        """Whether every value means something next to the others."""
        given = vars(self)
        for axis, values, means_something in RULES:
            if given[axis] in (values or AXES[axis][1:]) and not means_something(self):
                return False
        return True


AXES: Mapping[str, tuple[str, ...]] = {axis.name: axis.metadata["values"] for axis in fields(Composition)}
"""The values of each axis."""


def _check(values: Mapping[str, str]) -> None:
    for axis, value in values.items():
        if value not in AXES[axis]:
            raise ValueError(f"{axis} is {value!r}; it takes one of {AXES[axis]}")


@functools.cache
def _shape(layout: str, has_stages: bool) -> Layout:
    return replace(LAYOUTS[layout], pp=2 if has_stages else 1)


def _has_one_stage(c: Composition) -> bool:
    return c.pipeline == "none"


def _has_buckets(c: Composition) -> bool:
    return not _shards_parameters(c)


def _is_fsdp2(c: Composition) -> bool:
    return c.is_fsdp2


def _shards_parameters(c: Composition) -> bool:
    return c.wrapper in ("fsdp2", "zero3")


def _has_two_units_in_one_slot(c: Composition) -> bool:
    """Whether both layers are gathered into the same memory: equal ones, none of them gathered ahead."""
    are_equal = c.trained == "all" and c.unused == "nothing" and c.layers != "share a weight"
    are_equal &= c.replicated == "nothing" and c.base == "floating" and c.memory == "in rows"
    reshards = c.reshard == "yes" and c.overrides == "none"
    gathers_ahead = c.forward_prefetch != "0" or c.backward_prefetch != "0"
    return c.wrapper == "zero3" and c.shards_over > 1 and are_equal and reshards and not gathers_ahead


def _shows_gradients(c: Composition) -> bool:
    """Whether a loop may read ``param.grad`` before the update."""
    return c.wrapper in ("ddp", "fsdp2") and c.loop == "written out" and c.policy == "default"


def _may_step_by_torch(c: Composition) -> bool:
    """Whether an optimizer of torch trains as ours does: in fp32, on whole gradients, all of a norm on each rank."""
    if c.is_fsdp2 and c.replicated != "nothing":
        return False  # torch's clipping and optimizers take tensors of one mesh
    is_kept = c.continues == "no" and c.fails in ("never", "forward") and c.mistake == "none"
    has_whole_norm = c.shape.tp == c.shape.pp == 1 and c.experts != "over ranks"
    return is_kept and _shows_gradients(c) and c.precision == "fp32" and has_whole_norm


def _may_share_experts(c: Composition) -> bool:
    return c.shape.dp * c.shape.cp % 2 == 0


def _shapes(c: Composition) -> list[Layout]:
    return [c.shape] if c.continues == "no" else [c.shape, LAYOUTS[c.continues.split(" on ")[1]]]


def _divides(c: Composition) -> bool:
    """Whether the micro-batches of a step can be dealt out to the replicas where it continues."""
    return c.shape.dp * c.number % _shapes(c)[-1].dp == 0


def _keeps_replicas(c: Composition) -> bool:
    """Whether there are as many replicas where it continues: the same micro-batches then run at a time."""
    return len({shape.dp for shape in _shapes(c)}) == 1


def _writes_alike(c: Composition) -> bool:
    """Whether statistics of a rank's tokens are those of whole sequences, and of the same micro-batches all along."""
    cuts = any(shape.cp > 1 or shape.sequence_parallel for shape in _shapes(c))
    # A mistake is a forward more; one process has run one micro-batch when a backward of two fails, and has only
    # looked ahead when a forward does.
    runs_alike = c.mistake == "none" and (c.fails != "backward" or c.forwards == "one by one")
    runs_alike &= c.fails != "forward" or c.experts != "balanced over replicas"
    return _keeps_replicas(c) and not cuts and runs_alike


def _adds_up_alike(c: Composition) -> bool:
    """Whether gradients that nothing zeroes add up in one process as they do in a training like this."""
    # What overflowed would stay.
    is_whole_run = c.continues == "no" and c.mistake == "none" and c.gradients == "kept" and c.fails != "overflow"
    # A frozen layer's gradient would stay. Low precision is left out.
    is_trained = c.trained != "a layer at times" and (c.pipeline == "none" or c.trained != "one norm")
    return is_whole_run and c.precision == "fp32" and is_trained


_IN_TRAINING_MODE = ("before the update", "after the update", "in inference mode")
"""Evaluations of which one at least does not set the mode of evaluation."""

Rule = tuple[str, tuple[str, ...], Callable[[Composition], bool]]

RULES: tuple[Rule, ...] = (
    # Two stages of two ranks each are the most that is trained; each virtual stage needs a layer.
    ("pipeline", (), lambda c: c.layout in ("dp1", "dp2", "cp2", "tp2-sp")),
    ("pipeline", ("Interleaved1F1B", "ZBVZeroBubble"), lambda c: c.depth == "four"),
    ("pipeline", ("ZBVZeroBubble",), lambda c: c.embeddings == "untied"),
    ("micro_batches", ("5",), lambda c: c.pipeline != "Interleaved1F1B"),
    # Stages have several micro-batches under way, all of one shape; a layer is on one stage.
    *((axis, (), _has_one_stage) for axis in ("lengths", "layers", "mistake", "forwards", "jitter")),
    ("dropout", ("yes",), _has_one_stage),
    # Stages draw for themselves, in the order of their forwards: of virtual ones that depends on the schedule. What
    # continues has one stage.
    ("dropout", ("by stages",), lambda c: c.pipeline in ("1F1B", "GPipe") and c.continues == "no"),
    # A forward in training mode that no backward follows draws as the loop does.
    ("dropout", ("by stages",), lambda c: c.evaluates not in _IN_TRAINING_MODE),
    ("unused", ("on some ranks",), _has_one_stage),
    ("evaluates", ("between micro-batches",), _has_one_stage),
    # What one stage raises, its neighbours wait for.
    ("fails", ("forward", "backward"), _has_one_stage),
    # These settings belong to one wrapper; another is not given them.
    ("buckets", (), _has_buckets),
    ("overlap", (), _has_buckets),
    ("overlap", ("both",), lambda c: c.wrapper != "ddp"),
    ("reduces", (), lambda c: c.wrapper in ("zero2", "fsdp2", "zero3")),
    *((axis, (), _shards_parameters) for axis in ("reshard", "forward_prefetch", "backward_prefetch", "overrides")),
    ("reshard", ("two ranks",), _is_fsdp2),
    *((axis, (), _is_fsdp2) for axis in ("kept", "collectives", "compiled")),
    ("offload", (), _shards_parameters),
    ("cut", (), lambda c: c.wrapper == "zero3"),
    ("idle_slots", (), lambda c: c.wrapper == "zero3"),
    ("whole_gradients", (), lambda c: c.loop == "written out" and not c.steps_by_torch),
    # One rank that shards nothing may have them, or not.
    ("whole_gradients", (), lambda c: c.wrapper not in ("zero2", "zero3") or c.shards_over > 1),
    ("streams", (), lambda c: c.trained != "adapters"),  # which it merges
    ("replicated", (), lambda c: c.wrapper != "ddp"),  # which replicates everything
    ("recompute", ("units", "products of units"), _is_fsdp2),
    ("policy", ("by dtypes",), _is_fsdp2),
    ("policy", ("a layer in fp32",), lambda c: not c.is_fsdp2),
    # A number of ranks is that of dense parameters; experts are sharded over others.
    ("reshard", ("two ranks",), lambda c: c.experts != "over ranks"),
    # torch's policy finds other calls in the recomputation of an exchange than in its forward.
    ("recompute", ("products of units",), lambda c: c.experts != "over ranks"),
    # Parameters are kept over the ranks that share them, two at a time: there have to be an even number.
    ("reshard", ("two ranks",), lambda c: c.shape.dp * c.shape.cp in (2, 4) and not c.is_hybrid),
    # What is done to low precision alone.
    ("policy", (), lambda c: c.precision != "fp32"),
    # FSDP2 starts from fp32 where the others round: rounded on the meta device there is nothing yet.
    ("start", ("meta",), lambda c: c.precision == "fp32"),
    # The parameter that is left unused is none that materialize knows how to draw, and codes are not drawn.
    ("start", ("meta",), lambda c: c.unused == "nothing" and c.base == "floating"),
    ("start", ("meta",), lambda c: c.tables == "none" and c.hooks == "none"),
    # Values are drawn by names, which a module around another changes after they were drawn here.
    ("start", ("meta",), lambda c: c.buffers == "read" and c.memory == "in rows"),
    ("start", ("ranks differ",), lambda c: c.shape.dp * c.shape.cp > 1),
    ("start", ("ranks differ",), lambda c: c.experts != "over ranks"),  # each rank's experts start as its own
    # What `train_step` does by itself.
    ("evaluates", ("before the update",), lambda c: c.loop == "written out"),
    ("zeroes", (), lambda c: c.loop == "written out"),
    ("loop", ("train_step on a loader",), lambda c: c.lengths == "equal"),
    # Elsewhere these are no mistakes.
    ("mistake", ("finalizes after a failed backward",), _is_fsdp2),
    ("mistake", ("writes what is gathered",), lambda c: _shards_parameters(c) and c.shards_over > 1),
    ("mistake", ("writes what is gathered",), lambda c: c.compiled == "no"),
    ("mistake", ("runs two units at once",), _has_two_units_in_one_slot),
    *(
        (axis, (), lambda c: c.trained in ("all", "without embedding", "a layer at times"))
        for axis in ("tables", "hooks")
    ),
    # A unit that torch recomputes is not gathered for a backward that reaches it by another way than its outputs.
    ("tables", ("objects", "attributes"), lambda c: c.recompute not in ("units", "products of units")),
    ("tables", ("read by the model",), lambda c: not c.is_fsdp2 and not c.continues.startswith("fsdp2")),
    # Masks are drawn for whole sequences, by kernels that all draw in the same order.
    *(
        (axis, (), lambda c: c.compiled == "no" and all(shape.tp == shape.cp == 1 for shape in _shapes(c)))
        for axis in ("dropout", "jitter")
    ),
    # The counts of a micro-batch are those of all replicas at its place in the step.
    ("experts", ("balanced over replicas",), _keeps_replicas),
    ("buffers", (), _writes_alike),
    ("forwards", (), lambda c: c.loop == "written out"),
    ("forwards", (), lambda c: c.shape.dp * c.number % (2 * _shapes(c)[-1].dp) == c.number % 2 == 0),
    ("gradients", (), lambda c: c.loop == "written out"),
    ("gradients", ("halved",), _shows_gradients),
    ("optimizer", ("torch's sgd",), _may_step_by_torch),
    ("rates", (), lambda c: not c.steps_by_torch),
    ("schedule", (), lambda c: not c.steps_by_torch),
    ("averaged", (), lambda c: not c.steps_by_torch),
    ("zeroes", ("optimizer",), lambda c: not c.steps_by_torch),
    ("zeroes", ("never",), _adds_up_alike),
    # An orthogonal update of low precision is one of its rounding.
    ("optimizer", ("muon",), lambda c: c.precision == "fp32"),
    ("evaluates", ("the average inside whole_parameters",), lambda c: c.averaged != "no"),
    # Each call that ends a step moves biases.
    ("experts", ("balanced by a bias",), lambda c: c.mistake != "finalizes twice"),
    ("experts", ("over ranks",), _may_share_experts),
    ("unused", (), lambda c: c.trained in ("all", "without embedding", "a layer at times")),
    ("continues", (), lambda c: c.continues == "no" or _divides(c)),
    # What needs experts.
    ("jitter", (), lambda c: c.experts != "none"),
)
"""By axis and values, all but the first where none are named, when they mean something."""
