"""Settings of sharded parameters check themselves; what they do is in `fsdp2/test_fsdp2_engine.py`."""

from __future__ import annotations

import re

import pytest

from core.base.errors import ConfigError, ParallelConfigError
from core.distributed import (
    _WRAPPERS,
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.distributed.fully_sharded_data_parallel_config import STRATEGIES, config_class, config_of


def test_overrides_are_name_patterns_and_the_last_match_counts():
    settings = FullyShardedDataParallelConfig(
        reshard_overrides=("decoder.layers.*=False", "decoder.layers.1?=2", "=true")
    )
    found = {name: settings.reshard_of(name, True) for name in ("decoder.layers.3", "decoder.layers.12", "", "head")}
    assert found == {"decoder.layers.3": False, "decoder.layers.12": 2, "": True, "head": True}


@pytest.mark.parametrize("entry", ["decoder.layers.0", "decoder=maybe", "decoder=-2", "decoder=1.5"])
def test_an_entry_of_another_form_is_refused_by_name(entry):
    with pytest.raises(ParallelConfigError, match=entry):
        FullyShardedDataParallelConfig(reshard_overrides=(entry,))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"param_dtype": "int8"}, ("param_dtype is 'int8'",)),
        ({"forward_prefetch": -1}, ("forward_prefetch is -1",)),
        ({"grad_reduce_in_fp32": True, "reduce_dtype": "bf16"}, ("grad_reduce_in_fp32", "reduce_dtype is bf16")),
        (
            {"keep_gathered_between_micro_batches": "all", "reshard_after_forward": 2},
            ("keep_gathered_between_micro_batches", "reshard_after_forward is 2"),
        ),
        (
            {"keep_gathered_between_micro_batches": "all", "reshard_overrides": ("head=True",)},
            ("keep_gathered_between_micro_batches", "reshard_overrides ['head=True']"),
        ),
        ({"reshard_overrides": ("head",)}, ("reshard_overrides holds 'head'",)),
        ({"keep_gathered_between_micro_batches": "some"}, ("keep_gathered_between_micro_batches is 'some'", "ends")),
    ],
)
def test_contradictory_settings_name_both(settings, said):
    with pytest.raises(ParallelConfigError) as caught:
        TorchFullyShardedDataParallelConfig(**settings)
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(
    "fields", [{"use_distributed_optimizer": True}, {"data_parallel_sharding_strategy": "no_shard"}], ids=str
)
def test_fsdp2_settings_refuse_another_strategy_by_name(fields):
    with pytest.raises(ParallelConfigError, match=f"^{next(iter(fields))} is .* in a TorchFullySharded"):
        TorchFullyShardedDataParallelConfig(**fields)


@pytest.mark.parametrize("value", ["row", "block", "block:0", "block:x", "tensor:2", ""])
def test_other_cuts_are_refused(value):
    with pytest.raises(ParallelConfigError, match=r"a cut is auto, flat, rows, tensor, or block:N"):
        FullyShardedDataParallelConfig(shard_cut=value)
    with pytest.raises(ParallelConfigError, match=re.escape(f"shard_cut holds 'blocks.*={value}'")):
        FullyShardedDataParallelConfig(shard_cut=f"rows,blocks.*={value}")
    with pytest.raises(ParallelConfigError, match=r"shard_cut holds 'blocks'"):
        FullyShardedDataParallelConfig(shard_cut="auto,blocks")


def test_a_strategy_has_its_wrappers_config():
    config = config_of("fsdp2", forward_prefetch=2, cpu_offload=True)
    assert isinstance(config, TorchFullyShardedDataParallelConfig)
    assert (config.forward_prefetch, config.cpu_offload) == (2, True)
    config = config_of("optim", bucket_size=7)
    assert type(config) is DistributedDataParallelConfig
    assert (config.sharding_strategy, config.bucket_size) == ("optim", 7)
    assert [config_of(strategy).strategy for strategy in STRATEGIES] == [*STRATEGIES]
    assert {config_of(strategy).engine for strategy in STRATEGIES} == _WRAPPERS.keys()
    with pytest.raises(ConfigError, match="strategy is 'optimal'; did you mean 'optim'"):
        config_class("optimal", "strategy")
