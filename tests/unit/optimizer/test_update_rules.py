"""AdamW and SGD are torch's, bit for bit where a tensor fills whole vectors, and never show how it was cut."""

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.optimizer import update_rules
from core.optimizer.update_rules import SGD, AdamW, SkippableRule, ensure_state

RULES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda params: AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sgd without momentum": lambda params: SGD(params, lr=1e-2, momentum=0.0, weight_decay=0.1),
}
TORCHS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.AdamW(
        params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    ),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd without momentum": lambda params: torch.optim.SGD(params, lr=1e-2, weight_decay=0.1, fused=True),
}
SHAPES = [(1,), (15,), (16,), (17,), (1003,), (3, 5), (7, 33), (17, 31), (33, 48), (6, 1024)]


def _train(make: Callable, starts: list[Tensor], grads: list[list[Tensor | None]]) -> list[Tensor]:
    params = [start.clone() for start in starts]
    rule = make(params)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = None if grad is None else grad.clone()
        rule.step()
    return params


def _cut(tensor: Tensor, rows: int) -> list[Tensor]:
    return [tensor[:rows].clone(), tensor[rows:].clone()]


@pytest.mark.parametrize("name", RULES)
def test_update_equals_torch(name: str):
    starts = [torch.randn(5, 32), torch.randn(48), torch.randn(16)]
    grads: list[list[Tensor | None]] = [[torch.randn_like(start) for start in starts] for _ in range(4)]
    grads[1][0] = grads[2][2] = None  # a parameter's step count does not move without a gradient
    ours, torchs = _train(RULES[name], starts, grads), _train(TORCHS[name], starts, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RULES)
def test_sharded_update_is_bitwise(name: str, device: str):
    chooser = random.Random(0)
    starts = [torch.randn(shape, device=device) for shape in SHAPES]
    grads = [[torch.randn_like(start) * 10.0 ** chooser.randint(-6, 1) for start in starts] for _ in range(5)]
    cuts = [chooser.randint(0, shape[0]) for shape in SHAPES]  # pieces of no element included

    def cut_all(tensors: list[Tensor]) -> list[Tensor]:
        return [piece for tensor, rows in zip(tensors, cuts, strict=True) for piece in _cut(tensor, rows)]

    whole = _train(RULES[name], starts, grads)
    pieces = _train(RULES[name], cut_all(starts), [cut_all(step) for step in grads])
    assert all(torch.equal(a, b) for a, b in zip(cut_all(whole), pieces, strict=True))


def test_noncontiguous_tensor_is_updated_in_place():
    start, grads = torch.randn(7, 5), [[torch.randn(7, 5)] for _ in range(3)]
    transposed = start.t().contiguous().t()
    assert not transposed.is_contiguous()
    rule = RULES["adam"]([transposed])
    for (grad,) in grads:
        transposed.grad = grad.clone()
        rule.step()
    assert torch.equal(transposed, _train(RULES["adam"], [start], grads)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_state_created_ahead_changes_nothing(name: str):
    start, grad = torch.randn(21), torch.randn(21)
    param = start.clone()
    rule = RULES[name]([param])
    for state_name in rule.state_names:  # type: ignore[attr-defined]
        assert not ensure_state(rule, param, rule.state_names)[state_name].any()  # type: ignore[attr-defined]
    param.grad = grad
    rule.step()
    assert torch.equal(param, _train(RULES[name], [start], [[grad]])[0])
    assert rule.numbers_of(param) == {"step": 1}  # type: ignore[attr-defined]


def _update_all(rule: SkippableRule, params: list[Tensor], grads: list[Tensor], factor: Tensor | None) -> list[Tensor]:
    """Makes an update from gradients in bf16, and returns the weights in bf16 that it has written."""
    weights = {p: torch.full_like(p, 7.0, dtype=torch.bfloat16) for p in params}
    left = dict(weights)
    rule.update(dict(zip(params, grads, strict=True)), torch.tensor(True), factor, left)
    assert not left and all(p.grad is None for p in params)
    return list(weights.values())


@pytest.mark.parametrize("factor", [None, torch.tensor(0.3, dtype=torch.float64)], ids=["whole", "clipped"])
@pytest.mark.parametrize("name", RULES)
def test_chunks_have_the_bits_of_separate_passes(name: str, factor: Tensor | None, monkeypatch: pytest.MonkeyPatch):
    """Long tensors are cut, short ones share a chunk, one that is not contiguous stays whole."""
    monkeypatch.setattr(update_rules, "CHUNK_ELEMENTS", 64)
    starts = [torch.randn(shape) for shape in SHAPES] + [torch.randn(90, 7).t()]
    steps = [[torch.randn_like(start).bfloat16() for start in starts] for _ in range(3)]
    params = [start.clone() for start in starts]
    rule = RULES[name](params)
    assert isinstance(rule, SkippableRule)
    for grads in steps:
        before = [grad.clone() for grad in grads]
        weights = _update_all(rule, params, grads, factor)
        assert all(map(torch.equal, grads, before))
    times = 1.0 if factor is None else factor.float()
    passes = _train(RULES[name], starts, [[grad.float() * times for grad in grads] for grads in steps])
    assert all(map(torch.equal, params, passes))
    assert all(torch.equal(weight, param.bfloat16()) for weight, param in zip(weights, passes, strict=True))


class _MostBytes(TorchDispatchMode):
    """The most bytes that are alive at once of the tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            nbytes = result.nbytes
            self.alive += nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(result, self._free, nbytes)
        return result

    def _free(self, nbytes: int) -> None:
        self.alive -= nbytes


def test_no_second_copy_of_the_gradients_is_allocated():
    params = [torch.randn(4 * update_rules.CHUNK_ELEMENTS) for _ in range(3)]
    rule = RULES["adam"](params)
    assert isinstance(rule, SkippableRule)
    grads, factor = [torch.randn_like(p).bfloat16() for p in params], torch.tensor(0.5, dtype=torch.float64)
    _update_all(rule, params, grads, factor)  # makes the state
    with _MostBytes() as counted:
        rule.update(dict(zip(params, grads, strict=True)), torch.tensor(True), factor, {})
    assert counted.most <= 2 * 4 * update_rules.CHUNK_ELEMENTS  # a chunk, and the one before


def test_a_skipped_update_writes_the_same_weights():
    param, grad = torch.randn(100), torch.full((100,), torch.inf).bfloat16()
    before, weight = param.clone(), torch.zeros(100, dtype=torch.bfloat16)
    rule = RULES["adam"]([param])
    assert isinstance(rule, SkippableRule)
    rule.update({param: grad}, torch.tensor(False), torch.tensor(1.0, dtype=torch.float64), {param: weight})
    assert torch.equal(param, before) and torch.equal(weight, before.bfloat16())
    assert not rule.state[param]["exp_avg"].any()
