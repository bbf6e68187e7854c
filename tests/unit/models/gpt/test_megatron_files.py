"""Weights go into Megatron-LM's checkpoints and come back with their bits, through megatron-core's own code."""

from __future__ import annotations

from multiprocessing import current_process
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.models.gpt import GPTModel
from core.models.gpt.megatron_layout import load_megatron, save_megatron
from core.transformer.transformer_config import TransformerConfig
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

GATED = {"gated_linear_unit": True, "add_bias_linear": False, "bias_activation_fusion": False}
EXPERTS = GATED | {"num_moe_experts": 4, "moe_router_topk": 2}
MIXED = EXPERTS | {"moe_layer_freq": [0, 1]}
_OF_BOTH = {"gated_linear_unit", "add_bias_linear", "num_moe_experts", "moe_router_topk", "moe_layer_freq"}


def own_model(tied: bool = False, seed: int = 5, vocab_size: int = _megatron.VOCAB, **fields: Any) -> GPTModel:
    """Returns a model of this library that computes what `_megatron.build` builds."""
    torch.manual_seed(seed)
    kept = {name: value for name, value in fields.items() if name in _OF_BOTH}
    return GPTModel(
        TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0, **kept
        ),
        vocab_size=vocab_size,
        max_sequence_length=_megatron.SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
        parallel_output=False,
    )


def sharded_state(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": group})}


def _through_megatron(folder: Path, tied: bool, tensor: int, pipeline: int, fields: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    own = own_model(tied, **fields)
    own.embedding.position_embeddings.weight.data.normal_()
    save_megatron(own, folder / "ours", max_shard_bytes=4096)
    with _megatron.groups(pipeline, tensor):
        if pipeline > 1:
            model = _megatron.build_stage(tied)
        else:
            model = _megatron.build(tied, tensor_model_parallel_size=tensor, **fields)
        state = dist_checkpointing.load(sharded_state(model), str(folder / "ours" / "release"))
        model.load_state_dict(state["model"], strict=True)
        assert state["checkpoint_version"] == 3.0
        if pipeline == 1:
            text = _megatron.tokens(0, 0, 0)
            with torch.no_grad():
                found = model.eval()(text, torch.arange(text.shape[1]).expand_as(text), None, labels=text.roll(-1, 1))
                expected = F.cross_entropy(own.eval()(text).transpose(1, 2), text.roll(-1, 1), reduction="none")
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if dist.get_rank() == 0:
            (folder / "theirs").mkdir()
        dist.barrier()
        with mock.patch.dict(current_process()._config, daemon=False):  # it starts a process
            dist_checkpointing.save(sharded_state(model), str(folder / "theirs"))
    load_megatron(back := own_model(tied, seed=6, **fields), folder / "theirs")
    load_megatron(again := own_model(tied, seed=7, **fields), folder / "ours")
    expected = own.state_dict()
    for found in (back.state_dict(), again.state_dict()):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


CASES = [
    (False, 2, 1, {}),
    (True, 2, 1, GATED),
    (True, 1, 2, {}),
    (False, 1, 2, {}),
    (False, 1, 1, EXPERTS),
    (True, 1, 1, MIXED),
]


@pytest.mark.parametrize(("tied", "tensor", "pipeline", "fields"), CASES)
@on_ranks(2)
def test_weights_go_there_and_back(
    tmp_path: Path, tied: bool, tensor: int, pipeline: int, fields: dict[str, Any]
) -> None:
    _through_megatron(tmp_path, tied, tensor, pipeline, fields)
