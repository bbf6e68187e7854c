"""Every byte that a wrapper knows of is counted once, where it belongs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from core.diagnostics.memory_table import (
    CATEGORIES,
    GATHERED,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    REST,
    WHOLE_GRADIENTS,
    held_bytes,
    memory_by_category,
    table_lines,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, loss_of, toy

ELEMENTS = sum(parameter.numel() for parameter in toy(tied=False).parameters())
TRAINABLE = ELEMENTS - 3
BUFFERS = 7


def _table_of(kind: str) -> tuple[dict[str, int], ...]:
    """Returns the table between forward and backward, after a backward inside `no_sync`, and after a step."""
    model = build(kind, toy(tied=False))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    tokens = batches(dist.get_rank())[0]
    model.zero_grad_buffer()
    loss = loss_of(model, tokens)
    forward = memory_by_category(model, "cpu")
    with model.no_sync():
        loss.backward()
    accumulated = memory_by_category(model, "cpu")
    model.finish_grad_sync()
    optimizer.step()
    stepped = memory_by_category(model, "cpu")
    assert all(tuple(table) == CATEGORIES for table in (forward, accumulated, stepped))
    return forward, accumulated, stepped


def test_fsdp2_keeps_half_per_rank_and_gathers_what_it_needs():
    tables = run_distributed(_table_of, 2, "fsdp2")
    for moment in range(3):
        # A shard is padded to the largest, so two ranks together hold a little more than the model.
        assert 4 * ELEMENTS <= sum(table[moment][PARAMETERS] for table in tables) < 4 * ELEMENTS * 1.5
    # Two moments of each parameter, on one of the ranks, and step counts.
    assert 8 * TRAINABLE <= sum(stepped[OPTIMIZER_STATE] for _, _, stepped in tables) < 8 * TRAINABLE + 4096
    for forward, accumulated, stepped in tables:
        head, root = 77, 4  # the last unit and the root stay gathered, padded to the number of ranks
        assert 4 * (head + root) <= forward[GATHERED] < 4 * (head + root) + 64
        assert forward[GRADIENTS] == forward[WHOLE_GRADIENTS] == 0
        assert accumulated[WHOLE_GRADIENTS] == 4 * TRAINABLE and accumulated[GRADIENTS] == 0
        assert stepped[WHOLE_GRADIENTS] == 0 and stepped[GATHERED] == 0
        assert 0 < stepped[GRADIENTS] < 4 * TRAINABLE


def test_replicas_hold_everything():
    for _, accumulated, stepped in run_distributed(_table_of, 2, "ddp"):
        assert stepped[PARAMETERS] == 4 * (ELEMENTS + BUFFERS)
        assert stepped[GATHERED] == stepped[WHOLE_GRADIENTS] == 0
        assert 4 * TRAINABLE <= accumulated[GRADIENTS] == stepped[GRADIENTS] < 4 * TRAINABLE + 4096
        assert 8 * TRAINABLE <= stepped[OPTIMIZER_STATE] < 8 * TRAINABLE + 4096


def test_zero2_lets_whole_gradients_go():
    for _, accumulated, stepped in run_distributed(_table_of, 2, "zero2"):
        assert accumulated[WHOLE_GRADIENTS] >= 4 * TRAINABLE
        assert stepped[WHOLE_GRADIENTS] == 0
        assert 0 < stepped[GRADIENTS] < accumulated[WHOLE_GRADIENTS]


def test_the_rest_is_what_the_process_holds_beyond():
    before = held_bytes("cpu")
    ballast = torch.ones(2**24)  # 64 MiB
    assert 60 * 2**20 < held_bytes("cpu") - before < 200 * 2**20
    assert ballast.sum() > 0


def test_the_table_leaves_out_what_holds_nothing():
    lines = table_lines({PARAMETERS: 2**20, GATHERED: 0, REST: 2**21})
    assert [line.split() for line in lines] == [
        ["parameters", "1", "MiB"],
        ["activations", "and", "other", "2", "MiB"],
        ["together", "3", "MiB"],
    ]
