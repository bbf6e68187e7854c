"""The engine's config: built as verl builds it, of verl's own file, and what it refuses or ignores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.errors import ConfigError
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w

pytestmark = needs("verl")


def _of_verls_file() -> None:
    import verl.trainer
    from omegaconf import OmegaConf

    w._use_cpu()
    from verl.utils.config import omega_conf_to_dataclass

    from core.adapters.verl import ShardstackEngineConfig

    engine = OmegaConf.load(Path(verl.trainer.__path__[0], "config/engine/fsdp.yaml"))
    of_ours = {"sharding_strategy": "fsdp2", "settings": {"backward_prefetch": 2}, "reshard_after_forward": False}
    of_ours |= {"_target_": "core.adapters.verl.ShardstackEngineConfig", "strategy": "shardstack"}
    of_ours["router_replay"] = {"_target_": "verl.workers.config.EngineRouterReplayConfig", "mode": "R3"}
    engine = OmegaConf.merge(engine, of_ours)
    actor = {
        "_target_": "verl.workers.config.FSDPActorConfig", "strategy": "shardstack", "fsdp_config": engine,
        "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1,
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = omega_conf_to_dataclass(OmegaConf.create(actor)).engine
    assert isinstance(config, ShardstackEngineConfig) and config.strategy == "shardstack"
    assert config.router_replay.mode == "R3"
    text = "\n".join(str(warning.message) for warning in caught)
    assert "use_no_sync_for_gradient_accumulation=False changes nothing: gradients are reduced once a step" in text
    wrapped = config.plugin().ddp_config
    assert (wrapped.backward_prefetch, wrapped.reshard_after_forward) == (2, False)
    assert wrapped.param_dtype == torch.bfloat16 and wrapped.grad_reduce_in_fp32


def test_verls_own_file_of_settings_is_accepted():
    run_distributed(_of_verls_file, 1)


def _reject() -> None:
    w._use_cpu()
    from verl.workers.config import QATEngineConfig

    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"strategy": "fsdp2"}, "strategy is 'fsdp2', and the engine of this config is 'shardstack'"),
        ({"sharding_strategy": "zero3"}, "sharding_strategy is 'zero3'; it takes one of no_shard, optim"),
        ({"sharding_strategy": "no_shard", "hybrid": True}, "hybrid is set under no_shard"),
        ({"settings": {"cpu_ofload": True}}, "no setting 'cpu_ofload'; did you mean 'cpu_offload'"),
        ({"wrap_policy": {"min_num_params": 7}}, "units are chosen by transformer_cls_names_to_wrap"),
        ({"offload_policy": True}, "settings.cpu_offload"),
        ({"fsdp_size": 2}, "hybrid=True shards within machines"),
        ({"qat": QATEngineConfig(enable=True)}, "enable is True in qat: weights are not quantised"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "param_dtype is 'fp16'; "),
        ({"mixed_precision": {"buffer_dtype": "bf16"}}, "buffer_dtype is 'bf16'; "),
        ({"mixed_precision": {"params": "bf16"}}, "mixed_precision has 'params'"),
    )
    for fields, message in cases:
        with pytest.raises(ConfigError) as caught:
            w.engine_config(fields.pop("sharding_strategy", "optim_grads_params"), **fields)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_without_a_counterpart_are_one_line():
    run_distributed(_reject, 1)
