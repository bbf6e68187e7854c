"""A probe tells an elementwise optimizer from one of whole tensors, and what either keeps of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from core.base.errors import OptimizerError
from core.dist_checkpointing import load_training, save_training
from core.optimizer import shard_optimizer
from core.optimizer.main_ranges import find_main_params
from core.optimizer.torch_rule import NotElementwiseError, TorchRule
from tests.unit.optimizer._own import OPTIMIZERS, Lion

Change = Callable[[Any, Tensor, dict[str, Any]], Any]


class _Own(optim.Optimizer):
    """Updates a parameter by `change`, which may use its state."""

    def __init__(self, params: Any, change: Change) -> None:
        super().__init__(params, {"lr": 0.1})
        self.change = change
        self.made: Any = 0
        self.base = optim.AdamW(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(self, p.grad, self.state[p]) * group["lr"])


def _lamb(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad / (grad.norm() + 1e-6)


def _by_position(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad * torch.arange(grad.numel(), dtype=grad.dtype).view_as(grad)


def _noisy(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad + torch.randn_like(grad)


def _rows(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["rows"] = grad.mean(dim=tuple(range(1, grad.ndim)))
    return grad


def _norm_kept(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["norm"] = grad.norm()
    return grad


def _object_kept(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["history"] = [grad]
    return grad


def _counted_in_itself(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    own.made += 1
    return grad / own.made


def _counted_in_a_tensor(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    own.made = own.made + torch.ones(())
    return grad / own.made


def _flagged(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    own.made, first = 0.5, own.made == 0
    return grad if first else grad * 2


def _nested(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    own.base.step()
    return grad


def _counted_beside(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    own.state["all"]["k"] = own.state["all"].get("k", 0) + 1
    return grad / own.state["all"]["k"]


def _estimated(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    group = own.param_groups[0]
    group["d"] = max(group.get("d", 1e-6), float(grad.abs().sum()))
    return grad


def _limited(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad * min(1.0, 5.0 / (float(grad.norm()) + 1e-6))


def _limited_by_state(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    square = state.setdefault("square", grad.square()).lerp_(grad.square(), 0.05)
    return grad / max(1.0, float((grad.square() / (square + 1e-12)).mean().sqrt()))


def _projected(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    param = own.param_groups[0]["params"][0]
    if abs(float((param * grad).sum())) > 1e-3 * float(param.norm() * grad.norm()):
        return grad
    return grad - param * (param * grad).sum() / param.square().sum()


def _centred(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad - grad.mean(dim=(1, 2, 3), keepdim=True) if grad.dim() > 3 else grad


def _large(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad / grad.abs().max() if grad.numel() > 4096 else grad


class _Averaged(optim.SGD):
    """Has the weights of training and of evaluation in turns."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def _layers() -> Any:
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
    "averaged": (_Averaged, r"train\(\) and eval\(\) of _Averaged write parameters between steps"),
}  # fmt: skip
CHANGES: dict[str, tuple[Change, ...]] = {
    "keeps made outside of its state, which is": (_counted_in_itself, _counted_in_a_tensor, _flagged),
    "keeps base outside of its state": (_nested,),
    "keeps all outside of its state": (_counted_beside,),
    "first in d of its group": (_estimated,),
    "first in the parameter": (_limited, _limited_by_state, _projected, _centred, _large),
}
for _said, _changes in CHANGES.items():
    REFUSED |= {change.__name__: (partial(_Own, change=change), _said) for change in _changes}
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
    first, second = model[0].parameters(), model[1].parameters()
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
    mains = optimizer.param_groups[0]["params"]
    rule.update({main: torch.ones_like(main) for main in mains}, torch.tensor(True))
    main = mains[0]
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


@pytest.mark.parametrize("rate", [0.0, 1e-12, torch.tensor(0.0)])
def test_a_rate_of_zero_is_probed_as_another(rate: Any) -> None:
    model = _layers()
    optimizer = _Own(model.parameters(), _lamb)
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(NotElementwiseError):
        shard_optimizer(optimizer, model)


def _late_buffer(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["step"] = state.get("step", 0) + 1
    return grad if state["step"] < 5 else grad + state.setdefault("slow", grad.clone())


def _second_buffer(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["step"] = state.get("step", 0) + 1
    return grad if state["step"] < 2 else state.setdefault("prev", torch.zeros_like(grad)).lerp_(grad, 0.1)


def _late_key(own: Any, grad: Tensor, state: dict[str, Any]) -> Any:
    state["step"] = state.get("step", 0) + 1
    if state["step"] == 5:
        own.state["all"]["k"] = 1
    return grad


def _set_later(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1)


UNSEEN: dict[str, tuple[Callable[[Any], optim.Optimizer], int, str]] = {
    "late": (partial(_Own, change=_late_buffer), 5, "state of _Own has other kinds than at construction, slow, which"),
    "second": (partial(_Own, change=_second_buffer), 1, "state of _Own has other kinds than at construction, prev"),
    "beside": (partial(_Own, change=_late_key), 5, "state of _Own has other kinds than at construction, k, which"),
    "setting": (_set_later, 1, "SGD has other kinds than at construction, momentum_buffer, .* before shard_optimizer"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_state_that_the_probe_has_not_seen_is_not_saved(name: str) -> None:
    make, steps, said = UNSEEN[name]
    model = _layers()
    own = shard_optimizer(make(model.parameters()), model)
    if name == "setting":
        own.param_groups[0]["momentum"] = 0.9
    for _ in range(steps):
        own.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        own.step()
    with pytest.raises(OptimizerError, match=said) as caught:
        own.state_tensors()
    assert "\n" not in str(caught.value)


def test_state_of_a_frozen_parameter_is_no_hindrance() -> None:
    model = _layers()
    torchs = optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).square().sum().backward()
    torchs.step()
    model[1].requires_grad_(False)
    own = shard_optimizer(torchs, model)
    assert {name.partition(".")[2] for name in own.state_tensors()} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_a_group_of_scalars_alone_goes_on(name: str) -> None:
    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 6)).square().sum() * model.scale).backward()
        optimizer.step()

    models = [_layers(), _layers()]
    optimizers = []
    for model in models:
        model.scale = nn.Parameter(torch.tensor(2.0))
        optimizers.append(OPTIMIZERS[name]([{"params": [model.scale]}, {"params": [*model[0].parameters()]}]))
        train(model, optimizers[-1])
    train(models[0], optimizers[0])
    train(models[1], shard_optimizer(optimizers[1], models[1]))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


class _Unrated(optim.Optimizer):
    """Its rate has a name of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["rate"])


def test_groups_without_lr_are_updated() -> None:
    model = _layers()
    own = shard_optimizer(_Unrated(model.parameters(), {"rate": 0.5}), model)
    bias = model[1].bias.clone()
    model(torch.ones(2, 6)).sum().backward()
    assert own.step()[0]
    assert torch.equal(model[1].bias, bias - 1.0)


def test_a_group_of_two_precisions_has_state_of_each(tmp_path: Path) -> None:
    def build() -> Any:
        model = _layers()
        model[1].double()
        return model, shard_optimizer(optim.AdamW(model.parameters()), model)

    def train(model: Any, own: Any) -> None:
        own.zero_grad()
        model[1](model[0](torch.ones(2, 6)).double()).square().sum().backward()
        own.step()

    model, own = build()
    train(model, own)
    save_training(tmp_path, model, own, step=1)
    again, other = build()
    load_training(tmp_path, again, other)
    train(model, own)
    train(again, other)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


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
