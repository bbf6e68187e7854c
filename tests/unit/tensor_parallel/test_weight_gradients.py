"""Gradients in borrowed memory compared bitwise with torch's own, and who may not borrow."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor

from core.tensor_parallel.weight_gradients import compute_deferred, deferring, embedding, linear
from tests.unit._quick import quick

S, B, K, N = 7, 3, 33, 21


class Memory:
    """Lends one piece of memory, full of values that must not be added to, and counts how often."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.memory, self.times = torch.full_like(weight, float("nan")), 0
        weight.lend_gradient_memory = self

    def __call__(self) -> torch.Tensor:
        self.times += 1
        return self.memory.detach()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(function: Callable[..., torch.Tensor], *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    output = function(*tensors)
    upstream = numbers(*output.shape, dtype=output.dtype, seed=9)
    output.backward(upstream.transpose(0, 1).contiguous().transpose(0, 1))
    return [output, *(None if t is None else t.grad for t in tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["rows", "sequence", "strided"])
def test_linear_gradient_in_lent_memory_is_bitwise(kind, has_bias, dtype):
    shape = {"rows": (S * B, K), "sequence": (S, B, K), "strided": (B, S, K)}[kind]
    actual, expected = [], []
    for function, results in ((linear, actual), (F.linear, expected)):
        leaf = numbers(*shape, dtype=dtype).requires_grad_()
        weight = nn.Parameter(numbers(N, K, dtype=dtype, seed=2))
        bias = nn.Parameter(numbers(N, dtype=dtype, seed=3)) if has_bias else None
        memory = Memory(weight) if function is linear else None

        def call(x: torch.Tensor, *others: torch.Tensor | None, function: Callable = function) -> torch.Tensor:
            return function(x.transpose(0, 1) if kind == "strided" else x, *others)

        results += _run(call, leaf, weight, bias)
        if memory is not None:
            assert memory.times == 1 and weight.grad.data_ptr() == memory.memory.data_ptr()
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_embedding_gradient_equals_dense_rows(dtype):
    ids = torch.randint(0, 9, (S, B), generator=torch.Generator().manual_seed(4))
    gradients = []
    for function in (embedding, F.embedding):
        weight = nn.Parameter(numbers(50, K, dtype=dtype))
        if function is embedding:
            Memory(weight)
        output = function(ids, weight)
        output.backward(numbers(S, B, K, dtype=dtype, seed=9))
        gradients.append(weight.grad)
    sparse, dense = gradients
    assert sparse.is_sparse and len(sparse._values()) == len(ids.unique()) < ids.numel()
    assert torch.equal(sparse.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_gradients_of_two_forwards_add_in_one_backward(dtype):
    ids, gradients = torch.tensor([[1, 4, 1], [7, 4, 2]]), []
    for function in (embedding, F.embedding):
        weight = nn.Parameter(numbers(50, K, dtype=dtype))
        if function is embedding:
            Memory(weight)
        (function(ids[0], weight).sum() + function(ids[1], weight).sum()).backward()
        gradients.append(weight.grad.to_dense())
    assert torch.equal(*gradients)


def _asks_for_gradients(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return torch.autograd.grad(linear(x, weight).square().sum(), weight)[0]


def _asks_for_that_of_the_input(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    linear(x, weight).square().sum().backward(inputs=[x])
    return x.grad


def _differentiates_twice(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(linear(x, weight).pow(3).sum(), x, create_graph=True)
    gradient.square().sum().backward(inputs=[x])
    return x.grad


def _keeps_gradients_in_a_hook(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    saved: list[torch.Tensor] = []
    weight.register_hook(saved.append)
    linear(x, weight).square().sum().backward()
    return saved[0]


def _runs_under_autocast(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(x, weight)
    assert output.dtype is torch.bfloat16
    output.float().square().sum().backward()
    return weight.grad


USES = (
    _asks_for_gradients,
    _asks_for_that_of_the_input,
    _differentiates_twice,
    _keeps_gradients_in_a_hook,
    _runs_under_autocast,
)


@pytest.mark.parametrize("use", USES, ids=[use.__name__.strip("_") for use in USES])
def test_other_consumers_borrow_no_memory(use):
    results = []
    for lends in (True, False):
        x, weight = numbers(S, B, K).requires_grad_(), nn.Parameter(numbers(N, K, seed=2))
        memory = Memory(weight) if lends else None
        results.append(use(x, weight))
        assert memory is None or memory.times == 0
    assert torch.equal(*results)


def test_embedding_rows_add_to_dense_sums_only(monkeypatch):
    ids, weight, expected = torch.tensor([[1, 4, 1]]), nn.Parameter(numbers(50, K)), nn.Parameter(numbers(50, K))
    given = []
    make = torch.sparse_coo_tensor
    monkeypatch.setattr(torch, "sparse_coo_tensor", lambda *args, **options: given.append(1) or make(*args, **options))
    for micro_batch in range(3):
        grad = numbers(1, 3, K, seed=micro_batch)
        embedding(ids + micro_batch, weight, True).backward(grad)
        F.embedding(ids + micro_batch, expected).backward(grad)
        assert len(given) == micro_batch
        assert weight.grad.layout == torch.strided and torch.equal(weight.grad, expected.grad)
    weight.register_hook(lambda gradient: None)
    embedding(ids, weight, True).backward(grad)
    assert len(given) == 2


def test_autograd_grad_of_embedding_is_dense():
    ids, weight = torch.tensor([1, 1, 3]), nn.Parameter(numbers(5, K))
    Memory(weight)
    (gradient,) = torch.autograd.grad(embedding(ids, weight).square().sum(), weight)
    (expected,) = torch.autograd.grad(F.embedding(ids, weight).square().sum(), weight)
    assert not gradient.is_sparse and torch.equal(gradient, expected)
    (gradient,) = torch.autograd.grad(embedding(ids, weight).pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), weight)
    (gradient,) = torch.autograd.grad(F.embedding(ids, weight).pow(3).sum(), weight, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(gradient.square().sum(), weight)[0])


def test_frozen_and_no_grad_calls_use_torch():
    weight = nn.Parameter(numbers(N, K))
    memory = Memory(weight)
    with torch.no_grad():
        assert linear(numbers(S, K), weight).grad_fn is None
    weight.requires_grad_(False)
    x = numbers(S, K).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is not None and memory.times == 0


def _arrivals(weights: list[nn.Parameter]) -> list[int]:
    """Returns a list to which a backward adds the number of each weight that has a gradient then."""
    arrived: list[int] = []
    for number, weight in enumerate(weights):

        def note(parameter: torch.Tensor, number: int = number) -> None:
            if parameter.grad is not None:
                arrived.append(number)

        weight.register_post_accumulate_grad_hook(note)
    return arrived


@pytest.mark.parametrize("lends", [False, True])
def test_deferred_gradients_are_those_of_one_backward(lends: bool):
    """Of three layers, one weight has a hook, which autograd would call without a gradient, and computes at once."""
    found, hooked = [], []
    for defers in (False, True):
        weights = [nn.Parameter(numbers(K, K, seed=seed)) for seed in range(3)]
        weights[1].register_hook(lambda gradient: gradient * 0.5)
        for weight in weights if lends else ():
            Memory(weight)
        arrived = _arrivals(weights)
        leaf, products = numbers(S, B, K).requires_grad_(), []
        with deferring(products) if defers else nullcontext():
            hidden = leaf
            for weight in weights:
                hidden = linear(hidden, weight)
            hidden.square().sum().backward()
        hooked.append(arrived[:])
        compute_deferred(products)
        assert sorted(arrived) == [0, 1, 2]
        found.append([leaf.grad, *(weight.grad for weight in weights)])
    assert hooked == [[2, 1, 0], [1]]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_weight_of_another_type_is_deferred_too():
    """Such as a DTensor, which knows no operation of ours."""
    weight, products = nn.Parameter(TwoTensor(numbers(N, K), numbers(N, K))), []
    with deferring(products):
        linear(numbers(S, K), weight).sum().backward()
    assert len(products) == 1 and weight.grad is None
    compute_deferred(products)
    assert torch.equal(weight.grad.a, numbers(S, K).sum(0).expand(N, K))


# ---- compiled code


@pytest.fixture
def _compiles_anew() -> Iterator[None]:
    """Torch keeps what it compiles, in the process and on disk."""
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize(("kind", "dtype"), [("sequence", torch.bfloat16), ("strided", torch.float32)])
def test_compiled_gradient_in_lent_memory_is_bitwise(kind, dtype):
    results = []
    for lends in (True, False):
        leaf = numbers(S, B, K, dtype=dtype).requires_grad_()
        weight, bias = nn.Parameter(numbers(N, K, dtype=dtype, seed=2)), nn.Parameter(numbers(N, dtype=dtype, seed=3))
        memory = Memory(weight) if lends else None

        @torch.compile
        def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.sin(linear(x.transpose(0, 1) if kind == "strided" else x, weight, bias))

        results.append(_run(call, leaf, weight, bias))
        assert memory is None or (memory.times == 1 and weight.grad.data_ptr() == memory.memory.data_ptr())
    assert not counters["graph_break"]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def _is_used_twice(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return linear(linear(linear(x, weight), other), weight)


def _is_a_table_too(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return linear(torch.sin(linear(x + embedding(ids, weight), other)), weight)


def _is_in_the_loss(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return linear(torch.sin(linear(x, other)), weight) + weight.square().sum()


SUMS = (_is_used_twice, _is_a_table_too, _is_in_the_loss)


@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("use", quick(SUMS, lambda use: use is _is_used_twice))
def test_compiled_addends_are_in_no_lent_memory(use):
    """The compiler reuses the memory of addends for other gradients of its size, while a wrapper writes to it."""
    ids, results = torch.arange(S * B).view(S, B), []
    for lends in (True, False):
        x, weight, other = (numbers(*shape, seed=2) / 9 for shape in ((S, B, K), (K, K), (K, K)))
        weight, other = nn.Parameter(weight), nn.Parameter(other)
        memories = {parameter: Memory(parameter) for parameter in (weight, other) if lends}

        def store(parameter: torch.Tensor, memories: dict[torch.Tensor, Memory] = memories) -> None:
            memories[parameter].memory.copy_(parameter.grad)

        for parameter in memories:
            parameter.register_post_accumulate_grad_hook(store)
        torch.compile(use)(x, ids, weight, other).square().sum().backward()
        assert [memory.times for memory in memories.values()] in ([], [0, 1])
        results.append((weight.grad, other.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


COMPILED_USES = [
    *(("inductor", use) for use in USES if use is not _differentiates_twice),  # which torch's compiler refuses
    *(("eager", use) for use in USES),
]


@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize(("backend", "use"), COMPILED_USES, ids=[f"{b}-{use.__name__}" for b, use in COMPILED_USES])
def test_other_consumers_of_compiled_code_borrow_none(backend, use, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "linear", torch.compile(linear, backend=backend))
    test_other_consumers_borrow_no_memory(use)


@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_step_is_that_of_any_backend(backend):
    results = []
    for function in (linear, torch.compile(linear, backend=backend)):
        x, weight = numbers(S, B, K), nn.Parameter(numbers(N, K, seed=2))
        memory = Memory(weight)
        for times in range(2):
            function(x, weight).square().sum().backward()
            # Only torch's default compiler is known to leave results alone that it returns.
            assert memory.times == (0 if function is not linear and backend == "aot_eager" else times + 1)
        results.append(weight.grad)
    assert torch.equal(*results)


@pytest.mark.usefixtures("_compiles_anew")
def test_compiled_code_is_shared_and_keeps_no_weight():
    compiled, memories = torch.compile(linear), []
    for tokens in (S, S + 1, S + 2):
        weight = nn.Parameter(numbers(N, K))
        memories.append(Memory(weight))
        compiled(numbers(tokens, K), weight).sum().backward()
        assert memories[-1].times == 1
    assert counters["stats"]["unique_graphs"] == 2  # of one length, and of any
    reference = weakref.ref(weight)
    del weight
    gc.collect()
    assert reference() is None


@pytest.mark.usefixtures("_compiles_anew")
def test_cuda_graphs_get_memory_of_their_own():
    from torch._inductor import config

    weight = nn.Parameter(numbers(N, K))
    memory = Memory(weight)
    with config.patch({"triton.cudagraphs": True}):
        torch.compile(linear)(numbers(S, K), weight).sum().backward()
    assert memory.times == 0 and torch.equal(weight.grad, numbers(S, K).sum(0).expand(N, K))
