"""The cases of every wrapper with either kind of weights in every precision, each named after its three parts.

Replicas (DDP) are what the others equal, bit by bit on the CPU: in low precision too, where FSDP2 shards fp32 and
casts by itself, because initial weights are rounded under every wrapper.
"""

from __future__ import annotations

import itertools
import shlex
from typing import Any

from tests.functional._cases import Case, Leg, OnGpu

WRAPPERS = {
    "ddp": "",
    "zero1": "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
    "zero2": "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 5000",
    "fsdp2": "--use-torch-fsdp2",
}
WEIGHTS = {"tied": "", "untied": "--untie-embeddings-and-output-weights"}
PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16 --grad-reduce-in-fp32",
    "fp16": "--fp16 --grad-reduce-in-fp32 --initial-loss-scale 2097152 --loss-scale-window 5 --hysteresis 1",
}
QUICK = ("ddp-tied-fp32", "ddp-untied-fp16", "fsdp2-tied-fp32")


def wrapper_cases() -> list[Case]:
    """Returns a case for each combination."""
    return [_case(*parts) for parts in itertools.product(WRAPPERS, WEIGHTS, PRECISIONS)]


def _case(wrapper: str, weights: str, precision: str) -> Case:
    name = f"{wrapper}-{weights}-{precision}"
    flags = shlex.split(f"{WRAPPERS[wrapper]} {WEIGHTS[weights]} {PRECISIONS[precision]}")
    case: dict[str, Any] = {"name": name, "legs": (Leg(tuple(flags)),), "is_quick": name in QUICK}
    if wrapper == "ddp":
        return Case(kind="regular", **case)
    low, replicas = precision != "fp32", f"ddp-{weights}-{precision}"
    return Case(
        kind="equality",
        equal_to=replicas,
        tolerance=0.0,
        gpu=OnGpu(equal_to=replicas, tolerance=0.02 if low else 0.001),
        **case,
    )
