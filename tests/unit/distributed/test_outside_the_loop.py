"""The rule of the contract: what works on a plain module gives that result under every wrapper, or raises.

Each scenario is a function that trains `run` in some way that no documented loop does. It runs once on a plain module
in one process, which is the oracle, and once under every wrapper on two ranks: the weights must be bitwise equal, or
the error must be the one that the scenario names for this wrapper.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.comm import collectives
from core.dist_checkpointing import load_model_state_dict
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import batches, build, full, loss_of, toy

KINDS = (*_toys.WRAPPERS, "zero2_every_micro_batch")
SHARDED = ("zero1", "zero1_overlap", "zero2", "zero2_overlap", "zero2_every_micro_batch")
BUFFERED = ("ddp", "ddp_overlap", *SHARDED)


class Run:
    """A model in training, under a wrapper or plain; what a scenario does to it means the same in both."""

    model: nn.Module
    """What is called."""
    inner: nn.Module
    """What holds the parameters."""
    is_plain: bool

    def __init__(self, optimizer: Callable[[Run], Any] | None) -> None:
        self.optimizer = optimizer(self) if optimizer else None
        self.outputs: dict[str, Tensor] = {}  # what a scenario wants compared with the weights

    def train(self, steps: int = 1, *, micro_batches: int = 2, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.zero()
            for index in range(micro_batches):
                self.backward(step + index, is_last=index == micro_batches - 1)
            self.finish()
            self.step()

    def step(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in self.inner.state_dict().items()} | self.outputs

    def zero(self) -> None: ...
    def backward(self, index: int, *, is_last: bool = True) -> None: ...
    def finish(self) -> None: ...

    def forward(self, index: int = 0) -> Tensor:
        return self.model(batch(0, index))


class Plain(Run):
    """One process that goes through the batches of both ranks, and adds them as two ranks do.

    Args:
        adds_ranks_first: sum each micro-batch over ranks, then micro-batches, instead of the other way round.
    """

    is_plain = True

    def __init__(
        self, module: nn.Module, optimizer: Callable[[Run], Any] | None, *, adds_ranks_first: bool = False
    ) -> None:
        self.model = self.inner = module
        self.adds_ranks_first = adds_ranks_first
        self.of_ranks: list[dict[nn.Parameter, Tensor]] = [{}, {}]
        super().__init__(optimizer)

    def zero(self) -> None:
        self.of_ranks = [{}, {}]
        self.inner.zero_grad()

    def backward(self, index: int, *, is_last: bool = True) -> None:
        found = [self.gradients(rank, index) for rank in range(2)]
        if self.adds_ranks_first:
            found = [{parameter: g + found[1][parameter] for parameter, g in found[0].items()}, {}]
        for sums, gradients in zip(self.of_ranks, found, strict=True):
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient

    def gradients(self, rank: int, index: int) -> dict[nn.Parameter, Tensor]:
        trained = [parameter for parameter in self.inner.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss_of(self.model, batch(rank, index)), trained, allow_unused=True)
        return {p: g.to_dense() if g.is_sparse else g for p, g in zip(trained, found, strict=True) if g is not None}

    def finish(self) -> None:
        for parameter in self.inner.parameters():
            if not parameter.requires_grad and not any(parameter in sums for sums in self.of_ranks):
                continue
            zero = torch.zeros_like(parameter)
            mean = (self.of_ranks[0].get(parameter, zero) + self.of_ranks[1].get(parameter, zero)) * 0.5
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        self.of_ranks = [{}, {}]


class Wrapped(Run):
    is_plain = False

    def __init__(self, kind: str, module: nn.Module, optimizer: Callable[[Run], Any] | None, **settings: Any) -> None:
        if kind == "zero2_every_micro_batch":
            kind, settings = "zero2", {"reduce_every_micro_batch": True, **settings}
        self.model = build(kind, module, **settings)
        self.inner = self.model.module
        super().__init__(optimizer)

    def zero(self) -> None:
        self.model.zero_grad_buffer()

    def backward(self, index: int, *, is_last: bool = True) -> None:
        with nullcontext() if is_last else self.model.no_sync():
            loss_of(self.model, batch(dist.get_rank(), index)).backward()

    def finish(self) -> None:
        finalize_model_grads([self.model])


def batch(rank: int, index: int) -> Tensor:
    return batches(rank, 8)[index]


# ---- optimizers


def megatron(run: Run, **config: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(**{"lr": 0.05, "clip_grad": 0.0, **config}), [run.model])


def torchs(run: Run) -> Any:
    return torch.optim.SGD(run.inner.parameters(), lr=0.05, momentum=0.9)


# ---- scenarios

SCENARIOS: dict[str, Scenario] = {}


class Scenario:
    """One way to use a model.

    Args:
        go: does it.
        make: the model.
        optimizer: what updates it.
        raises: by kind of wrapper, the pattern of the error that it has to raise instead.
        settings: fields of the wrapper's config, by kind.
        rtol: of the comparison, where an addition is made in another order; 0 is bitwise.
    """

    def __init__(self, go: Callable[[Run], None], **kwargs: Any) -> None:
        self.go = go
        self.make: Callable[[], nn.Module] = kwargs.pop("make", lambda: toy(tied=False))
        self.optimizer: Callable[[Run], Any] | None = kwargs.pop("optimizer", megatron)
        self.raises: dict[str, str] = kwargs.pop("raises", {})
        self.only: tuple[str, ...] = kwargs.pop("only", KINDS)
        self.rtol: float = kwargs.pop("rtol", 0.0)
        self.settings: dict[str, Any] = kwargs.pop("settings", {})
        assert not kwargs


def scenario(**kwargs: Any) -> Callable[[Callable[[Run], None]], None]:
    def register(go: Callable[[Run], None]) -> None:
        SCENARIOS[go.__name__] = Scenario(go, **kwargs)

    return register


def for_kinds(kinds: tuple[str, ...], pattern: str) -> dict[str, str]:
    return dict.fromkeys(kinds, pattern)


class _Failure(Exception):
    pass


def _raise(*unused: Any) -> None:
    raise _Failure


@scenario()
def a_backward_that_raises_is_caught(run: Run) -> None:
    run.train()
    handle = run.inner.blocks[0].register_full_backward_pre_hook(_raise)
    run.zero()
    run.backward(5, is_last=False) if False else None
    with pytest.raises(_Failure):
        run.backward(3)
    handle.remove()
    run.train(2, first=1)


@scenario(raises={"fsdp2": "a backward of this step raised"})
def a_step_goes_on_after_a_backward_that_raised_and_is_made_again(run: Run) -> None:
    handle = run.inner.blocks[1].register_full_backward_pre_hook(_raise)
    run.zero()
    with pytest.raises(_Failure):
        run.backward(3)
    handle.remove()
    if not run.is_plain and isinstance(run.model.ddp_config, _toys.TorchFullyShardedDataParallelConfig):
        run.finish()
    run.train(1, first=1)


@scenario()
def a_forward_that_raises_is_caught_and_its_micro_batch_skipped(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1, is_last=False)
    handle = run.inner.blocks[1].register_forward_pre_hook(_raise)
    with pytest.raises(_Failure):
        run.backward(2, is_last=False)
    handle.remove()
    run.backward(3)
    run.finish()
    run.step()
    run.train(1, first=2)


@scenario()
def an_evaluation_that_raises_between_gradients_and_step(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1)
    run.finish()
    handle = run.inner.blocks[1].register_forward_pre_hook(_raise)
    with torch.no_grad(), pytest.raises(_Failure):
        run.forward()
    handle.remove()
    run.step()
    run.train(1, first=2)


@scenario()
def a_loss_is_monitored_between_gradients_and_step(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.forward(1)  # with a graph, and no backward
    run.step()
    run.train(1, first=1)


@scenario()
def an_evaluation_with_a_graph_before_each_step(run: Run) -> None:
    for step in range(2):
        run.forward(2)
        run.train(1, first=step)


@scenario(optimizer=torchs, raises=for_kinds(SHARDED, "SGD was to step parameters whose gradients"))
def an_optimizer_of_torch(run: Run) -> None:
    run.train(3)


@scenario(optimizer=torchs, raises=for_kinds(SHARDED, "SGD was to step|set_to_none|a gradient was read"))
def an_optimizer_of_torch_zeroes_the_gradients(run: Run) -> None:
    for set_to_none in (True, False, True):
        run.optimizer.zero_grad(set_to_none=set_to_none)
        if run.is_plain:
            run.of_ranks = [{}, {}]
        run.backward(0, is_last=False)
        run.backward(1)
        run.finish()
        run.step()


@scenario(
    raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"), rtol=1e-6
)  # what was reduced is reduced again: 2^-24 an addition
def gradients_add_up_over_steps_that_zero_none(run: Run) -> None:
    for step in range(3):
        run.backward(step, is_last=False)
        run.backward(step + 1)
        run.finish()
        run.step()


@scenario()
def the_optimizer_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=step != 1)
        if run.is_plain:
            run.of_ranks = [{}, {}]
        run.backward(step, is_last=False)
        run.backward(step + 1)
        run.finish()
        run.step()


@scenario()
def the_module_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad(set_to_none=step != 1)
        if run.is_plain:
            run.of_ranks = [{}, {}]
        run.backward(step)
        run.finish()
        run.step()


@scenario(raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"))
def gradients_are_set_to_none_by_hand(run: Run) -> None:
    for step in range(3):
        for parameter in run.inner.parameters():
            parameter.grad = None
        run.backward(step)
        run.finish()
        run.step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"))
def gradients_are_halved_by_hand(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1)
    run.finish()
    for index, parameter in enumerate(p for p in run.inner.parameters() if p.grad is not None):
        if index % 2:
            parameter.grad.mul_(0.5)
        else:
            parameter.grad = parameter.grad * 0.5
    run.step()
    run.train(1, first=2)


@scenario(only=("ddp", "ddp_overlap", "fsdp2", "zero1"), raises={"zero1": "has a .grad of its own"})
def a_gradient_is_written_before_the_step(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1)
    run.finish()
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25).detach()
    run.step()


@scenario(only=("ddp", "zero1", "zero2"))
def a_gradient_is_written_before_it_is_reduced(run: Run) -> None:
    run.zero()
    if not run.is_plain:
        run.backward(1, is_last=False)
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)
    run.finish()
    run.step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"), rtol=1e-5)  # the norm is added in fp32
def torch_clips_the_gradients(run: Run) -> None:
    for step in range(2):
        run.zero()
        run.backward(step)
        run.finish()
        norm = full(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        assert norm > 0.1
        run.step()


@scenario()
def parameters_are_frozen_and_thawed_during_training(run: Run) -> None:
    run.train()
    run.inner.blocks[0].requires_grad_(False)
    run.train(2, first=1)
    run.inner.blocks[0].requires_grad_(True)
    run.train(1, first=3)


@scenario(optimizer=lambda run: megatron(run, weight_decay=0.1, clip_grad=1.0))
def frozen_parameters_do_not_decay(run: Run) -> None:
    run.train()
    run.inner.head.requires_grad_(False)
    run.train(2, first=1)


def bf16_toy() -> nn.Module:
    return toy(tied=False).bfloat16()


def overwrite(run: Run, values: dict[str, Tensor]) -> None:
    """Loads as each wrapper's users do."""
    if not run.is_plain and isinstance(run.model.ddp_config, _toys.TorchFullyShardedDataParallelConfig):
        load_model_state_dict(run.inner, values)
    else:
        run.model.load_state_dict(values)


