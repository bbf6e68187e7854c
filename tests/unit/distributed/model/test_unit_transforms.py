"""Activation checkpointing and compilation of units change what is kept and how it is computed, and no number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from core.base.errors import ParallelConfigError
from core.distributed import TorchFullyShardedDataParallelConfig, wrap_model
from core.distributed.model.unit_transforms import transform_units
from core.distributed.plan.units import find_units, plan_transforms
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from tests.unit._gpt import build_gpt, micro_batches
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Block, Toy, build, gradients, reduced, toy


class Layer(nn.Module):
    """Two linear layers around attention, with dropout from both random streams."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)  # [b, 1, s, h]: one head
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(query, key, value).squeeze(1)), 0.25)
        with get_rng_tracker().fork():
            return F.dropout(torch.tanh(x * scale), 0.25)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=1.5)
        return self.head(x)


def _transform(model: nn.Module, classes: tuple[type[nn.Module], ...], **settings: Any) -> None:
    transform_units(plan_transforms(find_units(model, classes), TorchFullyShardedDataParallelConfig(**settings)))


def _run(**options: object) -> tuple[list[torch.Tensor], list[int], list[int], list[str]]:
    """Returns loss and gradients, how often each layer ran, elements that autograd kept, and names."""
    torch.manual_seed(3)
    model = Stack()
    x = torch.randn(2, 5, 6)
    model_parallel_manual_seed(11, tp_rank=0)
    _transform(model, (nn.ModuleList, nn.Linear), **options)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        loss = model(x).square().sum()
    loss.backward()
    get_rng_tracker().reset()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    return found, [layer.runs for layer in model.layers], kept, list(model.state_dict())


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_changes_no_bit_and_no_name(kind):
    plain, once, kept, names = _run()
    found, runs, kept_now, names_now = _run(activation_checkpointing=kind)
    assert all(map(torch.equal, found, plain))
    assert (once, runs) == ([1, 1, 1], [2, 2, 2])
    assert names_now == names
    assert sum(kept_now) < 0.5 * sum(kept)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _operations_of_backward(kind: str) -> list[str]:
    torch.manual_seed(3)
    model, x = nn.Sequential(Layer()), torch.randn(2, 5, 6)
    _transform(model, (Layer,), activation_checkpointing=kind)
    loss = model(x).sum()
    with Operations() as operations:
        loss.backward()
    return operations.seen


def test_selective_recomputes_neither_attention_nor_every_matmul():
    plain, full, selective = map(_operations_of_backward, ("none", "full", "selective"))
    attention = [name for name in full if name.startswith("_scaled_dot_product") and "backward" not in name]
    assert len(attention) == 1
    assert not any(name in attention for name in plain + selective)

    def products(seen: list[str]) -> int:
        return sum(name in ("mm", "addmm") for name in seen)

    assert products(full) - products(plain) == 2
    assert products(selective) - products(plain) == 1
    assert selective.count("tanh") == full.count("tanh") == plain.count("tanh") + 1


class _Attention(nn.Module):
    """Calls an operation of its own library, and notes each call."""

    saved_operations = ("unit_transforms::attend",)
    calls: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.unit_transforms.attend(x).tanh()


@torch.library.custom_op("unit_transforms::attend", mutates_args=())
def _attend(x: torch.Tensor) -> torch.Tensor:
    _Attention.calls.append(tuple(x.shape))
    return 2 * x


_attend.register_autograd(lambda ctx, grad: 2 * grad)


def test_selective_saves_the_operations_that_a_module_names() -> None:
    for kind, num_calls in (("full", 2), ("selective", 1)):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), _Attention()))
        _transform(model, (nn.Sequential,), activation_checkpointing=kind)
        _Attention.calls.clear()
        model(torch.ones(3, 4)).sum().backward()
        assert len(_Attention.calls) == num_calls, kind


def test_nothing_is_recomputed_without_gradients():
    model = Stack()
    _transform(model, (Layer,), activation_checkpointing="full")
    with torch.no_grad():
        model(torch.randn(2, 5, 6))
    assert [layer.runs for layer in model.layers] == [1, 1, 1]


