"""Groups, seeds and schedule of a run; metadata that no run writes, of another model, or another order of samples."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from core import parallel_state
from core.base.errors import CheckpointError, ConfigError, ParallelConfigError
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
from core.models.gpt import GPTModel
from core.tensor_parallel.random import get_rng_tracker
from core.training import state
from core.training.config.arguments import parse_arguments
from core.training.launch.entry import environment_threads
from core.training.state import (
    MODEL_FIELDS,
    build_scheduler,
    check_is_run,
    check_same_model,
    initialize,
    warn_of_another_order,
)
from core.transformer.transformer_config import TransformerConfig
from core.transformer.transformer_layer import hidden_dropout
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import full
from tests.unit.training._configs import SMALL, small_config


class Groups:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]


def course(steps: int, **settings) -> tuple[list[float], list[float]]:
    """Returns learning rate and weight decay in each step."""
    groups = Groups()
    scheduler = build_scheduler(small_config(**settings), groups)
    rates, decays = [], []
    for _ in range(steps):
        rates.append(groups.param_groups[0]["lr"])
        decays.append(groups.param_groups[0]["weight_decay"])
        scheduler.step(1)
    return rates, decays


def test_the_run_is_as_long_as_the_decay_unless_given():
    assert course(5, lr=1.0, min_lr=0.5)[0] == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5])
    assert course(3, lr=1.0, lr_decay_iters=2)[0] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("warmup", [{"lr_warmup_iters": 2}, {"lr_warmup_fraction": 0.5}])
def test_a_warm_up_rises_from_its_start(warmup):
    assert course(4, lr=1.0, lr_warmup_init=0.2, **warmup)[0] == pytest.approx([0.2, 0.6, 1.0, 0.5])


def test_a_share_of_the_decay_need_not_be_whole():
    assert course(4, lr=1.0, lr_warmup_fraction=0.375)[0] == pytest.approx([0.0, 1 / 1.5, 0.8, 0.4])


def test_weight_decay_is_constant_or_goes_its_way():
    assert course(2, weight_decay=0.3)[1] == [0.3, 0.3]
    way = {"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}
    assert course(5, **way)[1] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_wsd_schedule_stays_before_it_falls():
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"}
    assert course(5, lr=1.0, **wsd)[0] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


def test_a_run_in_samples_has_its_schedule_in_samples():
    settings = {"lr": 1.0, "train_iters": None, "train_samples": 8, "lr_warmup_samples": 2, "global_batch_size": 2}
    assert course(5, **settings)[0] == pytest.approx([0.0, 0.5, 1.0, 5 / 6, 4 / 6])
    way = {"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}
    assert course(3, **settings, **way, lr_decay_samples=4)[1] == pytest.approx([0.0, 0.05, 0.1])
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 2, "lr_wsd_decay_style": "linear", "lr_warmup_samples": 0}
    assert course(8, **settings | wsd)[0] == pytest.approx([1.0] * 7 + [0.5])


def test_iterations_of_a_batch_that_grows_count_its_last_size():
    grows = {"rampup_batch_size": (2, 2, 8), "global_batch_size": 4, "train_iters": 2, "lr_warmup_iters": 1}
    assert course(9, lr=1.0, **grows)[0] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_transformer_fields_are_compared_or_change_no_function():
    training_alone = {
        *("hidden_dropout", "attention_dropout", "init_method_std", "perform_initialization"),
        *("init_method", "output_layer_init_method"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "calculate_per_token_loss"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
        *("expert_model_parallel_size", "fp16", "bf16", "params_dtype", "gradient_accumulation_fusion"),
        *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "cross_entropy_fusion_vocab_chunk_size"),
        *("attention_backend", "embedding_init_method", "embedding_init_method_std"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        *("moe_input_jitter_eps", "moe_grouped_gemm", "moe_per_layer_logging", "moe_token_dispatcher_type"),
        *("moe_enable_routing_replay", "fp8", "fp8_recipe"),
        *("virtual_pipeline_model_parallel_size", "pipeline_parallel_schedule"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        "expert_tensor_parallel_size",
    }
    assert {entry.name for entry in fields(TransformerConfig)} - training_alone == set(MODEL_FIELDS["model"])


ORDER = {"num_samples": 8, "seed": 1, "split": "1", "seq_length": 4, "corpus": "c.bin (9 bytes)", "order": "8-00"}


def test_another_number_of_experts_is_one_line(tmp_path):
    theirs, ours = small_config(num_moe_experts=4), small_config(num_moe_experts=8)
    state = SimpleNamespace(vocab_size=128)
    stored = metadata(config=theirs.to_json())
    check_same_model(stored, state, theirs, tmp_path)
    with pytest.raises(CheckpointError, match="another model: num_moe_experts 4 there and 8 here; give the") as caught:
        check_same_model(stored, state, ours, tmp_path)
    assert "\n" not in str(caught.value)


def test_another_order_of_samples_is_one_warning():
    state = SimpleNamespace(sample_order=ORDER | {"num_samples": 16, "seed": 2, "order": "16-01"}, consumed_samples=5)
    with pytest.warns(UserWarning, match=r"num_samples 8 -> 16, seed 1 -> 2\).* sample 5 .* repeat") as caught:
        warn_of_another_order(ORDER, state)
    assert len(caught) == 1


def test_a_longer_run_over_the_same_order_gets_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_another_order(ORDER, SimpleNamespace(sample_order=ORDER | {"num_samples": 9}, consumed_samples=5))


def metadata(**changed) -> dict:
    honest = {
        "iteration": 3,
        "consumed_samples": 24,
        "vocab_size": 128,
        "config": {"model": {}, "gpt": {}, "ddp": {}, "optimizer": {}},
        "optimizer": {},
        "scheduler": {},
    }
    honest |= {"model_tensors": ["model.w"], "rng_bytes": 5056, "layout": {"ranks": 2}}
    return honest | changed


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"iteration": "3"}, "iteration"),
        ({"consumed_samples": -1}, "consumed_samples"),
        ({"layout": {"ranks": 10**12}}, "layout"),
        ({"layout": []}, "layout"),
        ({"rng_bytes": 10**15}, "rng_bytes"),
        ({"rng_bytes": [5056]}, "rng_bytes"),
        ({"config": None}, "config"),
        ({"config": {"model": {}, "ddp": {}, "optimizer": {}}}, r"config\.gpt"),
        ({"model_tensors": [["a"]]}, "model_tensors"),
    ],
)
def test_metadata_that_no_run_writes_is_refused_before_use(tmp_path, changed, named):
    check_is_run(metadata(), tmp_path)
    with pytest.raises(CheckpointError, match=f"what no pretraining run writes, under {named}; load another"):
        check_is_run(metadata(**changed), tmp_path)
    named = named.partition("\\")[0]
    with pytest.raises(CheckpointError, match=f"its metadata has no {named}"):
        check_is_run({name: value for name, value in metadata().items() if name != named}, tmp_path)


def _initialized(tensor_parallel: int) -> tuple[int, int, float, float]:
    initialize(small_config(tensor_model_parallel_size=tensor_parallel, seed=7))
    with get_rng_tracker().fork():
        own = torch.rand(()).item()
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size())
    return *sizes, torch.rand(()).item(), own


def test_groups_and_seeds_follow_the_settings():
    replicated, cut = run_distributed(_initialized, 2, 1), run_distributed(_initialized, 2, 2)
    assert [ranks[:2] for ranks in replicated] == [(1, 2), (1, 2)]
    assert [ranks[:2] for ranks in cut] == [(2, 1), (2, 1)]
    assert len({ranks[2] for ranks in cut}) == 1  # what tensor-parallel ranks hold whole
    assert len({ranks[3] for ranks in cut}) == 2  # what they hold in part


@pytest.mark.parametrize("precision", [None, "highest", "high", "medium"])
@on_ranks(1)
def test_the_precision_of_products_in_fp32_is_torchs(precision: str | None) -> None:
    flags = [] if precision is None else ["--fp32-matmul-precision", precision]
    required = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
    initialize(parse_arguments([*required, *flags]))
    assert torch.get_float32_matmul_precision() == (precision or "highest")


def _first_mask_and_weights(is_random: bool, uses_fsdp2: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns what dropout leaves of ones, and the weights of a wrapped model."""
    config = small_config(seed=7, data_parallel_random_init=is_random)
    initialize(config)
    with torch.device("meta") if uses_fsdp2 else nullcontext():
        model = GPTModel(config.model, vocab_size=64, max_sequence_length=8)
    ddp_config = TorchFullyShardedDataParallelConfig() if uses_fsdp2 else DistributedDataParallelConfig()
    wrap_model(model, config.model, ddp_config)
    mask = hidden_dropout(torch.ones(64), 0.5, training=True, sequence_parallel=False)
    return mask, {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("uses_fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_replicas_drop_differently_where_asked_and_start_equal(uses_fsdp2: bool):
    (first, _), (second, _) = run_distributed(_first_mask_and_weights, 2, False, uses_fsdp2)
    assert torch.equal(first, second)
    (first, weights), (second, others) = run_distributed(_first_mask_and_weights, 2, True, uses_fsdp2)
    assert not torch.equal(first, second)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_settings_are_checked_before_anything_is_made(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ParallelConfigError, match="3 ranks do not divide"):
        initialize(small_config(tensor_model_parallel_size=2))
    assert not torch.distributed.is_initialized()


def test_processes_that_read_samples_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="num_workers is 33; it takes 0 to 32 here: 16 processes a core"):
        initialize(small_config(num_workers=33))
    assert not torch.distributed.is_initialized()


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(18)), raising=False)
    assert (environment_threads(), environment_threads(updates_on_host=True)) == (1, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as launchers set it
    assert (environment_threads(), environment_threads(updates_on_host=True)) == (1, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment_threads(updates_on_host=True) == 2


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("has_triton", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_layers_are_compiled_on_gpus_unless_the_config_says_not(kind, has_triton, asked, monkeypatch):
    monkeypatch.setattr(state.device, "device_type", lambda: kind)
    monkeypatch.setattr(state, "compiles_for_gpus", lambda: has_triton)
    config = small_config()
    config.ddp.compile_units = asked
    expected = asked if asked is not None else kind == "cuda" and has_triton
    assert state.wrapper_config(config).compile_units == expected and config.ddp.compile_units is asked
