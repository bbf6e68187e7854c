"""Scenarios of weights that something else than an optimizer writes or reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.dist_checkpointing.global_view import local_slices
from tests.unit.distributed._toys import full, toy
from tests.unit.distributed.outside_the_loop.scenario import HIDDEN, Run, bf16_toy, largest, scenario


@scenario(make=bf16_toy)
def weights_are_loaded_under_low_precision(run: Run) -> None:
    run.train(2)
    loaded = toy(seed=7, tied=False).bfloat16().state_dict()
    run.load(loaded)
    run.train(2, first=2)
    # Two steps of AdamW at a rate of 0.05 move a weight by 0.1 or so; the one that was trained was up to 3 away.
    assert all(largest(tensor - loaded[name]) < 0.3 for name, tensor in run.weights().items())


@scenario(make=bf16_toy, raises=HIDDEN)
def rows_change_places_under_low_precision(run: Run) -> None:
    run.train(2)
    for parameter in run.inner.parameters():
        values = full(parameter)
        values[[0, -1]] = values[[-1, 0]]  # no sum of all bits differs
        local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        slices = local_slices(parameter)
        local.copy_(values[slices])
    run.train(2, first=2)


@scenario()
def weights_are_loaded_right_after_the_step(run: Run) -> None:
    for step in range(2):
        run.train(1, first=step)
        run.load(toy(seed=7 + step, tied=False).state_dict())
    run.train(1, first=2)


@scenario()
def weights_are_loaded_after_a_forward_without_backward(run: Run) -> None:
    run.train()
    run.forward(1)
    run.load(toy(seed=7, tied=False).state_dict())
    run.train(1, first=2)


@scenario(make=bf16_toy, raises=HIDDEN)
def weights_are_written_through_data_under_low_precision(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        if step:  # from at most 0.1, by one step of AdamW at a rate of 0.05
            assert all(largest(parameter) < 0.2 for parameter in run.weights().values() if parameter.ndim == 2)
        for parameter in run.inner.parameters():
            parameter.data.clamp_(-0.1, 0.1)


@scenario(make=bf16_toy, raises=HIDDEN)
def weights_are_clamped_right_after_the_step_in_low_precision(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        with torch.no_grad():
            for parameter in run.inner.parameters():
                parameter.clamp_(-0.1, 0.1)


@scenario(raises=HIDDEN)
def weights_are_clamped_right_after_the_step(run: Run) -> None:
    held = list(run.inner.parameters())
    for step in range(3):
        run.train(1, first=step)
        with torch.no_grad():
            for parameter in held:
                parameter.clamp_(-0.1, 0.1)


@scenario(raises=HIDDEN)
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


@scenario(raises=HIDDEN)
def a_child_is_saved_and_loaded_right_after_the_step(run: Run) -> None:
    run.train()
    saved = {name: tensor.clone() for name, tensor in run.inner.blocks[0].state_dict().items()}
    run.train(1, first=1)
    run.inner.blocks[0].load_state_dict(saved)
    run.train(1, first=2)


@scenario(make=bf16_toy)
def whole_weights_are_written_in_low_precision(run: Run) -> None:
    for step in range(3):
        run.train(1, first=step)
        with run.whole_parameters():
            for parameter in run.inner.parameters():
                parameter.data.clamp_(-0.1, 0.1)


@scenario()
def an_average_of_whole_weights_takes_their_place(run: Run) -> None:
    held = list(run.inner.parameters())
    with run.whole_parameters():
        average = [torch.zeros_like(parameter).detach() for parameter in held]
    for step in range(3):
        run.train(1, first=step)
        with run.whole_parameters(), torch.no_grad():
            torch._foreach_lerp_(average, held, 0.5)
            if step == 1:
                for parameter, mean in zip(held, average, strict=True):
                    parameter.copy_(mean)


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


@scenario(  # attention's fast path, in evaluation, wants parameters of torch's own class
    make=Attention, raises={"fsdp2": "was used outside the forward of its unit"}, rtol_of={"zero3": 1e-6}
)
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


@scenario(only=("fsdp2",), raises={"fsdp2": "was written while its unit was gathered"})
def a_weight_is_written_between_forward_and_backward(run: Run) -> None:
    run.zero()
    run.forward()
    with torch.no_grad():
        for parameter in run.inner.parameters():
            parameter.clamp_(-0.01, 0.01)
    run.backward(0)
    run.finish()
