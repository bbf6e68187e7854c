"""Projection and loss in parts of the vocabulary compared with whole logits: values, gradients, memory, refusals.

Tolerances: the parts change the order of additions. In fp32 a sum of n terms in another order moves by at most
n x 2^-24 of the terms' size: of 32 or 48 terms here, under 1e-5. In bf16 both forms round logits and their gradients
at the same places; the input's gradient is the sum of parts that are rounded to bf16 once each, 2^-8 of its largest
element in sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from core.base.device import CPU_STANDS_FOR_GPU, MEMORY_BYTES
from core.base.errors import DataError
from core.tensor_parallel import vocab_parallel_cross_entropy
from core.tensor_parallel.cross_entropy import linear_cross_entropy
from core.tensor_parallel.mappings import column_parallel_linear
from tests.unit._on_gpu import ON_GPU, needs_gpu
from tests.unit._spawn import run_distributed
from tests.unit.tensor_parallel._layers import own
from tests.unit.tensor_parallel.test_weight_gradients import Memory, numbers

SIZES = (6, 3, 32, 48)
"""Tokens of a sequence, sequences, channels, and tokens of the vocabulary."""
S, B, H, V = SIZES
REAL_SIZES = (2048, 2, 1024, 32_000)
NAMES = ("loss", "input", "weight")


def _target(s: int = S, b: int = B, v: int = V) -> torch.Tensor:
    target = torch.randint(0, v, (s, b), generator=torch.Generator().manual_seed(4))
    target[0, 0], target[1, 1], target[2, 0] = 0, v - 1, -100
    return target


def _weights(s: int = S, b: int = B) -> torch.Tensor:
    """Returns weights of the losses as a caller sets them, some of them zero."""
    return torch.rand(s, b, generator=torch.Generator().manual_seed(6)).mul_(torch.arange(s).remainder(3).view(s, 1))


class Case:
    """Leaves of one projection, this rank's part of each."""

    def __init__(
        self,
        dtype: torch.dtype,
        group: Any = None,
        splits_sequence: bool = False,
        device: str = "cpu",
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        self.group, self.splits_sequence = group, splits_sequence
        s, b, h, v = sizes
        scale = 0.5 if sizes == SIZES else h**-0.5  # logits near one: rounding a large one changes its probability
        cut = (lambda t: own(t, 0).to(device)) if group is not None else (lambda t: t.to(device))
        cut_input = cut if splits_sequence else lambda t: t.to(device)
        self.input_ = cut_input(numbers(s, b, h, seed=1, dtype=dtype)).clone().requires_grad_()
        self.weight = nn.Parameter(cut((numbers(v, h, seed=5, dtype=torch.float32) * scale).to(dtype)).clone())
        self.target, self.token_weights = _target(s, b, v).to(device), _weights(s, b).to(device)

    def fused(self, **options: Any) -> torch.Tensor:
        layout = {"sequence_parallel": self.splits_sequence, "tp_group": self.group}
        return linear_cross_entropy(self.input_, self.weight, self.target, **layout, **options)

    def plain(self) -> torch.Tensor:
        logits = column_parallel_linear(self.input_, self.weight, None, self.group, self.splits_sequence)
        return vocab_parallel_cross_entropy(logits, self.target, tp_group=self.group)

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        (loss * self.token_weights).sum().backward()
        leaves = (self.input_, self.weight)
        return dict(zip(NAMES, (loss.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def _close(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float, name: str) -> None:
    if expected is None:
        assert found is None, name
        return
    assert found is not None and found.dtype is expected.dtype and found.shape == expected.shape, name
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"{name}: {error}"


def _equals_the_plain_form(
    dtype: torch.dtype,
    chunk: int | None,
    splits_sequence: bool = False,
    device: str = "cpu",
    sizes: tuple[int, ...] = SIZES,
) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    fused, plain = (Case(dtype, group, splits_sequence, device, sizes) for _ in range(2))
    actual = fused.gradients(fused.fused(vocab_chunk_size=chunk))
    expected = plain.gradients(plain.plain())
    assert actual["loss"].dtype is torch.float32 and actual["loss"][2, 0] == 0
    for name in NAMES:
        # A GPU's products of parts and of the whole may round single logits differently.
        exact = dtype is torch.float32 or (name == "loss" and device == "cpu")
        rounded = 2**-7 if device == "cpu" else 2**-6
        _close(actual[name], expected[name], 1e-5 if exact else rounded, name)


@pytest.mark.parametrize("chunk", [None, 1, 13, V])  # 13: an uneven part at the end
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_losses_and_gradients_equal_whole_logits(device, dtype, chunk):
    _equals_the_plain_form(dtype, chunk, device=device)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunk", [None, 5000])  # None: two parts
def test_losses_and_gradients_at_full_size_on_gpu(chunk):
    _equals_the_plain_form(torch.bfloat16, chunk, device="cuda", sizes=REAL_SIZES)


@pytest.mark.parametrize("splits_sequence", [False, True], ids=["tp", "tp-sp"])
def test_two_ranks_share_the_vocabulary(splits_sequence):
    for dtype in (torch.float32, torch.bfloat16):
        run_distributed(_equals_the_plain_form, 2, dtype, 7, splits_sequence)


def test_large_logits_have_finite_losses():
    case, plain = Case(torch.float32), Case(torch.float32)
    for one in (case, plain):
        one.input_.data *= 1e4
    actual, expected = case.fused(vocab_chunk_size=7), plain.plain()
    assert actual.isfinite().all()
    _close(actual.detach(), expected.detach(), 1e-5, "loss")


@pytest.mark.parametrize("trained", ["input_", "weight"])
def test_frozen_inputs_get_no_gradient(trained):
    fused, plain = Case(torch.float32), Case(torch.float32)
    for case in (fused, plain):
        for name in ("input_", "weight"):
            getattr(case, name).requires_grad_(name == trained)
    actual, expected = fused.gradients(fused.fused(vocab_chunk_size=7)), plain.gradients(plain.plain())
    assert sum(value is not None for value in actual.values()) == 2
    for name in NAMES:
        _close(actual[name], expected[name], 1e-5, name)


def test_weight_gradient_uses_lent_memory():
    case, other = Case(torch.float32), Case(torch.float32)
    memory = Memory(case.weight)
    actual, expected = case.gradients(case.fused(vocab_chunk_size=7)), other.gradients(other.fused(vocab_chunk_size=7))
    assert memory.times == 1 and case.weight.grad.data_ptr() == memory.memory.data_ptr()
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)
    case = Case(torch.float32)
    memory = Memory(case.weight)
    (gradient,) = torch.autograd.grad((case.fused(vocab_chunk_size=7) * _weights()).sum(), case.weight)
    assert memory.times == 0 and torch.equal(gradient, expected["weight"])


def test_backward_twice_with_retained_graph():
    case = Case(torch.bfloat16)
    loss = case.fused(vocab_chunk_size=7)
    (loss * _weights()).sum().backward(retain_graph=True)
    first = case.weight.grad.clone()
    case.weight.grad = None
    (loss * _weights()).sum().backward()
    assert torch.equal(case.weight.grad, first)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


ROOM = 32 * S * B * V * 4
"""Memory of which the logits in fp32 are 1/32."""


@contextmanager
def _on_gpu_of(memory: int) -> Iterator[None]:
    with CPU_STANDS_FOR_GPU.replaced(True), MEMORY_BYTES.replaced(memory):
        yield


class Products(LargestTensor):
    """Counts matrix products too, and their operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:]
            self.count, self.flops = self.count + 1, self.flops + 2 * left.numel() * right.shape[1]
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_gpu_with_room_keeps_logits_and_multiplies_less():
    product = 2 * S * B * H * V
    for memory, count, flops in ((ROOM, 3, 3 * product), (ROOM - 1, 4, 4 * product)):
        case = Case(torch.float32)
        with _on_gpu_of(memory), Products() as seen:
            case.gradients(case.fused())
        # Parts of 64 columns and more: one, for this vocabulary, which does not keep its logits.
        assert (seen.count, seen.flops) == (count, flops), memory
    case = Case(torch.float32)
    with _on_gpu_of(ROOM), Products() as seen:
        case.gradients(case.fused(vocab_chunk_size=V // 3))
    assert (seen.count, seen.flops) == (4 * 3, 4 * product)  # an explicit size decides


def _kept_logits_equal_whole_logits(splits_sequence: bool) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for dtype in (torch.float32, torch.bfloat16):
        kept, plain = (Case(dtype, group, splits_sequence) for _ in range(2))
        with _on_gpu_of(ROOM * dtype.itemsize // 4 // ranks):
            actual = kept.gradients(kept.fused())
        expected = plain.gradients(plain.plain())
        assert all(torch.equal(actual[name], expected[name]) for name in NAMES), dtype


def test_kept_logits_equal_whole_logits_bitwise():
    _kept_logits_equal_whole_logits(False)
    for splits_sequence in (False, True):
        run_distributed(_kept_logits_equal_whole_logits, 2, splits_sequence)


def test_kept_logits_live_from_forward_to_backward():
    tokens, width, vocab = 512, 16, 4096
    whole = tokens * vocab * 4

    def held(memory: int, backwards: int) -> tuple[int, int]:
        """Returns the bytes that are held after forward, and the most bytes during backwards."""
        weight = nn.Parameter(torch.randn(vocab, width))
        x = torch.randn(tokens, 1, width, requires_grad=True)
        target = torch.arange(tokens).view(-1, 1)
        with _on_gpu_of(memory), profile(profile_memory=True) as forward:
            loss = linear_cross_entropy(x, weight, target).sum()
        with _on_gpu_of(memory), profile(profile_memory=True) as backward:
            for index in range(backwards):
                x.grad = weight.grad = None
                loss.backward(retain_graph=index + 1 < backwards)
        changes = [
            [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
            for profiler in (forward, backward)
        ]
        return sum(changes[0]), max(itertools.accumulate(changes[1]))

    (kept, most), (in_parts, least) = held(32 * whole, 1), held(32 * whole - 1, 1)
    assert whole <= kept < 1.05 * whole and in_parts < 0.05 * whole
    assert whole <= most < 1.2 * whole and least < 0.5 * whole  # the gradient of the logits is new, and no more


def test_kept_logits_serve_two_backwards():
    case = Case(torch.bfloat16)
    with _on_gpu_of(ROOM):
        loss = case.fused()
        found = []
        for index in range(2):
            case.weight.grad = case.input_.grad = None
            (loss * _weights()).sum().backward(retain_graph=index == 0)
            found.append((case.weight.grad, case.input_.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_both_forms_are_traced_in_a_larger_graph():
    for memory in (ROOM, ROOM - 1):
        torch._dynamo.reset()
        ours, theirs = Case(torch.float32), Case(torch.float32)
        with _on_gpu_of(memory):
            actual = ours.gradients(torch.compile(ours.fused, fullgraph=True, backend="aot_eager")())
            expected = theirs.gradients(theirs.fused())
        for name in NAMES:
            _close(actual[name], expected[name], 1e-5, name)


def test_whole_logits_are_never_allocated():
    tokens, vocab = 64, 640
    x, weight = torch.randn(tokens, 1, 8, requires_grad=True), nn.Parameter(torch.randn(vocab, 8))
    with LargestTensor() as seen:
        loss = linear_cross_entropy(x, weight, torch.arange(tokens).view(-1, 1), vocab_chunk_size=64)
        loss.sum().backward()
    assert seen.most == max(tokens * 64, vocab * 8)


def test_autocast_dtype_in_forward_and_backward():
    actual, expected = Case(torch.float32), Case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused, plain = actual.fused(vocab_chunk_size=7), expected.plain()
    ours, theirs = actual.gradients(fused), expected.gradients(plain)
    for name in NAMES:
        _close(ours[name], theirs[name], 2**-7, name)


def test_a_target_outside_the_vocabulary_is_named():
    x, weight = torch.zeros(2, 1, 4), torch.zeros(5, 4)
    with pytest.raises(DataError, match="target id 5 is outside the vocabulary of 5"):
        linear_cross_entropy(x, weight, torch.tensor([[0], [5]]))
