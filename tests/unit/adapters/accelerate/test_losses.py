"""Losses that a user computes, and precisions: what torch's DDP makes of them, under every strategy."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch

from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters.accelerate._trainers import STRATEGIES, Trained, fresh_accelerate, tiny, train, trainer_of
from tests.unit.adapters.accelerate.test_trainer import EPS, assert_as_one_process, assert_same_bits
from tests.unit.distributed._hugging_face import VOCAB

pytestmark = needs("transformers", "accelerate")


def _own_class(kind: str) -> Any:
    import transformers

    class MeanOfRanks(transformers.Trainer):
        """Computes the mean of each micro-batch by itself."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss = model(**inputs).loss / self.current_gradient_accumulation_steps
            return (loss, None) if return_outputs else loss

    class Doubled(transformers.Trainer):
        """Scales the loss that the Trainer computes."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2.0 * super().compute_loss(*args, **kwargs)

    return {"mean of ranks": MeanOfRanks, "doubled": Doubled}[kind]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("mean of ranks", {}),
        ("doubled", {}),
        pytest.param(
            "doubled", {"average_tokens_across_devices": False, "max_grad_norm": 0.0}, marks=pytest.mark.long
        ),
    ],
    ids=["mean of ranks", "doubled", "tokens of ranks apart"],
)
@on_ranks(2)
def test_a_loss_of_a_subclass_counts_as_under_torchs_ddp(kind, arguments, tmp_path):
    strategies = [None, "optim_grads_params", "fsdp2"]
    folder = str(tmp_path)
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            trainer = trainer_of(tiny("llama"), folder, strategy, cls=_own_class(kind), **arguments)
            trainer.loss_is_scaled_for_ga = True
            found.append(train(trainer))
    expected, *found = found
    assert len(found) == 2
    for trained in found:
        assert_as_one_process(trained, expected)
        assert_same_bits(trained, found[0])


def _losses_of_backwards(folder: str, strategy: str | None) -> tuple[list[float], list[float]]:
    """Returns the losses that backward begins with, and those that are logged."""
    with fresh_accelerate():
        trainer = trainer_of(tiny("llama"), folder, strategy, num_train_epochs=1)
        seen: list[float] = []
        backward = trainer.accelerator.backward

        def noted(loss: torch.Tensor, **options: Any) -> None:
            seen.append(loss.item())
            backward(loss, **options)

        with mock.patch.object(trainer.accelerator, "backward", noted):
            return seen, train(trainer).losses


def test_a_per_token_loss_is_not_multiplied_by_the_world_size(tmp_path):
    stock, logged = zip(*run_distributed(_losses_of_backwards, 2, str(tmp_path), None), strict=True)
    found, as_well = zip(*run_distributed(_losses_of_backwards, 2, str(tmp_path), "optim_grads_params"), strict=True)
    assert as_well == logged
    first = [sum(of_rank[:3]) for of_rank in found]  # of the three micro-batches of the first step
    torch.testing.assert_close(sum(first), logged[0][0], rtol=32 * EPS, atol=0.0)
    torch.testing.assert_close([2.0 * loss for loss in found[0][:3]], list(stock[0][:3]), rtol=0.0, atol=0.0)


def _in_precision(
    folder: str, strategies: list[str | None], in_bf16: bool, arguments: dict[str, Any]
) -> list[Trained]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            model = tiny("qwen3").bfloat16() if in_bf16 else tiny("qwen3")
            found.append(train(trainer_of(model, folder, strategy, **arguments)))
    return found


@pytest.mark.parametrize(
    "in_bf16", [False, pytest.param(True, marks=pytest.mark.long)], ids=["autocast", "bf16 weights"]
)
def test_low_precision_is_the_same_under_every_strategy(in_bf16, tmp_path):
    arguments = {"bf16": True, "optim": "adamw_torch", "learning_rate": 0.01}
    (one,) = run_distributed(_in_precision, 1, str(tmp_path), ["no_shard"], in_bf16, arguments)[0]
    strategies = STRATEGIES if in_bf16 else ("no_shard", "optim_grads_params", "fsdp2")
    found = run_distributed(_in_precision, 2, str(tmp_path), list(strategies), in_bf16, arguments)[0]
    for strategy, trained in zip(strategies, found, strict=True):
        # A weight in bf16 has 8 bits, and a loss is the mean of such.
        torch.testing.assert_close(trained.losses, one.losses, rtol=2.0**-8, atol=0.0)
        assert {weight.dtype for weight in trained.weights.values()} == {torch.bfloat16 if in_bf16 else torch.float32}
        if in_bf16 and strategy == "fsdp2":  # FSDP2 rounds gradients to bf16 once more than buffers do
            continue
        assert_same_bits(trained, found[0])
    assert all(abs(loss - math.log(VOCAB)) < 0.3 for loss in one.losses)  # of a model that has learned little
