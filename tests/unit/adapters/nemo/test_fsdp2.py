"""`fsdp2_strategy_parallelize`: real Hugging Face models, sharded in every way, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from core import parallel_state
from core.adapters.nemo import fsdp2_strategy_parallelize, get_hf_tp_shard_plan
from core.base.errors import ParallelConfigError, ShardstackError, WrapError, warn_once
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters._adapters import Net, batch
from tests.unit.distributed._hugging_face import (
    KINDS,
    assert_close,
    hugging_face_model,
    loss_of,
    serial_gradients,
    token_batches,
)
from tests.unit.distributed._toys import full, toy

pytestmark = needs("transformers")

FP32 = MixedPrecisionPolicy()


def _gradients_and_text(kind: str, tied: bool, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    model = hugging_face_model(kind, tied)
    serial = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tp_size = dict(zip(names, shape, strict=True)).get("tp", 1)
    plan = get_hf_tp_shard_plan(model) if tp_size > 1 else None
    assert fsdp2_strategy_parallelize(model, mesh, FP32, plan) is model
    weights = {name: full(p) for name, p in model.named_parameters()}
    assert_close(weights, dict(serial.named_parameters()), 0.0)

    num_replicas = dist.get_world_size() // tp_size
    loss = loss_of(model, token_batches(num_replicas)[dist.get_rank() // tp_size])
    loss.backward()
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    # Two replicas add in one order only; more of them, and tensor parallelism, add in another.
    assert_close(found, serial_gradients(serial, num_replicas), 0.0 if dist.get_world_size() == 2 > tp_size else 3e-6)

    prompt = torch.tensor([[2, 3, 4]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), serial.generate(prompt, **options))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer="sgd", clip_grad=0.1), [model])
    _, norm, _ = optimizer.step()
    expected = torch.stack([p.grad.norm() for p in serial.parameters()]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "tied"), [*((kind, True) for kind in KINDS), ("llama", False)])
def test_sharded_gradients_text_and_norm_match_one_process(kind, tied):
    run_distributed(_gradients_and_text, 2, kind, tied, (2,), ("data_parallel",))


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False)])
def test_tensor_parallel_gradients_are_those_of_one_process(kind, tied):
    run_distributed(_gradients_and_text, 2, kind, tied, (1, 2), ("data_parallel", "tp"))


FOUR = [((2, 2), ("dp_replicate", "dp_shard")), ((2, 2), ("data_parallel", "tp")), ((2, 2), ("dp_shard", "cp"))]


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("shape", "names"), FOUR)
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_hold_the_gradients_of_one_process(kind, tied, shape, names):
    if kind == "gpt2" and "tp" in names:
        pytest.skip("GPT-2's layers are Conv1D, which torch's tensor-parallel styles do not cut")
    run_distributed(_gradients_and_text, 4, kind, tied, shape, names)


def _units(shape: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 3)])})
    model["b"] = nn.Sequential(nn.Linear(3, 3))
    holder = nn.Module()
    holder.stack, holder.head = model, nn.Linear(3, 3)
    fsdp2_strategy_parallelize(holder, mesh)
    kept = [m._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None for m in (model["b"], holder)]
    assert kept == [True, True], "the last unit and the root stay gathered"
    return [name for name, module in holder.named_modules() if isinstance(module, FSDPModule)]


def test_units_are_the_items_of_lists_and_dicts_nested_too():
    assert run_distributed(_units, 2, (2,), ("dp_cp",))[0] == ["", "stack.a.0.0", "stack.a.1", "stack.b"]


@on_ranks(2)
def test_offload_recomputation_and_default_precision_take_effect() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    tokens = token_batches(2)[dist.get_rank()]
    model = hugging_face_model("llama")
    serial = serial_gradients(copy.deepcopy(model), 2)
    fsdp2_strategy_parallelize(model, mesh, FP32, None, CPUOffloadPolicy(pin_memory=False))
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    loss_of(model, tokens).backward()
    assert_close({n: full(p.grad) for n, p in model.named_parameters()}, serial, 0.0)

    model = hugging_face_model("llama")
    fsdp2_strategy_parallelize(model, mesh, FP32, activation_checkpointing=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = loss_of(model, tokens)
    loss.backward()
    assert_close({n: full(p.grad) for n, p in model.named_parameters()}, serial, 0.0)

    half = hugging_face_model("llama")
    fsdp2_strategy_parallelize(half, mesh)  # by default bf16, reduced in fp32
    policy = half._get_fsdp_state()._fsdp_param_group.fsdp_params[0].mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    loss_of(half, tokens).backward()
    found = {n: full(p.grad) for n, p in half.named_parameters()}
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    total = torch.stack([(found[n] - serial[n]).norm() / serial[n].norm() for n in serial])
    assert 0 < total.max() < 0.2


@pytest.mark.parametrize("tp_size", [1, 2])
@on_ranks(2)
def test_a_model_on_the_meta_device_is_drawn_after_sharding(tp_size: int) -> None:
    with torch.device("meta"):
        model = hugging_face_model("llama", True)
    mesh = init_device_mesh("cpu", (2 // tp_size, tp_size), mesh_dim_names=("data_parallel", "tensor_parallel"))
    fsdp2_strategy_parallelize(model, mesh, FP32, get_hf_tp_shard_plan(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    values = {name: full(p) for name, p in model.named_parameters()}
    assert all(torch.isfinite(value).all() for value in values.values())
    assert values["model.layers.0.mlp.up_proj.weight"].std() > 0
    loss_of(model, token_batches(1)[0]).backward()


@on_ranks(2)
def test_all_start_from_the_first_ranks_values() -> None:
    model = toy(seed=dist.get_rank())
    fsdp2_strategy_parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), FP32)
    first = dict(toy(seed=0).named_parameters())
    assert all(torch.equal(full(p), first[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert all(isinstance(p, DTensor) for p in model.parameters()), "a forward without backward frees what it gathered"


@on_ranks(2)
def test_what_does_not_fit_is_named() -> None:
    def says(error: type[Exception], message: str, names: tuple[str, ...], plan: object = None) -> None:
        mesh = init_device_mesh("cpu", (1, 2)[: len(names)] if len(names) == 2 else (2,), mesh_dim_names=names)
        with pytest.raises(error, match=message):
            fsdp2_strategy_parallelize(toy(), mesh, tp_shard_plan=plan)

    says(ParallelConfigError, "axes rows, none of which is a data-parallel", ("rows",))
    says(ParallelConfigError, "2 tensor-parallel ranks, but there is no tp_shard_plan", ("dp_shard", "tp"))
    says(
        ParallelConfigError,
        r"names 'block.\*.up'.*did you mean 'blocks.\*.up'",
        ("dp", "tp"),
        {"block.*.up": ColwiseParallel()},
    )
    says(ParallelConfigError, "'colwise' for 'head'; it takes a ParallelStyle", ("dp", "tp"), {"head": "colwise"})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fsdp2_strategy_parallelize(toy(), mesh)
    with pytest.raises(WrapError, match="sharded already"):
        fsdp2_strategy_parallelize(model, mesh)


@on_ranks(2)
def test_the_norm_counts_elements_once_next_to_parallel_state() -> None:
    parallel_state.initialize_model_parallel(2)
    model = hugging_face_model("qwen3")
    serial = serial_gradients(copy.deepcopy(model), 1)
    fsdp2_strategy_parallelize(model, parallel_state.get_device_mesh(), FP32, get_hf_tp_shard_plan(model))
    loss_of(model, token_batches(1)[0]).backward()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer="sgd", clip_grad=0.1), [model])
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(torch.stack([g.norm() for g in serial.values()]).norm().item(), rel=1e-5)


@on_ranks(2)
def test_uneven_heads_and_a_plan_without_an_axis_are_named() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = hugging_face_model("llama", num_key_value_heads=1)
    with pytest.raises(ParallelConfigError, match=r"do not divide the model.s num_key_value_heads 1"):
        fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=get_hf_tp_shard_plan(model))
    warn_once.cache_clear()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.warns(UserWarning, match="tp_shard_plan has no effect on a mesh"):
        fsdp2_strategy_parallelize(toy(), mesh, tp_shard_plan={"head": ColwiseParallel()})


@on_ranks(2)
def test_a_step_without_a_reduction_raises_without_a_wrapper() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, tokens = fsdp2_strategy_parallelize(Net(), mesh, FP32), batch(0, 0, dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(ShardstackError, match="create_graph=True"):
        model(tokens).backward(create_graph=True)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(tokens).backward()
    with pytest.raises(ShardstackError, match="before the gradients of the step were reduced"):
        optimizer.step()
    model.set_requires_gradient_sync(True)
    model(tokens).backward()
    optimizer.step()
    assert any(not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