@scenario(make=bf16_toy)
def weights_are_loaded_under_low_precision(run: Run) -> None:
    run.train(2)
    loaded = toy(seed=7, tied=False).bfloat16().state_dict()
    overwrite(run, loaded)
    run.train(2, first=2)
    # Two steps of AdamW at a rate of 0.05 move a weight by 0.1 or so; the one that was trained was up to 3 away.
    assert all(largest(tensor - loaded[name]) < 0.3 for name, tensor in run.weights().items())


@scenario()
def weights_are_loaded_right_after_the_step(run: Run) -> None:
    for step in range(2):
        run.train(1, first=step)
        overwrite(run, toy(seed=7 + step, tied=False).state_dict())
    run.train(1, first=2)


@scenario()
def weights_are_loaded_after_a_forward_without_backward(run: Run) -> None:
    run.train()
    run.forward(1)
    overwrite(run, toy(seed=7, tied=False).state_dict())
    run.train(1, first=2)


@scenario(make=bf16_toy)
def weights_are_written_through_data_under_low_precision(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        if step:  # from at most 0.1, by one step of AdamW at a rate of 0.05
            assert all(largest(parameter) < 0.2 for parameter in run.weights().values() if parameter.ndim == 2)
        for parameter in run.inner.parameters():
            parameter.data.clamp_(-0.1, 0.1)


@scenario(make=bf16_toy)
def weights_are_clamped_right_after_the_step_in_low_precision(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        with torch.no_grad():
            for parameter in run.inner.parameters():
                parameter.clamp_(-0.1, 0.1)


@scenario()
def weights_are_clamped_right_after_the_step(run: Run) -> None:
    held = list(run.inner.parameters())
    for step in range(3):
        run.train(1, first=step)
        with torch.no_grad():
            for parameter in held:
                parameter.clamp_(-0.1, 0.1)


@scenario()
def an_average_of_weights_is_kept_by_references(run: Run) -> None:
    held = list(run.inner.parameters())
    average = [torch.zeros_like(parameter).detach() for parameter in held]
    for step in range(3):
        run.train(1, first=step)
        with torch.no_grad():
            torch._foreach_lerp_(average, held, 0.5)
    with torch.no_grad():
        for parameter, mean in zip(held, average, strict=True):
            parameter.copy_(mean)


@scenario()
def a_child_is_saved_and_loaded_right_after_the_step(run: Run) -> None:
    run.train()
    saved = {name: tensor.clone() for name, tensor in run.inner.blocks[0].state_dict().items()}
    run.train(1, first=1)
    run.inner.blocks[0].load_state_dict(saved)
    run.train(1, first=2)


class Attention(nn.Module):
    """A parent that reads its child's weight; `nn.MultiheadAttention` with its fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)))


@scenario(make=Attention, raises={"fsdp2": "was used outside the forward of its unit"})
def a_parent_reads_weights_of_its_child(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        run.model.eval()
        with torch.no_grad():
            run.outputs[f"evaluation {step}"] = run.forward(step)
        run.model.train()


class Normed(nn.Module):
    """A weight that a hook computes from two others, set before wrapping."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8)
        with pytest.warns(FutureWarning):
            self.head = torch.nn.utils.weight_norm(nn.Linear(8, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@scenario(make=Normed)
def a_hook_from_before_wrapping_reads_weights(run: Run) -> None:
    run.train(3)


@scenario(optimizer=megatron, raises=for_kinds(KINDS, r"step\(\) was called before the gradients"))
def a_step_without_finalizing(run: Run) -> None:
    run.zero()
    run.backward(0)
    if run.is_plain:
        run.finish()
    run.step()


@scenario(optimizer=torchs, raises=for_kinds(BUFFERED, r"step\(\) was called before the gradients|SGD was to step"))
def a_step_of_torch_without_finalizing(run: Run) -> None:
    run.zero()
    run.backward(0)
    if run.is_plain:
        run.finish()
    run.step()


@scenario(raises=for_kinds(KINDS, "finalize_model_grads was called twice"))
def finalizing_twice(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.finish()


@scenario(
    raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"), rtol=1e-6
)  # what was reduced is reduced again: 2^-24 an addition
def a_backward_between_finalizing_and_the_step(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.backward(1)
    run.finish()
    run.step()


@scenario(raises=for_kinds(KINDS, r"a backward added gradients after|step\(\) was called before the gradients"))
def a_backward_after_finalizing_that_is_not_finalized(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.backward(1)
    run.step()


@scenario()
def two_steps_with_one_gradient(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.step()
    run.step()


def tied_by_data() -> nn.Module:
    model = toy(tied=False)
    model.head.weight.data = model.embedding.weight.data
    return model


@scenario(make=tied_by_data, raises=for_kinds(KINDS, "two parameters in the same memory, tied by .data"))
def weights_are_tied_by_data(run: Run) -> None:
    run.train()


@scenario()
def the_model_inside_is_saved_and_trained_again(run: Run) -> None:
    run.train(2)
    if not run.is_plain and isinstance(run.model.ddp_config, _toys.TorchFullyShardedDataParallelConfig):
        return
    file = io.BytesIO()
    torch.save(run.inner, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(hasattr(p, "main_grad") or hasattr(p, "has_buffer") for p in loaded.parameters())
    assert loaded.embedding.weight.partition_dim == 0
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, run.inner.state_dict()[name]), name
    if not run.is_plain:
        build("zero1", loaded)
        loss_of(loaded, batch(0, 0)).backward()


@scenario(raises=for_kinds(KINDS, "cannot be copied or pickled"))
def the_wrapper_is_saved(run: Run) -> None:
    torch.save(run.model, io.BytesIO())


@scenario(raises={"fsdp2": "deepcopy|copied|pickle"})
def an_average_is_a_copy_of_the_model_inside(run: Run) -> None:
    average = copy.deepcopy(run.inner)
    for step in range(2):
        run.train(1, first=step)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), run.inner.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    run.inner.load_state_dict(average.state_dict())


@scenario()
def the_first_forward_is_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.forward()
    run.train(2)
    with torch.inference_mode():
        run.forward()
    run.train(1, first=2)


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8)
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens)) + self.empty.sum()


@scenario(make=WithEmpty, raises={"fsdp2": "without elements"})
def a_parameter_without_elements(run: Run) -> None:
    run.train(2)


def sparse() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 11, sparse=True))


@scenario(make=sparse, raises={"fsdp2": "has sparse gradients"})
def sparse_gradients(run: Run) -> None:
    run.train(2)


def transposed() -> nn.Module:
    model = toy(tied=False)
    model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())
    return model


@scenario(make=transposed, raises={"fsdp2": "is not contiguous"}, rtol=1e-6)  # buffers lay it out in rows
def a_parameter_that_is_not_contiguous(run: Run) -> None:
    run.train(2)


@scenario(raises=for_kinds(KINDS, "a backward with create_graph=True reached"))
def a_graph_of_gradients(run: Run) -> None:
    run.zero()
    loss_of(run.model, batch(0, 0)).backward(create_graph=True)
    if run.is_plain:
        run.zero()


@scenario(raises={"fsdp2": "a backward with create_graph=True reached"})
def a_penalty_on_gradients(run: Run) -> None:
    run.zero()
    loss = loss_of(run.model, batch(0, 0))
    (gradient,) = torch.autograd.grad(loss, [run.inner.head.weight], create_graph=True)
    assert gradient.square().sum() > 0


@scenario(settings={"fsdp2": {"keep_gathered_between_micro_batches": "all"}})
def a_unit_is_called_before_the_model(run: Run) -> None:
    x = torch.ones(2, 7)
    with torch.no_grad():
        run.inner.blocks[0](x)
    run.train()
    with torch.no_grad():
        found = run.inner.blocks[0](x)
    run.train(1, first=1)
    with torch.no_grad():
        assert not torch.equal(run.inner.blocks[0](x), found)


@scenario(optimizer=None)
def the_optimizer_is_built_after_a_forward(run: Run) -> None:
    run.forward()
    run.optimizer = megatron(run)
    run.train(2)


@scenario(optimizer=None, only=("fsdp2",), raises={"fsdp2": "was built while parameter .* was gathered"})
def an_optimizer_of_torch_is_built_after_a_forward(run: Run) -> None:
    run.forward()
    run.optimizer = torchs(run)
    run.train()


@scenario(only=("fsdp2",), raises={"fsdp2": "was written while its unit was gathered"})
def a_weight_is_written_between_forward_and_backward(run: Run) -> None:
    run.zero()
    run.forward()
    with torch.no_grad():
        for parameter in run.inner.parameters():
            parameter.clamp_(-0.01, 0.01)
    run.backward(0)
    run.finish()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@scenario(make=Double, optimizer=lambda run: megatron(run, clip_grad=0.01), rtol=1e-14)  # 2^-53 times 100 additions
def double_precision_is_clipped_in_double(run: Run) -> None:
    run.train(2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(11, 11, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.phase[tokens].real


@scenario(make=Complex, optimizer=None, raises=for_kinds(KINDS, "phase is complex"))
def complex_parameters(run: Run) -> None:
    pass


@scenario(only=("fsdp2",))
def lists_do_not_grow_in_evaluations(run: Run) -> None:
    run.train()
    lengths = set()
    for _ in range(3):
        with torch.no_grad():
            run.forward()
        if not run.is_plain:
            state = run.inner._get_fsdp_state()
            lengths.add((len(state._comm_ctx.post_forward_order), len(run.model.sharded._prefetcher._order)))
    assert len(lengths) <= 1, lengths


# ---- the comparison


def _plain(name: str, kind: str) -> dict[str, Tensor]:
    case = SCENARIOS[name]
    run = Plain(case.make(), case.optimizer, adds_ranks_first=kind == "zero2_every_micro_batch")
    case.go(run)
    return run.weights()


def _all_scenarios(kind: str) -> dict[str, str]:
    """By scenario what happened: nothing, or what was wrong."""
    return {name: _outcome(name, kind) for name, case in SCENARIOS.items() if kind in case.only}


def _gathering_slowly() -> Any:
    """So that what does not wait for parameters that are being gathered reads old ones."""
    all_gather = collectives.all_gather

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.01)
        all_gather(*args, **options)

    return mock.patch.object(collectives, "all_gather", slow)


def largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _outcome(name: str, kind: str) -> str:
    case = SCENARIOS[name]
    pattern = case.raises.get(kind)
    gathers = _gathering_slowly() if "overlap" in kind else nullcontext()
    try:
        with gathers:
            run = Wrapped(kind, case.make(), case.optimizer, **case.settings.get(kind, {}))
            case.go(run)
            found = run.weights()
    except Exception as error:
        if pattern and re.search(pattern, str(error)):
            return "as expected"
        return f"raised {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    if pattern:
        return f"did not raise {pattern!r}"
    expected = _plain(name, kind)
    wrong = {key: largest(found[key].double() - expected[key].double()) for key in expected}
    wrong = {key: off for key, off in wrong.items() if not off <= case.rtol * largest(expected[key])}
    return f"differs: {wrong}" if wrong else "as expected"


@functools.cache
def outcomes(kind: str) -> list[dict[str, str]]:
    return run_distributed(_all_scenarios, 2, kind, limit_s=500)  # seconds, of which a busy machine takes many


def cases() -> Iterator[tuple[str, str]]:
    for name, case in SCENARIOS.items():
        for kind in case.only:
            yield name, kind


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_what_works_on_a_plain_module_gives_that_result_or_raises(name: str, kind: str) -> None:
    found = {outcome[name] for outcome in outcomes(kind)}
    assert found == {"as expected"}, "\n".join(found)


def _wraps_other_ties(kind: str) -> str:
    try:
        build(kind, toy(tied=dist.get_rank() == 0))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ties_that_differ_between_ranks_are_refused(kind: str) -> None:
    for message in run_distributed(_wraps_other_ties, 2, kind):
        assert "wrap different models" in message
