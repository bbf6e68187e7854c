"""Random streams there and back, and which checkpoint a folder means; whole runs are in tests/functional."""

from __future__ import annotations

import random
import warnings
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.errors import CheckpointError
from core.tensor_parallel.random import get_rng_tracker
from core.training.checkpointing import (
    _MODEL_FIELDS,
    _packed,
    _rng_layout,
    _unpacked,
    _warn_of_another_order,
    check_is_run,
    find_checkpoint,
    rng_state,
    set_rng_state,
)
from core.training.initialize import seed_everything
from core.transformer.transformer_config import TransformerConfig


def draws() -> list[float]:
    with get_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [torch.rand(()).item(), tracked, random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_every_stream_goes_on_where_it_was(monkeypatch):
    # Alone in its tensor-parallel group a rank forks to the default stream only where none was added.
    seed_everything(5)
    draws()  # leaves half a pair of normal numbers in both generators that make them in pairs
    saved = rng_state()
    layout, packed = _rng_layout(saved), _packed(saved)
    expected = draws()
    assert draws() != expected
    set_rng_state(_unpacked(packed, layout))
    assert draws() == expected


def test_streams_that_follow_from_the_seed_differ_between_seeds():
    seed_everything(5)
    first = draws()
    seed_everything(6)
    assert all(a != b for a, b in zip(first, draws(), strict=True))
    seed_everything(5)
    assert draws() == first


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "x")


def test_a_run_and_one_of_its_checkpoints_can_be_meant(tmp_path):
    for name in ("iter_0000001", "iter_0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "latest").write_text("iter_0000002\n")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert find_checkpoint(tmp_path / "iter_0000001") == tmp_path / "iter_0000001"


def test_every_field_of_the_transformer_is_compared_or_changes_no_function():
    training_alone = {
        *("hidden_dropout", "attention_dropout", "init_method_std", "perform_initialization"),
        *("init_method", "output_layer_init_method"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "calculate_per_token_loss"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
        *("expert_model_parallel_size", "fp16", "bf16", "params_dtype", "gradient_accumulation_fusion"),
    }
    assert {entry.name for entry in fields(TransformerConfig)} - training_alone == set(_MODEL_FIELDS["model"])


ORDER = {"num_samples": 8, "seed": 1, "split": "1", "seq_length": 4, "corpus": "c.bin (9 bytes)", "order": "8-00"}


def test_another_order_of_samples_is_told_in_one_warning():
    state = SimpleNamespace(sample_order=ORDER | {"num_samples": 16, "seed": 2, "order": "16-01"}, consumed_samples=5)
    with pytest.warns(UserWarning, match=r"num_samples 8 -> 16, seed 1 -> 2\).* sample 5 .* repeat") as caught:
        _warn_of_another_order(ORDER, state)
    assert len(caught) == 1


def test_a_longer_run_over_the_same_order_is_told_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_another_order(ORDER, SimpleNamespace(sample_order=ORDER | {"num_samples": 9}, consumed_samples=5))


def metadata(**changed) -> dict:
    honest = {
        "iteration": 3,
        "consumed_samples": 24,
        "vocab_size": 128,
        "config": {"model": {}, "gpt": {}, "ddp": {}, "optimizer": {}},
        "optimizer": {},
        "scheduler": {},
    }
    honest |= {"model_tensors": ["model.w"], "rng_layout": [["torch", 5056]], "layout": {"ranks": 2}}
    return honest | changed


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"iteration": "3"}, "iteration"),
        ({"consumed_samples": -1}, "consumed_samples"),
        ({"layout": {"ranks": 10**12}}, "layout"),
        ({"layout": []}, "layout"),
        ({"rng_layout": [["torch", 10**15]]}, "rng_layout"),
        ({"rng_layout": [["torch"]]}, "rng_layout"),
        ({"rng_layout": 7}, "rng_layout"),
        ({"rng_layout": [["torch", 2**19]] * 100}, "rng_layout"),
        ({"config": None}, "config"),
        ({"config": {"model": {}, "ddp": {}, "optimizer": {}}}, r"config\.gpt"),
        ({"model_tensors": [["a"]]}, "model_tensors"),
    ],
)
def test_metadata_that_no_run_writes_is_refused_before_it_is_used(tmp_path, changed, named):
    check_is_run(metadata(), tmp_path)
    with pytest.raises(CheckpointError, match=f"what no pretraining run writes, under {named}; load another"):
        check_is_run(metadata(**changed), tmp_path)
    named = named.partition("\\")[0]
    with pytest.raises(CheckpointError, match=f"its metadata has no {named}"):
        check_is_run({name: value for name, value in metadata().items() if name != named}, tmp_path)
