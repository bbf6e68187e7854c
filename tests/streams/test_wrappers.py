"""No wrapper has a race on simulated streams, with any setting that changes what runs next to what."""

from __future__ import annotations

import itertools

import pytest

from tests.compositions.between import train as train_composition
from tests.compositions.composition import Composition
from tests.compositions.cover import sample
from tests.compositions.wrapped import Wrapped, parallel_groups
from tests.streams.process import assert_no_race
from tests.streams.steps import Case, train
from tests.unit._quick import quick

HYBRID = {"num_distributed_optimizer_instances": 2}
REPRODUCIBLE = {"reproducible_across_ranks": True}
EACH = {"reduce_every_micro_batch": True}
LOW = {"param_dtype": "bf16"}

QUICK = [
    *(Case(wrapper) for wrapper in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *(Case(wrapper, REPRODUCIBLE, micro_batches=4) for wrapper in ("ddp", "zero2", "zero3", "fsdp2")),
    Case("zero1", dtype="fp16"),
    *(Case(wrapper, {"offload_activations": True}) for wrapper in ("ddp", "zero3", "fsdp2")),
    Case("zero2", EACH, dtype="bf16"),
    Case("zero2", HYBRID, ranks=4),
    Case("zero3", {"forward_prefetch": 2, "backward_prefetch": 2, "activation_checkpointing": "full"}),
    Case("zero3", {"reshard_after_forward": 2} | LOW, ranks=4),
    Case("zero3", HYBRID | EACH | LOW, ranks=4),
    Case("zero3", HYBRID | REPRODUCIBLE | LOW, micro_batches=4, ranks=4),
    Case("fsdp2", {"forward_prefetch": 2, "backward_prefetch": 2, "activation_checkpointing": "full"} | LOW),
    Case("fsdp2", {"reshard_after_forward": 2} | EACH, ranks=4),
    Case("fsdp2", HYBRID | LOW, ranks=4),
    Case("fsdp2", HYBRID | REPRODUCIBLE | LOW, micro_batches=4, ranks=4),
]
"""Without what only the long set has."""

LONG = [
    *(Case(wrapper, between="nothing") for wrapper in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *(Case(wrapper, REPRODUCIBLE | EACH, micro_batches=4) for wrapper in ("zero2", "zero3", "fsdp2")),
    *(Case("zero3", {"forward_prefetch": f, "backward_prefetch": b}) for f, b in itertools.product((0, 1, 3), (0, 3))),
    *(Case("fsdp2", {"forward_prefetch": f, "backward_prefetch": b}) for f, b in itertools.product((0, 3), (0, 3))),
    *(Case(wrapper, {"reshard_after_forward": False}) for wrapper in ("zero3", "fsdp2")),
    *(Case("fsdp2", {"keep_gathered_between_micro_batches": kept}, 3) for kept in ("all", "none")),
    *(Case(wrapper, HYBRID | EACH, ranks=4) for wrapper in ("zero2", "fsdp2")),
    *(Case(wrapper, HYBRID | REPRODUCIBLE | EACH, 4, ranks=4) for wrapper in ("zero3", "fsdp2")),
    *(Case(wrapper, LOW | {"reduce_dtype": "fp32"}) for wrapper in ("zero3", "fsdp2")),
    *(Case(wrapper, {"grad_reduce_in_fp32": True}, dtype="bf16") for wrapper in ("ddp", "zero1", "zero2", "zero3")),
    *(Case(wrapper, dtype="fp16") for wrapper in ("ddp", "zero2", "zero3", "fsdp2")),
]


@pytest.mark.parametrize("case", quick([*QUICK, *LONG], lambda case: case in QUICK), ids=str)
def test_no_operations_of_a_step_race(case: Case) -> None:
    assert_no_race(train, case, ranks=case.ranks)


def _train(composition: Composition) -> None:
    with parallel_groups(composition):
        train_composition(Wrapped(composition, composition))


PARTS = sorted({p for c in sample() for p in c.parts if p.shape.ranks > 1 and p.optimizer != "muon"}, key=repr)
SHOWN = {
    Composition(layout="tp2-sp", wrapper="ddp", overlap="gradients", micro_batches="2", recompute="selective"),
    Composition(layout="cp2", wrapper="zero2", overlap="both", documents="packed", buckets="three"),
    Composition(layout="dp2-tp2-sp", wrapper="zero3", forward_prefetch="3", precision="bf16"),
    Composition(layout="dp2-cp2", wrapper="fsdp2", evaluates="in inference mode", loop="train_step"),
    Composition(layout="dp2", wrapper="zero3", fails="backward", evaluates="before the update", writes="clamps"),
}


@pytest.mark.parametrize(
    "composition",
    quick([*sorted(SHOWN, key=repr), *PARTS], lambda c: c in SHOWN),
    ids=lambda c: f"{c.layout}-{c.wrapper}",
)
def test_no_operations_of_a_composition_race(composition: Composition) -> None:
    assert_no_race(_train, composition, ranks=composition.shape.ranks)
