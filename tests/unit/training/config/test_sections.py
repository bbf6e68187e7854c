"""Each section refuses what it can see to be wrong by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.dist_checkpointing import Retention
from core.training.config.sections import CheckpointConfig, DataConfig, GPTConfig, RunConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        (SchedulerConfig, {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "lr_warmup_iters 2 and"),
        (SchedulerConfig, {"lr_warmup_fraction": 1.0}, "lr_warmup_fraction is 1.0"),
        (SchedulerConfig, {"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        (SchedulerConfig, {"start_weight_decay": 0.1}, "weight_decay_incr_style is constant"),
        (SchedulerConfig, {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "the others both"),
        (SchedulerConfig, {"lr_warmup_init": float("nan")}, "lr_warmup_init is nan"),
        (DataConfig, {"seq_length": 0, "micro_batch_size": 1}, "seq_length is 0"),
        (DataConfig, {"seq_length": 8, "micro_batch_size": 1, "num_workers": -1}, "num_workers is -1"),
        (CheckpointConfig, {"save_interval": 0}, "save_interval is 0"),
        (GPTConfig, {"lora_rank": 0, "lora_targets": ("linear_qkv",)}, "lora_rank is 0"),
        (GPTConfig, {"lora_targets": ("linear_qkv",)}, "lora_targets is set and lora_rank is not"),
        (GPTConfig, {"lora_alpha": 2.0}, "lora_alpha is set and lora_rank is not"),
        (GPTConfig, {"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha is 0.0"),
        (
            GPTConfig,
            {"lora_rank": 2, "freeze": ("a.*", "b")},
            r"lora_rank 2 freezes all .* and freeze a\.\* b is given",
        ),
        (RunConfig, {"train_iters": 0}, "train_iters is 0"),
        (RunConfig, {"train_iters": 1, "seed": -1}, "seed is -1"),
        (RunConfig, {"train_iters": 1, "distributed_timeout_minutes": 0}, "distributed_timeout_minutes is 0"),
    ],
)
def test_a_section_checks_itself(section, settings, said):
    with pytest.raises(ConfigError, match=said):
        section(**settings)


def test_a_run_writes_to_the_folder_that_it_continues():
    assert CheckpointConfig(load=Path("a")).folder == Path("a")
    assert CheckpointConfig(load=Path("a"), save=Path("b")).folder == Path("b")


def test_checkpoint_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match="keep_every is 5 and keep_last is not set"):
        CheckpointConfig(keep_every=5)
    with pytest.raises(ConfigError, match="keep_last is 0"):
        CheckpointConfig(keep_last=0)
    assert CheckpointConfig().retention is None
    assert CheckpointConfig(keep_last=2, keep_every=5).retention == Retention(2, 5)
