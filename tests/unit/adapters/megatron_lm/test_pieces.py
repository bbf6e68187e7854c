"""Runs of a tensor's elements as boxes of Megatron-LM's checkpoints."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.base.errors import CheckpointError
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

WRAPPER: Any = SimpleNamespace(
    plan=SimpleNamespace(
        is_replicated=False, groups=SimpleNamespace(of=lambda parameter: SimpleNamespace(replicate=None))
    )
)
"""What is read of a wrapper that shards over all ranks."""


def _entry(tensor: torch.Tensor, *offsets: tuple[int, int, int]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(
        "decoder.weight", tensor, *offsets, prepend_axis_num=1, replica_id=(0, 0, 0)
    )


@pytest.mark.parametrize("cuts", [(0, 60), (0, 7, 23, 60), (0, 1, 2, 59, 60), (0, 12, 24, 60)], ids=str)
def test_runs_of_all_ranks_make_the_tensor(cuts: tuple[int, ...]) -> None:
    from core.adapters.megatron_lm.pieces import fill, held_pieces

    tensor = torch.arange(60.0).view(5, 3, 4)
    # The second of three layers, which are stacked, and the second of two tensor-parallel ranks.
    whole = torch.full((3, 10, 3, 4), torch.nan)
    for start, end in pairwise(cuts):
        values = tensor.view(-1)[start:end]
        pieces = held_pieces(WRAPPER, _entry(tensor, (0, 1, 3), (1, 1, 2)), values, start, "optimizer.state.exp_avg.")
        for piece in pieces.values():
            assert (piece.key, piece.global_shape) == ("optimizer.state.exp_avg.decoder.weight", (3, 10, 3, 4))
            assert piece.data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()  # nothing is copied
            box = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.local_shape, strict=True))
            assert whole[box].isnan().all(), "an element is in two pieces"
            whole[box] = piece.data
        target = torch.zeros(end - start)
        fill(target, {name: piece.data.clone() for name, piece in pieces.items()})
        assert torch.equal(target, values)
    assert torch.equal(whole[1, 5:], tensor) and whole.isnan().sum() == whole.numel() - 60


def test_an_empty_run_has_no_pieces() -> None:
    from core.adapters.megatron_lm.pieces import held_pieces

    tensor = torch.arange(60.0).view(5, 3, 4)
    assert held_pieces(WRAPPER, _entry(tensor), tensor.view(-1)[:0], 60) == {}


def test_parts_that_are_no_runs_are_refused() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from core.adapters.megatron_lm.pieces import held_pieces

    tensor = torch.arange(60.0).view(5, 12)

    def halves_of_rows(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        return {str(i): _entry(half) for i, half in enumerate(data.chunk(2, dim=1))}

    factory = ShardedTensorFactory("decoder.weight", tensor, halves_of_rows, merge_fn=lambda state: state)
    with pytest.raises(CheckpointError, match="in parts that are no runs of its elements") as raised:
        held_pieces(WRAPPER, factory, tensor.view(-1)[:30], 0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["TorchFullyShardedDataParallel", "FullyShardedDataParallel"])
@on_ranks(2)
def test_keys_of_another_model_are_named(kind: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.utils import unwrap_model

    from core.adapters import megatron_lm
    from core.adapters.megatron_lm.pieces import own_elements

    lost, foreign = "embedding.word_embeddings.weight", "decoder.router.weight"
    chosen = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    with _megatron.groups():
        settings = DistributedDataParallelConfig(**(chosen if kind.startswith("Fully") else {}))
        model = _megatron.wrap(getattr(megatron_lm, kind), _megatron.build(), settings)
        own = {
            name: own_elements(tensor)[0]
            for name, tensor in unwrap_model(model).state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        # A rank has no pieces of what it has nothing of.
        state = {name: {"0": torch.full_like(values, 0.5)} for name, values in own.items() if len(values)}
        assert model.load_state_dict(state) == ([], [])
        assert all((values == 0.5).all() for values in own.values())
        del state[lost]
        state |= {name: {"0": pieces["0"] + 1.0} for name, pieces in state.items()} | {foreign: {"0": torch.ones(1)}}
        match = f"missing keys: {lost}; unexpected keys: {foreign}; load a state of this model, or give strict=False"
        _megatron.raises_one_line(CheckpointError, match, model.load_state_dict, state)
        assert all((values == 0.5).all() for values in own.values())
        assert model.load_state_dict(state, strict=False) == ([lost], [foreign])
        assert all((values == (0.5 if name == lost else 1.5)).all() for name, values in own.items())
