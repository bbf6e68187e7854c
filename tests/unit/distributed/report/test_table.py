"""Equal units become one line, and numbers are in readable units."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.distributed.plan.parts import Traffic
from core.distributed.report.table import Memory, ModelFacts, UnitFacts, amount, count, notes, shorten, table

LAYER = UnitFacts(
    name="decoder.layers.0",
    kind="TransformerLayer",
    num_parameters=12_345_678,
    num_trainable=12_345_678,
    kept=Memory(3 * 2**20, (torch.float32,)),
    gathered=Memory(6 * 2**20, (torch.bfloat16,)),
    gradient=Memory(3 * 2**20, (torch.float32,)),
    after_forward="freed",
    traffic=(Traffic("all-gather", 8, 6 * 2**20, 4), Traffic("reduce-scatter", 1, 2**20, 4)),
)


def _plan(tp: int, cp: int) -> Any:
    sizes = {"tensor_parallel_size": tp, "context_parallel_size": cp}
    return SimpleNamespace(**sizes, changed_settings="", model_settings="")


def _facts(*units: UnitFacts) -> ModelFacts:
    plan: Any = SimpleNamespace(
        tensor_parallel_size=1, context_parallel_size=1, changed_settings="", model_settings=""
    )
    return ModelFacts(plan, 4, units)


def _layer(name: str, **changes: object) -> UnitFacts:
    return replace(LAYER, name=name, **changes)


def test_equal_units_numbered_one_after_the_other_are_folded():
    units = [
        _layer("embedding"),
        *(_layer(f"decoder.layers.{i}") for i in range(12)),
        _layer("decoder.layers.12", after_forward="stays"),
        _layer("decoder.layers.14", after_forward="stays"),
        _layer("a.1.b.0"),
        _layer("a.2.b.0"),
        _layer("a.2.b.1"),
    ]
    assert [line.cells[0] for line in table(_facts(*units)).lines] == [
        "embedding",
        "decoder.layers.0-11 (12 x)",
        "decoder.layers.12",
        "decoder.layers.14",
        "a.1-2.b.0 (2 x)",
        "a.2.b.1",
        "all 18",
    ]


def test_a_line_holds_the_numbers_of_one_unit():
    line, total = table(_facts(LAYER, _layer("decoder.layers.1"))).lines
    assert line.cells == (
        "decoder.layers.0-1 (2 x)",
        "TransformerLayer",
        "12.3 M",
        "3 MiB fp32",
        "6 MiB bf16",
        "freed",
        "3 MiB",
        "8",
        "1",
        "36.8 MiB",  # (8 * 6 + 1) MiB * 3 / 4
    )
    assert total.cells == ("all 2", "", "24.7 M", "6 MiB", "12 MiB", "", "6 MiB", "16", "2", "73.5 MiB")
    offloaded, _ = table(
        _facts(_layer("", num_trainable=0, is_offloaded=True, gathered=None, after_forward="-"))
    ).lines
    assert offloaded.cells[:4] == ("(the rest)", "TransformerLayer", "12.3 M frozen", "3 MiB fp32 host")


def test_counts_and_amounts():
    assert [count(n) for n in (83, 10_000, 58_700_000, 7_000_000_000)] == ["83", "10.0 k", "58.7 M", "7.0 B"]
    assert amount(Memory(2**20, (torch.bfloat16, torch.float32))) == "1 MiB bf16+fp32"
    assert amount(Memory(0, ())) == amount(None) == "-"


def test_long_names_lose_their_middle():
    assert shorten("decoder.layers.0", 20) == "decoder.layers.0"
    assert shorten("decoder.layers.0-31 (32 x)", 19) == "decode….0-31 (32 x)"
    assert shorten("decoder.a.weight … decoder.b.weight", 23) == "….a.weight … ….b.weight"


@pytest.mark.parametrize(
    ("tp", "cp", "said"),
    [
        (2, 1, "one tensor-parallel part of the model; what layers send among 2 tensor-parallel ranks is not counted"),
        (1, 2, "what layers send among 2 context-parallel ranks is not counted"),
        (1, 1, None),
    ],
)
def test_traffic_inside_the_model_is_said_not_to_be_counted(tp, cp, said):
    plan: Any = _plan(tp, cp)
    facts = ModelFacts(plan, 2, (LAYER,))
    assert [note for note in notes(facts) if "not counted" in note] == ([] if said is None else [said])
