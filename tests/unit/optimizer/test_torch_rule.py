"""A probe tells an elementwise optimizer from one of whole tensors, and what either keeps of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from core.base.errors import OptimizerError
from core.optimizer import shard_optimizer
from core.optimizer.main_ranges import find_main_params
from core.optimizer.torch_rule import NotElementwiseError, TorchRule
from tests.unit.optimizer._own import OPTIMIZERS, Lion


class _Own(optim.Optimizer):
    """Updates a parameter by `change`, which may use its state."""

    def __init__(self, params: Any, change: Callable[[Any, Tensor, dict[str, Any]], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.change = change
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(self, p.grad, self.state[p]) * group["lr"])


def _lamb(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad / (grad.norm() + 1e-6)


def _by_position(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad * torch.arange(grad.numel(), dtype=grad.dtype).view_as(grad)


def _noisy(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad + torch.randn_like(grad)


def _rows(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["rows"] = grad.mean(dim=tuple(range(1, grad.ndim)))
    return grad


def _norm_kept(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["norm"] = grad.norm()
    return grad


def _object_kept(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["history"] = [grad]
    return grad


def _counted_in_itself(own: Any, grad: Tensor, state: dict[str, Any]) -> Tensor:
    own.made += 1
    return grad / own.made


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))


REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "LBFGS": (optim.LBFGS, r"LBFGS cannot update a part of a parameter alone \(TypeError.*closure"),
    "Adafactor": (optim.Adafactor, r"Adafactor cannot update a part of a parameter alone"),
    "fused": (lambda params: optim.AdamW(params, fused=True), "leave out fused=True, whose kernels on CPUs"),
    "LAMB": (lambda params: _Own(params, _lamb), "_Own is not elementwise: .* first in the parameter"),
    "by position": (lambda params: _Own(params, _by_position), "first in the parameter"),
    "noisy": (lambda params: _Own(params, _noisy), "first in the parameter"),
    "rows": (lambda params: _Own(params, _rows), "keeps rows, which is neither a number of each parameter nor"),
    "norm": (lambda params: _Own(params, _norm_kept), "first in norm"),
    "object": (lambda params: _Own(params, _object_kept), "keeps history, which is neither a number"),
    "counter": (lambda params: _Own(params, _counted_in_itself), "keeps made outside of its state, which is neither"),
}  # fmt: skip
if hasattr(optim, "Muon"):
    REFUSED["Muon"] = (
        lambda params: optim.Muon([p for p in params if p.ndim == 2]),
        r"Muon cannot update a part of a parameter alone .* or Muon by get_megatron_optimizer",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused_in_one_line(name: str) -> None:
    make, said = REFUSED[name]
    model = _layers()
    optimizer = make(model.parameters())
    before = [list(group["params"]) for group in optimizer.param_groups]
    random = torch.get_rng_state()
    with pytest.raises(NotElementwiseError, match=said) as caught:
        shard_optimizer(optimizer, model)
    assert "\n" not in str(caught.value) and "take an elementwise one" in str(caught.value)
    for group, params in zip(optimizer.param_groups, before, strict=True):
        assert all(one is other for one, other in zip(group["params"], params, strict=True)), "it is as before"
    assert torch.equal(torch.get_rng_state(), random)


def test_a_late_group_that_is_refused_leaves_the_others() -> None:
    model = _layers()
    first, second = model[0].parameters(), model[1].parameters()  # type: ignore[index]
    own = shard_optimizer(optim.AdamW(first), model)
    with pytest.raises(NotElementwiseError):
        own.add_param_group({"params": second, "fused": True})
    assert len(own.param_groups) == 1 and len(own.main_params) == 2


KEPT = {
    "AdamW": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "NAdam": ({"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    "ASGD": ({"ax"}, {"step", "eta", "mu"}),
    "SGD": ({"momentum_buffer"}, set()),
    "Lion": ({"m"}, set()),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_is_known_before_the_first_step(name: str, dtype: torch.dtype) -> None:
    model = _layers().to(dtype)
    optimizer = OPTIMIZERS[name]([{"params": model.parameters()}])
    rule = TorchRule(optimizer, find_main_params(name, list(model.parameters()), [model]))
    tensors, numbers = KEPT[name]
    for main in optimizer.param_groups[0]["params"]:
        kept = rule.state_of(main)
        assert kept.keys() == tensors and rule.numbers_of(main) is None
        assert all(value.shape == main.shape and value.dtype == dtype for value in kept.values())
        main.grad = torch.ones_like(main)
    rule.update(torch.tensor(True))
    main = optimizer.param_groups[0]["params"][0]
    assert (rule.numbers_of(main) or {}).keys() == numbers
    state, kept_numbers = dict(optimizer.state[main]), rule.numbers_of(main)
    rule.set_numbers(main, None)
    assert main not in optimizer.state
    for kind, value in rule.state_of(main).items():
        value.copy_(state[kind])
    rule.set_numbers(main, kept_numbers)
    again = optimizer.state[main]
    assert again.keys() == {kind for kind, value in state.items() if value is not None}
    for kind, value in again.items():
        assert type(value) is type(state[kind]) and torch.equal(torch.as_tensor(value), torch.as_tensor(state[kind]))


def test_a_rate_of_zero_is_probed_as_another() -> None:
    model = _layers()
    optimizer = _Own(model.parameters(), _lamb)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(NotElementwiseError):
        shard_optimizer(optimizer, model)


def test_scalars_of_a_model_have_state_of_their_own() -> None:
    model = _layers()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    alone, own = _layers(), shard_optimizer(OPTIMIZERS["Adagrad"]([{"params": model.parameters()}]), model)
    alone.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    torchs = OPTIMIZERS["Adagrad"]([{"params": alone.parameters()}])
    for one, optimizer in ((model, own), (alone, torchs)):
        for _ in range(3):
            optimizer.zero_grad()
            (one(torch.ones(2, 6)).square().sum() * one.scale).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    assert own.state_tensors()["sum.scale"].shape == ()


def test_groups_of_torchs_named_parameters_work() -> None:
    model = _layers()
    own = shard_optimizer(Lion(model.named_parameters()), model)
    own.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    assert own.step()[0]
    with pytest.raises(OptimizerError, match="Lion updates shards already"):
        shard_optimizer(own.optimizer, model)
