"""Norms of each layer: under every wrapper and on any number of ranks those of one process, to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core import parallel_state
from core.base.errors import OptimizerError
from core.distributed import finalize_model_grads
from core.optimizer import get_megatron_optimizer, shard_optimizer
from core.optimizer.layer_norms import KINDS, LayerNorms, layer_of
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.optimizer._model import optimizer_config
from tests.unit.optimizer._squares import CONFIGS, build

STEPS = 3
SGD = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.7}


class Blocks(nn.Module):
    """A model whose layers' names have numbers, and whose sizes two and three ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(9, 19)
        self.blocks = nn.ModuleList(nn.Linear(19, 19) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 7))
        self.head = nn.Linear(19, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return (self.head(x) * self.scale).square().mean()


LAYERS = ["scale", "embed", "blocks.0", "blocks.1", "head"]


def _batch(step: int) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(step))


def _norms_of_steps(wrapper: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    torch.manual_seed(3)
    model, optimizer = build(Blocks, wrapper, 1, {"lr": 0.05, "weight_decay": 0.1} | settings)
    norms = LayerNorms(optimizer)
    found = []
    for step in range(STEPS):
        norms.is_on = step != 1
        optimizer.scale_loss(model(_batch(step))).backward()  # the same on every rank: the mean over them is exact
        if hasattr(model, "zero_grad_buffer"):
            finalize_model_grads([model])
        optimizer.step()
        optimizer.zero_grad()
        taken = norms.take()
        assert (not taken) == (step == 1)
        found += [_numbers(taken)] if taken else []
    assert norms.layers == LAYERS
    return found


def _numbers(norms: dict[str, Tensor]) -> dict[str, float]:
    return {name: norm.item() for name, norm in norms.items()}


def _by_hand(grads: dict[str, Tensor], before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    kinds = (grads, {n: after[n].double() - before[n].double() for n in before}, after)
    squares: dict[str, float] = {}
    for kind, tensors in zip(KINDS, kinds, strict=True):
        for name, tensor in tensors.items():
            key = f"{kind}/{layer_of(name)}"
            squares[key] = squares.get(key, 0.0) + tensor.double().square().sum().item()
    return {key: square**0.5 for key, square in squares.items()}


def test_norms_are_those_of_the_tensors():
    torch.manual_seed(3)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = LayerNorms(optimizer, model)
    model(_batch(0)).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    found = _numbers(norms.take())
    expected = _by_hand(grads, before, after)
    assert found.keys() == expected.keys()
    # the update is subtracted in the parameter's precision
    assert all(found[key] == pytest.approx(expected[key], rel=1e-6 if "update" in key else 1e-12) for key in found)


@pytest.mark.parametrize(
    ("wrapper", "ranks"), quick(product(CONFIGS, (2, 4)), lambda case: case[1] == 2 or case[0] == "hybrid fsdp2")
)
def test_every_wrapper_has_the_norms_of_one_process(wrapper: str, ranks: int):
    expected = _norms_of_steps("serial", {})
    for of_rank in run_distributed(_norms_of_steps, ranks, wrapper, {}):
        assert of_rank == expected


def test_norms_of_muon_are_those_of_one_process():
    settings = {"optimizer": "muon", "lr": 0.02}
    expected = _norms_of_steps("serial", settings)
    assert run_distributed(_norms_of_steps, 2, "zero2", settings) == [expected, expected]


def test_norms_are_without_loss_scale_and_before_clipping():
    plain = _norms_of_steps("serial", SGD | {"clip_grad": 0.0})[0]
    scaled = _norms_of_steps("serial", SGD | {"clip_grad": 1e-3, "loss_scale": 1024.0})[0]
    grads = [key for key in plain if key.startswith("grad_norm")]
    assert {key: scaled[key] for key in grads} == {key: plain[key] for key in grads}
    assert scaled["update_norm/head"] < plain["update_norm/head"]


def _norms_under_torch(wrapper: str) -> dict[str, float]:
    torch.manual_seed(3)
    model: nn.Module = Blocks()
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = TorchDDP(model)
    elif wrapper == "fully_shard":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
    norms = LayerNorms(optimizer, wrapped)
    wrapped(_batch(0)).backward()
    optimizer.step()
    return _numbers(norms.take())


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_torchs_own_wrappers_have_them_too(wrapper: str):
    expected = _norms_under_torch("")
    assert run_distributed(_norms_under_torch, 2, wrapper) == [expected, expected]


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(Blocks().parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="SGD updates no parameter of the model whose layers are measured"):
        LayerNorms(optimizer, Blocks())


def _norms_of_a_sharded_optimizer(wrapper: str, is_reduced_by_step: bool) -> list[float]:
    torch.manual_seed(3)
    model, _ = build(Blocks, wrapper, 1, {"lr": 0.05})
    plain = torch.optim.RMSprop(model.parameters(), lr=0.05)
    norms = LayerNorms(plain if wrapper == "serial" else shard_optimizer(plain, model), model)
    model(_batch(0)).backward()
    if wrapper != "serial" and not is_reduced_by_step:
        finalize_model_grads([model])
    (plain if wrapper == "serial" else norms._optimizer).step()
    return [*_numbers(norms.take()).values()]


@pytest.mark.parametrize("is_reduced_by_step", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_an_optimizer_of_the_users_over_shards_has_them(wrapper: str, is_reduced_by_step: bool):
    expected = _norms_of_a_sharded_optimizer("serial", False)
    assert len(expected) == 3 * len(LAYERS)
    found = run_distributed(_norms_of_a_sharded_optimizer, 2, wrapper, is_reduced_by_step)
    assert found == [expected, expected]


def test_layers_are_named_after_the_first_number():
    names = ("h.0.attn.c_attn.weight", "wte.weight", "model.layers.11.mlp.0.bias", "scale")
    assert [*map(layer_of, names)] == ["h.0", "wte", "model.layers.11", "scale"]


def test_a_step_that_is_not_measured_copies_nothing():
    model = Blocks()
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    norms = LayerNorms(optimizer)
    norms.is_on = False
    model(_batch(0)).backward()
    optimizer.step()
    assert norms._before is None and norms.take() == {}


def _norms_of_halves() -> dict[str, float]:
    """Returns norms where tensor-parallel ranks have halves of a weight and a copy of a bias."""
    whole, bias = _batch(0), _batch(1)[0]
    model = nn.Linear(9, 4)
    if dist.is_initialized():
        parallel_state.initialize_model_parallel(2)
        whole = whole.chunk(2)[dist.get_rank()]
        model.weight.tensor_model_parallel = True
    model.weight.data, model.bias.data = whole, bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = LayerNorms(optimizer, model, layer=str)
    for param in model.parameters():
        param.grad = param.detach() * 3.0
    optimizer.step()
    return _numbers(norms.take())


def test_tensor_parallel_ranks_have_the_norms_of_the_whole():
    expected = _norms_of_halves()
    assert expected["grad_norm/weight"] > 0 and expected["update_norm/bias"] > 0
    assert run_distributed(_norms_of_halves, 2) == [expected, expected]
