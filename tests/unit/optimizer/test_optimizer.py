"""One step of the whole optimizer: against torch's, under FSDP2, in low precision, on overflow, and resumed."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.errors import CheckpointError, ConfigError, OptimizerError
from core.optimizer import MegatronOptimizer, OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from tests.unit._spawn import run_distributed


class Model(nn.Module):
    """Dimensions that neither two ranks nor a vector register divide; `scale` leaves the second rank nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 19)
        self.norm = nn.LayerNorm(19)
        self.second = nn.Linear(19, 7)
        self.scale = nn.Parameter(torch.ones(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        """`[b, 9]` -> a scalar."""
        return (self.second(torch.relu(self.norm(self.first(x)))) * self.scale).square().sum()


def _config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.7} | changes))


def _batch(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 9, generator=generator) * 3.0


def _aligned() -> nn.Sequential:
    """Every tensor fills whole vectors, so the kernels are torch's to the last bit."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_serial_run_is_torchs(name: str):
    ours, torchs = _aligned(), _aligned()
    torchs.load_state_dict(ours.state_dict())
    optimizer = get_megatron_optimizer(_config(optimizer=name, clip_grad=0.0), [ours])
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
        wanted = torch.nn.utils.get_total_norm([p.grad for p in torchs.parameters() if p.grad is not None])
        success, norm, zeros = optimizer.step()
        reference.step()
        assert success and zeros is None and norm == pytest.approx(wanted.item(), rel=1e-6)
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), torchs.parameters(), strict=True))
        optimizer.zero_grad()
        reference.zero_grad()


def test_clipping_scales_the_gradients_once_before_the_update():
    model = nn.Linear(16, 1, bias=False)
    start = model.weight.detach().clone()
    grad = torch.arange(16.0).view(1, 16)
    model.weight.grad = grad.clone()
    optimizer = get_megatron_optimizer(_config(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, lr=1.0), [model])
    _, norm, _ = optimizer.step()
    assert norm == torch.tensor(math.sqrt(1240.0)).item()
    clipped = grad * (0.7 / (norm + 1e-6))
    assert torch.equal(model.weight.grad, clipped)
    assert torch.equal(model.weight, start - clipped)


def test_zeros_are_counted_where_asked():
    model = nn.Linear(4, 2)
    model.weight.grad, model.bias.grad = torch.zeros(2, 4), torch.ones(2)
    assert get_megatron_optimizer(_config(log_num_zeros_in_grad=True), [model]).step()[2] == 8


def test_parameters_without_a_gradient_are_left_alone():
    model = Model()
    optimizer = get_megatron_optimizer(_config(), [model])
    untouched = model.first.weight.detach().clone()
    model(_batch(0)).backward()
    model.first.weight.grad = None
    assert optimizer.step()[0]
    assert torch.equal(model.first.weight, untouched)
    assert optimizer.state_scalars()["step"] == 1
    assert optimizer.state_scalars()["step_of"] == {"first.weight": 0}


def test_zero_grad():
    model = Model()
    optimizer = get_megatron_optimizer(_config(), [model])
    model(_batch(0)).backward()
    optimizer.step()
    assert all(p.main.grad is None for p in optimizer._params)  # holds no memory back
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_the_scheduler_drives_the_groups():
    model = Model()
    optimizer = get_megatron_optimizer(_config(lr=1.0), [model])
    OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 2, 10, "linear", 0.3, 0.3, 1, "constant").step(1)
    assert sorted((g["lr"], g["weight_decay"]) for g in optimizer.param_groups) == [(0.5, 0.0), (0.5, 0.3)]


def test_replaced_storage_stops_the_step():
    model = Model()
    optimizer = get_megatron_optimizer(_config(), [model])
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model(_batch(0)).backward()
    with pytest.raises(OptimizerError, match=r"parameter scale was replaced"):
        optimizer.step()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _replicated_run(name: str, fault: str) -> list[tuple[float | None, dict[str, Tensor]]]:
    """Every rank has the model; gradients are averaged by hand, some in `main_grad`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = get_megatron_optimizer(_config(optimizer=name), [model])
    trace = []
    for step in range(6):
        model(_batch(step, dist.get_rank())).backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= 3 if fault == "scaled" else 2
        model.first.weight.main_grad, model.first.weight.grad = model.first.weight.grad, None  # type: ignore[assignment]
        _, norm, _ = optimizer.step()
        optimizer.zero_grad()
        trace.append((norm, {key: _full(value) for key, value in model.state_dict().items()}))
    return trace