def test_what_cannot_be_done_is_refused_by_name():
    model = Stack()
    with pytest.raises(ParallelConfigError, match="no unit has more than one layer of weights"):
        _transform(model, (nn.Linear,), activation_checkpointing="full")
    model.layers[1].config = SimpleNamespace(recompute_granularity="selective")
    with pytest.raises(
        ParallelConfigError, match=r"activation_checkpointing is 'full'.*recompute_granularity is 'sel"
    ):
        _transform(model, (Layer,), activation_checkpointing="full")
    with pytest.raises(ParallelConfigError, match="activation_checkpointing"):
        TorchFullyShardedDataParallelConfig(activation_checkpointing="some")


CHECKPOINTED = ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"})


def _gradients(kind: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build(kind, toy(), unit_classes=(Block, nn.Embedding), **options)
    assert list(model.module.state_dict()) == list(Toy().state_dict())
    assert bool(model.plan.transforms) == ("activation_checkpointing" in options)
    return reduced(model, 2)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2_overlap", "zero3", "fsdp2"])
@on_ranks(2)
def test_units_are_checkpointed_bit_for_bit_under_every_wrapper(kind: str) -> None:
    plain = _gradients(kind, {})
    for options in CHECKPOINTED:
        assert_same(_gradients(kind, options), plain)


class _Averaging(nn.Module):
    """Has running statistics, and averages that it reads, written in place and assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("written", torch.zeros(6))
        self.register_buffer("assigned", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.linear(x)))
        self.written.lerp_(x.detach().mean(0), 0.1)
        self.assigned = 0.9 * self.assigned + 0.1 * x.detach().mean(0)
        return torch.sin(x + self.written.clone() + self.assigned)


def _state_after_steps(kind: str | None, options: dict[str, Any], waits: bool = True) -> dict[str, torch.Tensor]:
    """Returns buffers, and gradients of the third step's two micro-batches, which all ranks have.

    Args:
        waits: one backward follows both forwards.
    """
    torch.manual_seed(3)
    model = nn.Sequential(_Averaging(), _Averaging())
    call = model if kind is None else build(kind, model, unit_classes=(_Averaging,), **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model.zero_grad() if kind is None else call.zero_grad_buffer()
        inputs = torch.randn(2, 4, 6, generator=generator)
        if waits:
            sum(call(x).square().sum() for x in inputs).backward()
        for x in () if waits else inputs:
            call(x).square().sum().backward()
        if kind is not None:
            call.finish_grad_sync()
    found = {name: p.grad for name, p in model.named_parameters()} if kind is None else gradients(call)
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2_overlap", "zero3", "fsdp2"])
@on_ranks(2)
def test_buffers_that_a_unit_writes_are_those_of_one_process(kind: str) -> None:
    plain = _state_after_steps(None, {})
    for recomputes in ("full", "selective"):
        for offloads in (False, True):
            options = {"activation_checkpointing": recomputes, "offload_activations": offloads}
            assert_same(_state_after_steps(kind, options), plain)


@pytest.mark.long
@on_ranks(1)
def test_compiled_units_write_them_once() -> None:
    torch._dynamo.reset()
    plain = _state_after_steps("ddp", {"compile_units": True}, waits=False)
    for recomputes in ("full", "selective"):
        options = {"compile_units": True, "activation_checkpointing": recomputes}
        assert_same(_state_after_steps("ddp", options, waits=False), plain)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3", "fsdp2"])
@on_ranks(2)
def test_compiled_units_agree(kind: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # the processes of ranks are reused, and with them what is compiled

    counters.clear()
    compiled = _gradients(kind, {"compile_units": True, "activation_checkpointing": "selective"})
    # Compiled kernels add 8 tokens of two micro-batches of two ranks in an order of their own.
    assert_same_sums(compiled, _gradients(kind, {}), additions=31)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"], counters["graph_break"]


def _gradients_of_gpt(**fields: Any) -> dict[str, torch.Tensor]:
    module = build_gpt(True)
    settings = TorchFullyShardedDataParallelConfig(**fields)
    model = wrap_model(module, module.config, settings, process_group=dist.group.WORLD)
    tokens, labels = micro_batches(0, dist.get_rank())[0]
    model(tokens, labels=labels).mean().backward()
    model.finish_grad_sync()
    return gradients(model)


@on_ranks(2)
def test_a_gpts_layers_are_checkpointed_bit_for_bit() -> None:
    plain = _gradients_of_gpt()
    for kind in ("full", "selective"):
        assert_same(_gradients_of_gpt(activation_checkpointing=kind), plain)
