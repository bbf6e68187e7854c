"""A GPT over sequences cut for two context-parallel ranks against the same GPT over whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.transformer import own_chunks
from tests.unit._spawn import run_distributed
from tests.unit.models._cases import CASES, LENGTH, VOCAB, build, relative_error

IGNORED = -100
FIRST_RANKS = [*range(LENGTH // 4), *range(3 * LENGTH // 4, LENGTH)]
"""Places of the sequence that the first of two ranks holds."""

DOCUMENTS = ((1, 1, 1, 5, 4), (3, 3, 3, 3), (12,))
"""Lengths in each row: of one token, ending with a chunk, and one document alone."""


def _batch(rows: int, masked: str, packed: bool) -> dict[str, torch.Tensor]:
    """Makes whole sequences `[b, s]`, with the labels of all, of some or of all of the first rank's tokens left
    out."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    if masked == "some":
        labels[:, ::5] = IGNORED
    elif masked == "the first rank's":
        labels[:, FIRST_RANKS] = IGNORED
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}
    if packed:
        starts = [[sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)] for lengths in DOCUMENTS[:rows]]
        batch["document_starts"] = torch.tensor(starts)
    return batch


def _losses_and_gradients(name: str, rows: int, masked: str, packed: bool) -> tuple[torch.Tensor, dict]:
    """Returns losses of this rank's tokens, and gradients of the mean over all that count, over all ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        parallel_state.initialize_model_parallel(context_parallel_size=size)
    model = build(CASES[name], context_parallel_size=size)
    batch = _batch(rows, masked, packed)
    count = (batch["labels"] != IGNORED).sum()
    losses = model(**{key: own_chunks(tensor) for key, tensor in batch.items()})
    (losses.sum() / count).backward()
    for parameter in model.parameters():
        if size > 1:
            dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
    return losses.detach(), {key: parameter.grad for key, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "rows", "masked", "packed"),
    [
        *((name, 2, "none", False) for name in CASES),
        ("gelu-learned-tied", 3, "some", True),
        ("swiglu-gqa-rope-rms", 3, "some", True),
        ("swiglu-gqa-rope-rms", 1, "the first rank's", False),
        ("qk-norm-partial-rope-tied", 1, "the first rank's", True),
    ],
)
def test_two_cp_ranks_equal_serial(name: str, rows: int, masked: str, packed: bool):
    losses, gradients = _losses_and_gradients(name, rows, masked, packed)
    assert bool(losses[:, FIRST_RANKS].any()) == (masked != "the first rank's")
    for rank, (actual, of_rank) in enumerate(run_distributed(_losses_and_gradients, 2, name, rows, masked, packed)):
        places = FIRST_RANKS if rank == 0 else [place for place in range(LENGTH) if place not in FIRST_RANKS]
        torch.testing.assert_close(actual, losses[:, places], rtol=1e-5, atol=1e-6)
        for parameter, gradient in gradients.items():
            assert relative_error(of_rank[parameter], gradient) < 1e-5, parameter