def _sharded_run(name: str) -> list[tuple[float | None, dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh)
    optimizer = get_megatron_optimizer(_config(optimizer=name), [model])
    trace = []
    for step in range(6):
        model(_batch(step, dist.get_rank())).backward()
        _, norm, _ = optimizer.step()
        optimizer.zero_grad()
        trace.append((norm, {key: _full(value) for key, value in model.state_dict().items()}))
    return trace


def _differences(name: str, fault: str) -> int:
    differing = 0
    for (norm, weights), (sharded_norm, sharded) in zip(_replicated_run(name, fault), _sharded_run(name), strict=True):
        assert norm is not None and norm > 0.7  # else nothing is clipped, and the norm would not be felt
        differing += norm != sharded_norm or any(not torch.equal(weights[key], sharded[key]) for key in weights)
    return differing


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_fsdp2_equals_replication_bitwise(name: str):
    assert run_distributed(_differences, 2, name, "") == [0, 0]


def _wrapped_run(ddp_config: Any) -> tuple[list[float | None], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model = wrap_model(Model(), None, ddp_config, process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(_config(), [model])
    norms = []
    for step in range(3):
        model.zero_grad_buffer()
        model(_batch(step, dist.get_rank())).backward()
        finalize_model_grads([model])
        norms.append(optimizer.step()[1])
    weights = {key: _full(value) for key, value in model.state_dict().items()}
    return norms, weights, sorted(optimizer.state_tensors())


def _wrappers_agree() -> bool:
    norms, weights, states = _wrapped_run(DistributedDataParallelConfig())
    sharded_norms, sharded, sharded_states = _wrapped_run(TorchFullyShardedDataParallelConfig())
    assert weights.keys() == sharded.keys() and states == sharded_states
    return norms == sharded_norms and all(torch.equal(weights[key], sharded[key]) for key in weights)


def test_wrappers_train_equally_and_name_their_state_equally():
    assert run_distributed(_wrappers_agree, 2) == [True, True]


def test_a_scaled_gradient_would_be_seen():
    assert run_distributed(_differences, 2, "adam", "scaled") == [6, 6]


def _overflow_on_one_rank(bf16: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    precision = {"bf16": True} if bf16 else {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1}
    optimizer = get_megatron_optimizer(_config(**precision), [model])
    optimizer.scale_loss(model(_batch(0))).backward()
    results = [optimizer.step()]
    before = {key: _local(value).clone() for key, value in (model.state_dict() | optimizer.state_tensors()).items()}
    scalars = optimizer.state_scalars()
    optimizer.zero_grad()
    optimizer.scale_loss(model(_batch(1))).backward()
    if dist.get_rank() == 1:
        _local(model.first.weight.grad)[0, 0] = math.inf  # type: ignore[arg-type]
    scale_before = optimizer.get_loss_scale().item()
    results.append(optimizer.step())
    after = model.state_dict() | optimizer.state_tensors()
    return {
        "results": results,
        "untouched": all(torch.equal(before[key], _local(after[key])) for key in before),
        "step": (scalars["step"], optimizer.state_scalars()["step"]),
        "scale": (scale_before, optimizer.get_loss_scale().item()),
    }


def test_an_overflow_on_one_rank_makes_all_ranks_skip():
    ranks = run_distributed(_overflow_on_one_rank, 2, False)
    for rank in ranks:
        assert rank["results"][0][0] and rank["results"][0] == ranks[0]["results"][0]
        assert rank["results"][1] == (False, None, None)
        assert rank["untouched"]
        assert rank["step"] == (1, 1)
        assert rank["scale"] == (8.0, 4.0)


def test_a_gradient_that_is_not_finite_is_skipped_without_a_loss_scale():
    for rank in run_distributed(_overflow_on_one_rank, 2, True):
        assert rank["results"][1] == (False, math.inf, None)
        assert rank["untouched"]
        assert rank["step"] == (1, 1)
        assert rank["scale"] == (1.0, 1.0)


def test_the_loss_scale_leaves_no_trace():
    plain, scaled = Model(), Model()
    scaled.load_state_dict(plain.state_dict())
    optimizers = [get_megatron_optimizer(_config(), [plain])]
    optimizers.append(get_megatron_optimizer(_config(loss_scale=1024.0), [scaled]))  # a power of two is exact
    for step in range(3):
        results = []
        for model, optimizer in zip((plain, scaled), optimizers, strict=True):
            optimizer.scale_loss(model(_batch(step))).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
        assert results[0] == results[1]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_masters_keep_what_low_precision_would_lose():
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


def _train(model: nn.Module, optimizer: MegatronOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.scale_loss(model(_batch(step).to(next(model.parameters()).dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", ["state_tensors", "state_dict"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, dtype: torch.dtype, way: str):
    low = dtype == torch.float16
    config = _config(optimizer=name, fp16=low, initial_loss_scale=64.0, loss_scale_window=2)
    model = Model().to(dtype)
    optimizer = get_megatron_optimizer(config, [model])
    _train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_tensors(), optimizer.state_scalars()))
    saved_dict = copy.deepcopy(optimizer.state_dict())
    kinds = ["exp_avg", "exp_avg_sq"] if name == "adam" else ["momentum_buffer"]
    kinds += ["master"] if low else []
    assert list(saved[1]) == [f"{kind}.{key}" for key, _ in model.named_parameters() for kind in kinds]
    _train(model, optimizer, range(3, 6))

    resumed = Model().to(dtype)
    fresh = get_megatron_optimizer(config, [resumed])
    if way == "state_tensors":
        for key, tensor in fresh.state_tensors().items():
            tensor.copy_(saved[1][key])
        if not low:
            resumed.load_state_dict(saved[0])  # in low precision the masters bring the parameters with them
        fresh.load_state_scalars(saved[2])
    else:
        resumed.load_state_dict(saved[0])
        fresh.load_state_dict(saved_dict)
    assert all(torch.equal(value, saved[0][key]) for key, value in resumed.state_dict().items())
    _train(resumed, fresh, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    assert fresh.state_scalars() == optimizer.state_scalars()


def test_state_of_another_model_is_refused():
    optimizer = get_megatron_optimizer(_config(), [Model()])
    with pytest.raises(CheckpointError, match=r"does not have: third.weight"):
        optimizer.load_state_scalars({"step": 1, "step_of": {"third.weight": 2}, "grad_scaler": {}})
    half = get_megatron_optimizer(_config(), [Model().bfloat16()])
    with pytest.raises(CheckpointError, match=r"masters are on one side only for first.bias, first.weight"):
        optimizer.load_state_dict(half.state_dict())


def test_a_precision_that_contradicts_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"scale is torch.float16, .*set fp16=True"):
        get_megatron_optimizer(_config(), [Model().half()])
    with pytest.raises(ConfigError, match="set bf16=True"):
        get_megatron_optimizer(_config(fp16=True), [Model().bfloat16()])


def test_a_module_in_place_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"\[model\] for a single one"):
        get_megatron_optimizer(_config(), _aligned())


def _sharded_state() -> tuple[list[str], bool, int]:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = get_megatron_optimizer(_config(), [model])
    _train(model, optimizer, range(1))
    model(_batch(1)).backward()
    model.unshard()  # the module now shows gathered parameters in place of those that were given to the optimizer
    optimizer.step()
    model.reshard()
    tensors = optimizer.state_tensors()
    shapes = all(tensors[f"exp_avg.{name}"].shape == param.shape for name, param in model.named_parameters())
    first = optimizer._params[0]
    shared = _local(tensors[f"exp_avg.{first.name}"]).data_ptr()
    assert shared == optimizer.optimizer.state[first.main]["exp_avg"].data_ptr()
    return [key for key in tensors if key.endswith("scale")], shapes, optimizer.state_scalars()["step"]


def test_sharded_state_is_seen_as_the_whole_models_on_every_rank():
    wanted = (["exp_avg.scale", "exp_avg_sq.scale"], True, 2)  # also where a rank holds nothing of `scale`
    assert run_distributed(_sharded_state, 2) == [wanted] * 2
