"""Oumi's ``fsdp:`` blocks: every shape that its configs use trains, and every field changes something or warns."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from core.adapters import oumi
from core.adapters.oumi import AutoWrapPolicy, BackwardPrefetch, FSDPParams, ShardingStrategy, StateDictType
from core.base.errors import ConfigError, warn_once
from core.dist_checkpointing import load_model_state_dict
from core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters._adapters import Net
from tests.unit.distributed._hugging_face import VOCAB, hugging_face_model, loss_of
from tests.unit.distributed._toys import full

LLAMA_LAYER = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"

BLOCKS = {
    "recipe": f"""
        fsdp:
          enable_fsdp: True
          forward_prefetch: True
          sharding_strategy: "FULL_SHARD"
          auto_wrap_policy: "TRANSFORMER_BASED_WRAP"
          transformer_layer_cls: "{LLAMA_LAYER}"
        """,
    "plain class": """
        model: {model_name: "a/b", model_max_length: 8}
        fsdp:
          enable_fsdp: true
          cpu_offload: true
          sharding_strategy: HYBRID_SHARD
          auto_wrap_policy: TRANSFORMER_BASED_WRAP
          transformer_layer_cls: LlamaDecoderLayer
        """,
    "list of classes": f"""
        fsdp:
          enable_fsdp: True
          sharding_strategy: "SHARD_GRAD_OP"
          mixed_precision: "bf16"
          auto_wrap_policy: "TRANSFORMER_BASED_WRAP"
          transformer_layer_cls: "LlamaMLP, torch.nn.Embedding,{LLAMA_LAYER}"
        """,
    "guessed class": """
        enable_fsdp: True
        sharding_strategy: "HYBRID_SHARD_ZERO2"
        backward_prefetch: "NO_PREFETCH"
        auto_wrap_policy: "TRANSFORMER_BASED_WRAP"
        """,
    "by size": """
        fsdp:
          enable_fsdp: True
          sharding_strategy: "FULL_SHARD"
          state_dict_type: "SHARDED_STATE_DICT"
          auto_wrap_policy: "SIZE_BASED_WRAP"
          min_num_params: 1000
          use_orig_params: True
        """,
    "no shard": "fsdp: {enable_fsdp: True, sharding_strategy: NO_SHARD, mixed_precision: bf16}",
    "off": "fsdp: {enable_fsdp: False}",
}


def _params(text: str) -> FSDPParams:
    """Reads a whole config with a block ``fsdp``, or the block itself."""
    config = yaml.safe_load(text)
    return FSDPParams(**config.get("fsdp", config))


@needs("transformers")
@on_ranks(2)
def test_every_shape_of_block_loads_and_trains():
    names = list(BLOCKS)
    for name in names:
        params = _params(BLOCKS[name])
        model = oumi.prepare_model(hugging_face_model("llama"), params)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(2):
            loss = loss_of(model, torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] < losses[0], name
        assert len(oumi.model_state_dict(model, params)) > 10


def _fsdp_units(model: nn.Module) -> int:
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def _observed(**fields: Any) -> tuple[Any, list[str]]:
    """Returns what a prepared model shows of its settings, and what was warned of."""
    warn_once.cache_clear()
    params = FSDPParams(**fields)
    model = Net()
    with torch.no_grad():
        model.head.weight.add_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        warnings.simplefilter("always")
        wrapped = oumi.prepare_model(model, params)
    settings = vars(wrapped.ddp_config)
    weight = next(wrapped.parameters())
    shape = tuple(weight.device_mesh.shape) if isinstance(weight, DTensor) else None
    state = oumi.model_state_dict(wrapped, params)["head.weight"]
    kind = (type(state), state is not None and tuple(state.shape))
    same_start = torch.equal(full(wrapped.module.head.weight), Net().head.weight)
    seen = (type(wrapped).__name__, settings, _fsdp_units(wrapped), shape, kind, same_start)
    return seen, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


_FLIPS: dict[str, list[Any]] = {
    "sharding_strategy": list(ShardingStrategy)[1:],
    "cpu_offload": [True],
    "mixed_precision": ["bf16", "fp16"],
    "backward_prefetch": [BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.NO_PREFETCH],
    "forward_prefetch": [True],
    "use_orig_params": [True, False],
    "state_dict_type": [StateDictType.SHARDED_STATE_DICT],
    "auto_wrap_policy": [AutoWrapPolicy.TRANSFORMER_BASED_WRAP],
    "min_num_params": [50],
    "transformer_layer_cls": ["Block"],
    "sync_module_states": [False],
}


@on_ranks(2)
def test_every_field_changes_something_or_warns() -> None:
    assert {*_FLIPS, "enable_fsdp"} == {field.name for field in dataclasses.fields(FSDPParams)}
    plain, warned = _observed(enable_fsdp=True)
    assert not warned
    replicated, warned = _observed()
    assert replicated[0] != plain[0] and not warned
    for name, values in _FLIPS.items():
        for value in values:
            seen, warned = _observed(enable_fsdp=True, **{name: value})
            assert seen != plain or any(name in message for message in warned), (name, value)
            seen, warned = _observed(**{name: value})
            assert seen != replicated or any(name in message for message in warned), (name, value)
    seen, _ = _observed(enable_fsdp=True, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=70)
    other, _ = _observed(enable_fsdp=True, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=80)
    assert (seen[2], other[2]) == (5, 3)


def _prefetch_of(**fields: Any) -> tuple[int, int]:
    settings = oumi.prepare_model(Net(), FSDPParams(enable_fsdp=True, **fields)).ddp_config
    return settings.forward_prefetch, settings.backward_prefetch


@on_ranks(2)
def test_strategies_choose_mesh_and_resharding() -> None:
    assert isinstance(oumi.prepare_model(Net(), FSDPParams()), DistributedDataParallel)
    assert _prefetch_of() == (0, 1)
    assert _prefetch_of(forward_prefetch=True, backward_prefetch="NO_PREFETCH") == (1, 0)
    for strategy in ShardingStrategy:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            wrapped = oumi.prepare_model(Net(), FSDPParams(True, strategy, mixed_precision="bf16"))
        assert isinstance(wrapped, TorchFullyShardedDataParallel)
        weight = wrapped.module.head.weight
        replicates = strategy.is_hybrid or strategy is ShardingStrategy.NO_SHARD
        assert tuple(weight.device_mesh.shape) == ((2, 1) if replicates else (2,))
        frees = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        assert wrapped.ddp_config.reshard_after_forward is frees
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"),
        pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is '3'"),
    ):
        oumi.prepare_model(Net(), FSDPParams(True, ShardingStrategy.HYBRID_SHARD))


@on_ranks(2)
def test_state_dict_types_go_out_and_in() -> None:
    expected = dict(Net().state_dict())
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        params = FSDPParams(enable_fsdp=True, state_dict_type=kind)
        wrapped = oumi.prepare_model(Net(), params)
        state = {name: value.clone() for name, value in oumi.model_state_dict(wrapped, params).items()}
        assert isinstance(state["head.weight"], DTensor) == (kind is StateDictType.SHARDED_STATE_DICT)
        with torch.no_grad():
            for p in wrapped.parameters():
                p.zero_()
        load_model_state_dict(wrapped.module, state)
        assert all(torch.equal(full(p), expected[name]) for name, p in wrapped.module.named_parameters())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"sharding_strategy": "FULL_SHRAD"}, "'FULL_SHRAD'; did you mean 'FULL_SHARD'.*HYBRID_SHARD_ZERO2"),
        ({"mixed_precision": "int8"}, "mixed_precision is 'int8'"),
        ({"min_num_params": 0}, "min_num_params is 0"),
        ({"enable_fsdp": "yes"}, "enable_fsdp is 'yes'"),
        ({"transformer_layer_cls": ""}, "takes class names"),
        ({"use_orig_params": "maybe"}, "use_orig_params is 'maybe'"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "takes FULL_STATE_DICT or SHARDED_STATE_DICT"),
    ],
)
def test_what_a_block_may_not_say(block, message):
    with pytest.raises(ConfigError, match=message):
        FSDPParams(**block).finalize_and_validate()


@needs("transformers")
@on_ranks(2)
def test_text_is_generated_under_sharding():
    prompt, options = torch.tensor([[2, 3]]), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = hugging_face_model("llama").generate(prompt, **options)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        block = {"enable_fsdp": True, "sharding_strategy": strategy, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        wrapped = oumi.prepare_model(hugging_face_model("llama"), FSDPParams(**block))
        assert torch.equal(wrapped.module.generate(prompt, **options), expected)
