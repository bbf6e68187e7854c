"""Steps of the whole optimizer: against torch's, under FSDP2, in low precision, and on overflow."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from core.base.errors import ConfigError, OptimizerError
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer_param_scheduler import OptimizerParamScheduler
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.optimizer._model import Model, batch, full, local, optimizer_config


def _aligned() -> nn.Sequential:
    """Every tensor fills whole vectors, so the kernels are torch's to the last bit."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_serial_run_equals_torch(name: str):
    ours, torchs = _aligned(), _aligned()
    torchs.load_state_dict(ours.state_dict())
    optimizer = get_megatron_optimizer(optimizer_config(optimizer=name, clip_grad=0.0), [ours])
    groups = [
        {"params": [p for p in torchs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in torchs.parameters() if p.ndim == 2], "weight_decay": 0.1},
    ]
    reference = (
        torch.optim.AdamW(groups, lr=0.05, fused=True)
        if name == "adam"
        else torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True)
    )
    for step in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        for model in (ours, torchs):
            model(x).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in torchs.parameters() if p.grad is not None])
        success, norm, zeros = optimizer.step()
        reference.step()
        assert success and zeros is None and norm == pytest.approx(expected.item(), rel=1e-6)
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), torchs.parameters(), strict=True))
        optimizer.zero_grad()
        reference.zero_grad()


def test_an_update_is_clipped_and_gradients_are_not():
    model = nn.Linear(16, 1, bias=False)
    start = model.weight.detach().clone()
    grad = torch.arange(16.0).view(1, 16)
    model.weight.grad = grad.clone()
    optimizer = get_megatron_optimizer(
        optimizer_config(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, lr=1.0), [model]
    )
    _, norm, _ = optimizer.step()
    assert norm == torch.tensor(math.sqrt(1240.0)).item()
    clipped = grad * (0.7 / (norm + 1e-6))
    assert torch.equal(model.weight, start - clipped)
    assert torch.equal(model.weight.grad, grad)


def test_zeros_are_counted_where_asked():
    model = nn.Linear(4, 2)
    model.weight.grad, model.bias.grad = torch.zeros(2, 4), torch.ones(2)
    assert get_megatron_optimizer(optimizer_config(log_num_zeros_in_grad=True), [model]).step()[2] == 8


def test_parameters_without_a_gradient_are_left_alone():
    model = Model()
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    untouched = model.first.weight.detach().clone()
    model(batch(0)).backward()
    model.first.weight.grad = None
    assert optimizer.step()[0]
    assert torch.equal(model.first.weight, untouched)
    assert optimizer.state_scalars()["step"] == 1
    assert optimizer.state_scalars()["step_of"] == {"first.weight": 0}


def test_zero_grad():
    model = Model()
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    model(batch(0)).backward()
    optimizer.step()
    assert all(p.main.grad is None for p in optimizer._params)  # holds no memory back
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_the_scheduler_drives_the_groups():
    model = Model()
    optimizer = get_megatron_optimizer(optimizer_config(lr=1.0), [model])
    OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 2, 10, "linear", 0.3, 0.3, 1, "constant").step(1)
    assert sorted((g["lr"], g["weight_decay"]) for g in optimizer.param_groups) == [(0.5, 0.0), (0.5, 0.3)]


def test_replaced_storage_stops_the_step():
    model = Model()
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model(batch(0)).backward()
    with pytest.raises(OptimizerError, match=r"parameter scale was replaced"):
        optimizer.step()


def _trace(name: str, sharded: bool) -> list[tuple[float | None, dict[str, Tensor]]]:
    """Trains with sharded units, or whole on each rank with gradients averaged by hand, some in `main_grad`."""
    torch.manual_seed(0)
    model, mesh, trace = Model(), init_device_mesh("cpu", (2,)), []
    for unit in (model.first, model.second, model) if sharded else ():
        fully_shard(unit, mesh=mesh)
    optimizer = get_megatron_optimizer(optimizer_config(optimizer=name), [model])
    for step in range(6):
        model(batch(step, dist.get_rank())).backward()
        if not sharded:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 2  # type: ignore[operator]
            model.first.weight.main_grad, model.first.weight.grad = model.first.weight.grad, None  # type: ignore
        _, norm, _ = optimizer.step()
        optimizer.zero_grad()
        trace.append((norm, {key: full(value) for key, value in model.state_dict().items()}))
    return trace


