"""Weights out of an engine: whole tensors, shards that reassemble, and deltas that bring a receiver up to date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w

pytestmark = needs("verl")


def _whole(engine: Any) -> dict[str, Tensor]:
    stream, config = engine.get_per_tensor_param()
    assert config is None
    return {name: tensor.detach().clone() for name, tensor in stream}


def _reassembled(engine: Any) -> dict[str, Tensor]:
    """Puts together what the ranks yield, by what verl reads of a `ShardSpec`."""
    from verl.workers.engine.spec import derive_dtensor_placement, translate_flat_indices

    whole = {}
    for name, local, spec in engine.get_per_tensor_param_shard()[0]:
        place, contributes = spec.place, spec.contributes
        if place is None:
            place, contributes, _ = derive_dtensor_placement(spec)
        positions = translate_flat_indices(torch.arange(local.numel()), place)
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, (positions, local.clone()) if contributes else None)
        places, values = (torch.cat([piece[part] for piece in pieces if piece]) for part in (0, 1))
        assert places.sort().values.equal(torch.arange(len(places))), f"{name} lacks an element, or has one twice"
        whole[name] = values[places.argsort()].view(spec.full_shape)
    return whole


def _apply(engine: Any, received: dict[str, Tensor]) -> int:
    """Gathers a delta by verl's own function, and writes it into what the first rank has. Returns its elements."""
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0

    total, is_first = 0, dist.get_rank() == 0
    for slots, dtype, counts, indices, values, group in engine.get_per_tensor_param_delta_shard()[0]:
        assert dtype == str(values.dtype).removeprefix("torch.") and len(slots) == len(counts)
        gathered = list(zip(indices.split(counts.tolist()), values.split(counts.tolist()), strict=True))
        if group is not None:
            gathered = gather_slot_entries_to_rank0(indices, values, counts, group)
        for (name, shape), (places, elements) in zip(slots, gathered or (), strict=False):
            assert received[name].shape == torch.Size(shape)
            if is_first:
                received[name].view(-1)[places.long()] = elements
                total += len(places)
    return total


def _exported(path: str, strategies: list[str], local: int | None = None, **fields: Any) -> list[Any]:
    found = []
    with w.verl_environment(local):
        for strategy in strategies:
            worker = w.worker_of(path, strategy, **fields)
            engine = worker.engine
            w.train(worker, range(1))
            first = _whole(engine)
            in_bf16 = {name: tensor.bfloat16() for name, tensor in first.items()}
            shards = _reassembled(engine)
            engine.prime_delta_snapshots()
            unchanged = _apply(engine, in_bf16)
            w.train(worker, range(1, 2))
            changed = _apply(engine, in_bf16)
            found.append((first, shards, w.weights(worker), in_bf16, _whole(engine), unchanged, changed))
    return found


def _check(first: Any, shards: Any, weights: Any, received: Any, second: Any, unchanged: int, changed: int) -> None:
    assert unchanged == 0 < changed
    for name, tensor in second.items():
        assert received[name].dtype == torch.bfloat16 and torch.equal(received[name], tensor.bfloat16()), name
    assert any(not torch.equal(second[name], tensor) for name, tensor in first.items())


def test_whole_tensors_shards_and_deltas_have_equal_bits(tmp_path):
    path = w.save_model(tmp_path / "model")
    of_ranks = run_distributed(_exported, 2, path, list(w.STRATEGIES))
    for first, shards, weights, received, second, unchanged, changed in of_ranks[0]:
        _check(first, shards, weights, received, second, unchanged, changed)
        assert second.keys() == weights.keys() == shards.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.items())
        assert all(torch.equal(tensor, first[name].bfloat16()) for name, tensor in shards.items())
    assert all(torch.equal(tensor, of_ranks[1][0][4][name]) for name, tensor in second.items()), "of another rank"


def test_stacked_experts_go_out_one_by_one(tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    path = w.save_model(tmp_path / "model", "qwen3_moe", **fields)
    for first, shards, weights, received, second, unchanged, changed in run_distributed(
        _exported, 2, path, ["no_shard", "optim_grads_params", "fsdp2"]
    )[0]:
        _check(first, shards, weights, received, second, unchanged, changed)
        stacked = weights["model.layers.0.mlp.experts.gate_up_proj"]
        assert torch.equal(second["model.layers.0.mlp.experts.3.up_proj.weight"], stacked[3, 12:])
        assert "model.layers.0.mlp.experts.gate_up_proj" in shards and len(second) > len(shards)


@pytest.mark.long
def test_a_hybrid_sends_each_element_once(tmp_path):
    path = w.save_model(tmp_path / "model")
    fields = {"hybrid": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
    for found in run_distributed(_hybrids, 4, path, fields)[0]:
        _check(*found)


def _hybrids(path: str, fields: dict[str, Any]) -> list[Any]:
    return _exported(path, ["optim_grads_params", "fsdp2"], 2, **fields)
