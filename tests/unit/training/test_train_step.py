"""One step compared with arithmetic by hand: weights of micro-batches and ranks, and the reported numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import MemoryLimitError
from core.distributed import wrap_model
from core.optimizer import get_megatron_optimizer
from core.training.config import PretrainConfig
from core.training.state import build_scheduler
from core.training.train_step import TIME_IS_OVER, Batch, StepResult, evaluate, train_step
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import full
from tests.unit.training._configs import batches, model_of, small_config

STARTS = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 4], [0, 1, 1, 1, 1, 5, 5, 5]])
"""Where documents begin, `[b, s]`: two of one token, and borders off those of chunks."""


def _of_a_step(config: PretrainConfig, rank: int, packed: bool) -> list[Batch]:
    return [batch | ({"document_starts": STARTS} if packed else {}) for batch in batches(config, rank, 2)]


def _run_of(config: PretrainConfig) -> tuple[Any, Any, Any]:
    """Returns the wrapped model of a config, its optimizer and its schedule."""
    parallel_state.initialize_model_parallel(
        config.model.tensor_model_parallel_size, context_parallel_size=config.model.context_parallel_size
    )
    model = wrap_model(model_of(config), config.model, config.ddp)
    optimizer = get_megatron_optimizer(config.optimizer, [model])
    return model, optimizer, build_scheduler(config, optimizer)


def step_on_ranks(
    changes: dict, stopping_rank: int | None, packed: bool = False, stop_requested: int = 1
) -> tuple[StepResult, float, dict[str, torch.Tensor]]:
    config = small_config(**changes)
    model, optimizer, scheduler = _run_of(config)
    mine = _of_a_step(config, parallel_state.get_data_parallel_rank(), packed)
    before = evaluate(model, iter(mine), 2)
    asked = stop_requested if dist.get_rank() == stopping_rank else 0
    running = train_step(model, optimizer, scheduler, iter(mine), 2, stop_requested=asked)
    result = running.result()
    assert scheduler.num_steps == 1
    whole = {name: full(p) for name, p in model.module.named_parameters()}
    return result, before, whole


def expected_step(
    changes: dict, num_ranks: int, packed: bool = False
) -> tuple[float, float, dict[str, torch.Tensor], float]:
    """Returns loss, mean loss over tokens, weights after a step of SGD, and gradient norm: one process, one sum."""
    config = small_config(**changes)
    model = model_of(config)
    per_token = config.model.calculate_per_token_loss
    everything = [batch for rank in range(num_ranks) for batch in _of_a_step(config, rank, packed)]
    sums, counts = [], []
    for batch in everything:
        starts = batch.get("document_starts")
        losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], document_starts=starts)
        sums.append((losses * batch["loss_mask"]).sum())
        counts.append(batch["loss_mask"].sum())
    over_tokens = torch.stack(sums).sum() / torch.stack(counts).sum()
    loss = over_tokens if per_token else torch.stack([s / c for s, c in zip(sums, counts, strict=True)]).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= config.optimizer.lr * parameter.grad
    return loss.item(), over_tokens.item(), dict(model.named_parameters()), norm


SGD = {
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "lr": 0.5,
    "global_batch_size": 8,
}


PER_TOKEN, CUT = {"calculate_per_token_loss": True}, {"context_parallel_size": 2, "global_batch_size": 4}


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("loss_of", [{}, PER_TOKEN], ids=["mean of means", "per token"])
@pytest.mark.parametrize("ranks", [{}, {"use_torch_fsdp2": True}, CUT], ids=["ddp", "fsdp2", "cut sequences"])
def test_a_step_on_two_ranks_is_the_step_of_one_process(ranks: dict, loss_of: dict, packed: bool) -> None:
    # In one of the two halves of sequences the mask hides other tokens, and these must not weigh more for that.
    is_cut, changes = ranks is CUT, {**SGD, **ranks, **loss_of}
    loss, over_tokens, weights, norm = expected_step(
        {**changes, "context_parallel_size": 1}, 1 if is_cut else 2, packed
    )
    assert abs(loss - over_tokens) > 1e-3 or loss_of or is_cut  # the two ways to weigh differ here
    for result, before, found in run_distributed(step_on_ranks, 2, changes, 1 if is_cut else None, packed):
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert before == pytest.approx(over_tokens, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.has_update and result.stop == is_cut  # what one of the ranks of a sequence was asked
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rank", "asked"), [(0, 1), (1, 1), (1, TIME_IS_OVER)])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_ranks_agree_to_stop_and_why(rank: int, asked: int, tensor_parallel: int) -> None:
    changes = {"tensor_model_parallel_size": tensor_parallel, "global_batch_size": 8}
    results: Iterator[StepResult] = (r for r, _, _ in run_distributed(step_on_ranks, 2, changes, rank, False, asked))
    assert all(result.stop and result.is_late == (asked == TIME_IS_OVER) for result in results)


@on_ranks(1)
def test_the_schedule_waits_for_a_step_that_was_skipped() -> None:
    config = small_config(**SGD | {"lr_warmup_iters": 2, "global_batch_size": 2})
    model, optimizer, scheduler = _run_of(config)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.inf)
    result = train_step(model, optimizer, scheduler, iter(batches(config, 0, 1)), 1).result()
    assert (result.has_update, scheduler.num_steps, optimizer.param_groups[0]["lr"]) == (False, 0, 0.0)


def _asks_for_too_much(*unused: object) -> None:
    torch.empty(2**60)


@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
@on_ranks(1)
def test_a_failure_outside_of_forward_is_explained(fsdp2: bool) -> None:
    config = small_config(use_torch_fsdp2=fsdp2)
    model, optimizer, scheduler = _run_of(config)
    optimizer.optimizer.register_step_post_hook(_asks_for_too_much)
    with pytest.raises(MemoryLimitError) as caught:
        train_step(model, optimizer, scheduler, iter(batches(config, 0, 1)), 1)
    message = str(caught.value)
    assert "rank 0 could not allocate 4 EiB more" in message
    for category in ("parameters", "gradients", "optimizer state", "activations and other"):
        assert f"\n  {category}  " in message