@pytest.mark.parametrize("name", ["adam", "sgd"])
@on_ranks(2)
def test_fsdp2_equals_replication_bitwise(name: str):
    for (norm, weights), (sharded_norm, sharded) in zip(_trace(name, False), _trace(name, True), strict=True):
        assert norm is not None and norm > 0.7  # else nothing is clipped, and the norm would not be felt
        assert norm == sharded_norm and all(torch.equal(weights[key], sharded[key]) for key in weights)


def _overflow_on_one_rank(bf16: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    precision = {"bf16": True} if bf16 else {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1}
    optimizer = get_megatron_optimizer(optimizer_config(**precision), [model])
    optimizer.scale_loss(model(batch(0))).backward()
    results = [optimizer.step()]
    before = {key: local(value).clone() for key, value in (model.state_dict() | optimizer.state_tensors()).items()}
    scalars = optimizer.state_scalars()
    optimizer.zero_grad()
    optimizer.scale_loss(model(batch(1))).backward()
    if dist.get_rank() == 1:
        local(model.first.weight.grad)[0, 0] = math.inf  # type: ignore[arg-type]
    scale_before = optimizer.get_loss_scale().item()
    results.append(optimizer.step())
    after = model.state_dict() | optimizer.state_tensors()
    return {
        "results": results,
        "untouched": all(torch.equal(before[key], local(after[key])) for key in before),
        "step": (scalars["step"], optimizer.state_scalars()["step"]),
        "scale": (scale_before, optimizer.get_loss_scale().item()),
    }


def test_overflow_on_one_rank_skips_on_all_ranks():
    ranks = run_distributed(_overflow_on_one_rank, 2, False)
    for rank in ranks:
        assert rank["results"][0][0] and rank["results"][0] == ranks[0]["results"][0]
        assert rank["results"][1] == (False, None, None)
        assert rank["untouched"]
        assert rank["step"] == (1, 1)
        assert rank["scale"] == (8.0, 4.0)


def test_non_finite_gradient_skips_without_loss_scale():
    for rank in run_distributed(_overflow_on_one_rank, 2, True):
        assert rank["results"][1] == (False, math.inf, None)
        assert rank["untouched"]
        assert rank["step"] == (1, 1)
        assert rank["scale"] == (1.0, 1.0)


def test_loss_scale_changes_no_update():
    plain, scaled = Model(), Model()
    scaled.load_state_dict(plain.state_dict())
    optimizers = [get_megatron_optimizer(optimizer_config(), [plain])]
    optimizers.append(get_megatron_optimizer(optimizer_config(loss_scale=1024.0), [scaled]))  # a power of two is exact
    for step in range(3):
        results = []
        for model, optimizer in zip((plain, scaled), optimizers, strict=True):
            optimizer.scale_loss(model(batch(step))).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
        assert results[0] == results[1]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_masters_accumulate_small_updates():
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=2.0**-10, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model])
    values = []
    for _ in range(8):  # each step is below half of bf16's spacing under 1, 2 ** -8
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        values.append(model.weight[0, 0].item())
    assert optimizer.state_tensors()["master.weight"][0, 0].item() == 1.0 - 8 * 2.0**-10
    assert values[0] == 1.0 and values[-1] == 1.0 - 2 * 2.0**-8

    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer.reload_model_params()
    assert torch.equal(optimizer.state_tensors()["master.weight"], torch.full((4, 4), 0.5))


def test_mismatched_precision_is_refused():
    with pytest.raises(ConfigError, match=r"scale is torch.float16, .*set fp16=True"):
        get_megatron_optimizer(optimizer_config(), [Model().half()])
    with pytest.raises(ConfigError, match="set bf16=True"):
        get_megatron_optimizer(optimizer_config(fp16=True), [Model().bfloat16()])


def test_module_instead_of_list_is_refused():
    with pytest.raises(ConfigError, match=r"\[model\] for a single one"):
        get_megatron_optimizer(optimizer_config(), _aligned())
