"""Settings: local facts in each section, facts across them in `validate`, and JSON there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core.base.errors import ConfigError, ParallelConfigError
from core.training.config import PretrainConfig, validate
from tests.unit.training._configs import small_config


def test_json_there_and_back_gives_equal_settings():
    for changes in ({}, {"use_torch_fsdp2": True, "save": Path("runs/x"), "bf16": True, "data_path": Path("c")}):
        config = small_config(**changes)
        restored = PretrainConfig.from_json(json.loads(json.dumps(config.to_json())))
        assert restored == config
        assert type(restored.ddp) is type(config.ddp)
        assert restored.model.params_dtype is torch.float32


def test_json_of_another_version_is_refused():
    values = small_config().to_json()
    values["run"]["no_such_field"] = 1
    with pytest.raises(ConfigError, match="no_such_field"):
        PretrainConfig.from_json(values)
    del values["run"]
    with pytest.raises(ConfigError, match="run"):
        PretrainConfig.from_json(values)


def test_batch_sizes_follow_from_the_number_of_ranks():
    config = small_config(global_batch_size=16, tensor_model_parallel_size=2)
    assert config.data_parallel_size(8) == 4
    assert config.num_microbatches(8) == 2
    assert small_config().global_batch_size(8) == 16
    assert small_config().num_microbatches(8) == 1


STAGES = {"num_layers": 4, "pipeline_model_parallel_size": 2}
VIRTUAL = STAGES | {"virtual_pipeline_model_parallel_size": 2}
REPRODUCIBLE = {"reproducible_across_ranks": True, "global_batch_size": 24}


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ({"tensor_model_parallel_size": 2}, 3, "3 ranks do not divide .* = 2"),
        ({"context_parallel_size": 3, "seq_length": 12}, 2, "2 ranks do not divide .* = 3"),
        (
            STAGES | {"num_layers_per_virtual_pipeline_stage": 3},
            2,
            "stage 3 x pipeline_model_parallel_size 2 does not",
        ),
        (
            STAGES | {"pipeline_parallel_schedule": "Interleaved1F1B"},
            2,
            "takes 2 or more for virtual_pipeline_model_parallel_size",
        ),
        (VIRTUAL | {"global_batch_size": 10}, 2, "5 micro-batches do not divide into rounds of the 2 pipeline ranks"),
        (REPRODUCIBLE, 3, "which 3 data-parallel ranks cannot share; use 1, 2, 4 of them"),
        (REPRODUCIBLE, 8, "which 8 data-parallel ranks cannot share; use 1, 2, 4 of them"),
        ({"global_batch_size": 6}, 2, "global_batch_size 6 .* 4 or 8"),
        ({"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 2}, 3, "instances 2 does not divide the 3"),
        (
            {"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 2, "context_parallel_size": 2},
            2,
            "instances 2 does not divide the 1 ",
        ),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 9},
            3,
            "(?s)3 ranks do not divide.*seq_length 9 is split into 2 parts",
        ),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 9},
            2,
            "seq_length 9 is split into 2 parts .*; take 8 or 10",
        ),
        ({"context_parallel_size": 2, "seq_length": 6}, 2, "seq_length 6 is split into 4 parts .*; take 4 or 8"),
        (
            {"tensor_model_parallel_size": 2, "vocab_size": 61, "make_vocab_size_divisible_by": 1},
            2,
            "pads the vocabulary of 61 to a size that tensor_model_parallel_size 2 does not divide; take 2",
        ),
    ],
)
def test_sizes_that_do_not_divide(changes, world_size, said):
    with pytest.raises(ParallelConfigError, match=said):
        validate(small_config(**changes), world_size)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_position_embeddings": 4}, "seq_length 8 exceeds max_position_embeddings 4"),
        ({"loss_scale": 2.0}, "loss_scale 2.0 .* without fp16"),
        ({"lr": None}, "lr is not set"),
        (VIRTUAL | {"pipeline_parallel_schedule": "ZBVZeroBubble"}, "puts the first and the last stage on one rank"),
        ({"reproducible_across_ranks": True}, "global_batch_size is not, which is then one micro-batch a rank"),
        (REPRODUCIBLE | {"data_parallel_random_init": True}, "data_parallel_random_init by rank; drop the latter"),
        ({"fp16": True, "check_for_nan_in_grad": True}, "check_for_nan_in_grad .* fp16 .* loss_scale"),
        ({"reset_attention_mask": True, "attention_backend": "fused"}, "attention_backend .* 'auto' and 'flash'"),
        ({"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "no_shard"}, "use_torch_fsdp2 .* no_shard"),
        ({"lr_decay_samples": 8}, "lr_decay_samples is set in a run with train_iters; write lr_decay_iters instead"),
        (
            {"train_iters": None, "train_samples": 8, "lr_warmup_iters": 1},
            "lr_warmup_iters is set in a run with train_samples; write lr_warmup_samples instead",
        ),
        ({"train_iters": None, "train_samples": 1}, "train_samples 1 is below one global batch"),
        (
            {"reproducible_across_ranks": True, "rampup_batch_size": (2, 2, 8), "global_batch_size": 4},
            "reproducible_across_ranks needs batches of one size",
        ),
    ],
)
def test_settings_that_contradict_each_other(changes, said):
    with pytest.raises(ConfigError, match=said):
        validate(small_config(**changes), 1)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        validate(small_config(lr=None, max_position_embeddings=4, global_batch_size=3), 1)
    assert len(str(caught.value).splitlines()) == 3
    assert not isinstance(caught.value, ParallelConfigError)


def test_a_valid_run_passes():
    validate(small_config(), 1)
    validate(small_config(fp16=True, loss_scale=2.0, check_for_nan_in_grad=True), 1)
    validate(small_config(use_torch_fsdp2=True, fp16=True, loss_scale=2.0, global_batch_size=16), 2)


def test_all_sizes_that_ranks_do_not_divide_are_one_error():
    with pytest.raises(ParallelConfigError) as caught:
        small_config(
            tensor_model_parallel_size=4,
            context_parallel_size=2,
            sequence_parallel=True,
            num_attention_heads=6,
            num_query_groups=3,
            kv_channels=8,
            ffn_hidden_size=30,
            seq_length=30,
            make_vocab_size_divisible_by=6,
        )
    for said in (
        "num_attention_heads 6 cannot be split over tensor_model_parallel_size 4; take 4 or 8",
        "num_query_groups 3 cannot be split over tensor_model_parallel_size 4, nor its ranks over the groups; take 2",
        "ffn_hidden_size 30 cannot be split over tensor_model_parallel_size 4; take 28 or 32",
        "seq_length 30 is split into 8 parts by context_parallel_size 2 and sequence_parallel True; take 24 or 32",
        "make_vocab_size_divisible_by 6 pads any vocabulary to a size that tensor_model_parallel_size 4 does not",
    ):
        assert said in str(caught.value)


def test_a_hidden_size_not_divided_by_heads_is_in_the_same_error():
    with pytest.raises(ConfigError, match=r"(?s)hidden_size of 14 or 21, or give kv_channels.*take 4 or 8"):
        small_config(num_attention_heads=7, context_parallel_size=2, seq_length=6)
