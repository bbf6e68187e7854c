"""`nvfsdp_strategy_parallelize`: each option has an effect, or warns once that it has none here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from core.adapters.nemo import get_hf_tp_shard_plan, nvfsdp_strategy_parallelize
from core.base.errors import ParallelConfigError, ShardstackError, WrapError, warn_once
from core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel, finalize_model_grads
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.distributed._hugging_face import assert_close, hugging_face_model, serial_gradients, token_batches
from tests.unit.distributed._hugging_face import loss_of as loss_with_labels
from tests.unit.distributed._toys import batches, full, gradients, loss_of, oracle, toy

BLOCK = "tests.unit.distributed._toys.Block"


def _wrapped(model: Any = None, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
    return nvfsdp_strategy_parallelize(toy() if model is None else model, mesh, **options)


def _step(model: Any, num_tokens: float | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad_buffer()
    steps = batches(dist.get_rank())
    for index, tokens in enumerate(steps):
        with torch.enable_grad() if index == len(steps) - 1 else model.no_sync():
            loss_of(model, tokens).backward()
    if num_tokens is None:
        model.finish_grad_sync()
    else:
        finalize_model_grads([model], num_tokens)
    return gradients(model)


@on_ranks(2)
def test_names_and_numbers_choose_a_wrapper_equal_to_the_oracle() -> None:
    numbers = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for number, name in enumerate(numbers):
        for asked in (number, name):
            model = _wrapped(data_parallel_sharding_strategy=asked)
            assert type(model) is (TorchFullyShardedDataParallel if number == 3 else DistributedDataParallel)
            assert model.ddp_config.sharding_strategy == name
            names = [n.removeprefix("module.") for n, _ in model.named_parameters()]
            assert names == [n for n, _ in toy().named_parameters()]
            assert bool(model.ddp_config.overlap_param_gather) == (number in (1, 2))
            found = _step(model)
            assert all(torch.equal(found[n], g) for n, g in oracle().items())


def _warns(message: str, **options: Any) -> Any:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=message):
        model = _wrapped(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _wrapped(**{k: v for k, v in options.items() if k != "model"})  # a second time it is silent
    return model


@on_ranks(2)
def test_every_option_acts_or_warns_once() -> None:
    assert len([m for m in _wrapped().modules() if isinstance(m, FSDPModule)]) == 1
    assert len([m for m in _wrapped(nvfsdp_unit_modules=[BLOCK]).modules() if isinstance(m, FSDPModule)]) == 3
    for name in ("keep_fp8_transpose_cache_when_using_custom_fsdp", "fsdp_double_buffer"):
        _warns(f"{name}=True changes nothing", **{name: True})
    assert _warns("nccl_ub is set", nccl_ub=True).plan.settings.nccl_ub  # gloo registers none
    _warns("nccl_ub=True changes nothing", nccl_ub=True, data_parallel_sharding_strategy="optim")
    _warns("overlap_grad_reduce=False changes nothing: FSDP2", overlap_grad_reduce=False)
    _warns("a unit is the bucket", disable_bucketing=True)
    _warns("init_nvfsdp_with_meta_device=True changes nothing", init_nvfsdp_with_meta_device=True)
    _warns("always keeps fp32 masters", preserve_fp32_weights=True, data_parallel_sharding_strategy="optim")
    assert (
        _warns("runs as", data_parallel_sharding_strategy="params").ddp_config.sharding_strategy
        == "optim_grads_params"
    )
    assert _wrapped(overlap_param_gather=False).ddp_config.forward_prefetch == 0
    buffered = {"data_parallel_sharding_strategy": "optim"}
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        assert getattr(_wrapped(**buffered, **{name: False}).ddp_config, name) is False
    assert _warns("average_in_collective", **buffered, average_in_collective=True).ddp_config.shards_updates
    with torch.device("meta"):
        on_meta = torch.nn.Sequential(torch.nn.Linear(3, 3))
    assert not any(p.is_meta for p in _wrapped(on_meta, init_nvfsdp_with_meta_device=True).parameters())

    half = toy().bfloat16()
    assert next(_wrapped(toy().bfloat16()).parameters()).dtype == torch.bfloat16
    kept = _wrapped(half, preserve_fp32_weights=True)
    assert {p.dtype for p in kept.parameters()} == {torch.float32}
    reduced = _wrapped(toy().bfloat16(), data_parallel_sharding_strategy="optim", grad_reduce_in_fp32=True)
    assert reduced.buffers[0].grad_dtype == torch.float32

    per_token = _wrapped(calculate_per_token_loss=True)
    assert _step(per_token, 12.0).keys() == oracle().keys()
    checks = _wrapped()
    with torch.no_grad():
        next(checks.parameters()).to_local().fill_(torch.nan)
    with pytest.raises(ShardstackError, match="is not finite"):
        _step(checks)
    unchecked = _wrapped(check_for_nan_in_grad=False)
    with torch.no_grad():
        next(unchecked.parameters()).to_local().fill_(torch.nan)
    _step(unchecked)


@on_ranks(2)
def test_what_does_not_fit_is_named() -> None:
    for message, options in {
        "'optim_grad'; did you mean 'optim_grads'": {"data_parallel_sharding_strategy": "optim_grad"},
        "is 4; .*or a number from 0 to 3": {"data_parallel_sharding_strategy": 4},
        "does not import": {"nvfsdp_unit_modules": ["tests.unit.distributed._toys.Blok"]},
        "has no module of it; did you mean .Linear.. it takes one of": {"nvfsdp_unit_modules": ["torch.nn.Bilinear"]},
    }.items():
        with pytest.raises((ParallelConfigError, WrapError), match=message):
            _wrapped(**options)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ParallelConfigError, match="there is no tp_shard_plan"):
        nvfsdp_strategy_parallelize(toy(), mesh)
    with pytest.raises(ParallelConfigError, match="flat buffers take no DTensors"):
        nvfsdp_strategy_parallelize(toy(), mesh, data_parallel_sharding_strategy="optim")
    with pytest.raises(WrapError, match="already"):
        _wrapped(_wrapped())


@needs("transformers")
@on_ranks(2)
def test_tensor_parallel_and_hybrid_meshes():
    model = hugging_face_model("llama")
    expected = serial_gradients(hugging_face_model("llama"), 1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    wrapped = nvfsdp_strategy_parallelize(model, mesh, tp_shard_plan=get_hf_tp_shard_plan(model))
    assert isinstance(wrapped.module.lm_head.weight, DTensor)
    prompt, options = torch.tensor([[2, 3]]), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), hugging_face_model("llama").generate(prompt, **options))
    loss_with_labels(wrapped, token_batches(1)[0]).backward()
    wrapped.finish_grad_sync()
    assert_close({n: full(p.grad) for n, p in model.named_parameters()}, expected, 3e-6)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        replicas = nvfsdp_strategy_parallelize(toy(), mesh, data_parallel_sharding_strategy=strategy)
        found = _step(replicas)
        assert all(torch.equal(found[n], g) for n, g in oracle().items()), strategy
