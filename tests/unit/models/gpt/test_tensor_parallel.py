"""A GPT cut over two tensor-parallel ranks against the same GPT on one: losses, gradients, updated weights."""

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from tests.unit._spawn import run_distributed
from tests.unit.models._cases import CASES, FUSED, batch, build, relative_error

STEPS, LR = 3, 0.05


def _train(model):
    """Returns losses and, by name, gradients of the first step and final weights, each of the whole model."""
    losses, gradients = [], {}
    for step in range(STEPS):
        ids, labels = batch(step)
        loss = model(ids, labels=labels)
        losses.append(loss.detach())
        loss.mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.sequence_parallel:
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            if step == 0:
                gradients[name] = _whole(parameter, parameter.grad)
            with torch.no_grad():
                parameter -= LR * parameter.grad
            parameter.grad = None
    return (
        losses,
        gradients,
        {name: _whole(parameter, parameter.detach()) for name, parameter in model.named_parameters()},
    )


def _whole(parameter, tensor):
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or not parameter.tensor_model_parallel:
        return tensor.clone()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)


def _train_on_two(name, sequence_parallel, fused):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    fields = {"sequence_parallel": sequence_parallel, **(FUSED if fused else {})}
    model = build(CASES[name], tensor_model_parallel_size=2, **fields)
    return _train(model)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "fused"),
    [
        *((name, sequence_parallel, False) for name in CASES for sequence_parallel in (False, True)),
        *(("gelu-learned-tied", True, True), ("swiglu-gqa-rope-rms", False, True)),
    ],
)
def test_two_tp_ranks_equal_serial(name, sequence_parallel, fused):
    # The sum over ranks rounds once more than the serial product: 1e-7, amplified tenfold in a gradient.
    losses, gradients, weights = _train(build(CASES[name]))
    for rank in run_distributed(_train_on_two, 2, name, sequence_parallel, fused):
        for actual, expected in zip(rank[0], losses, strict=True):
            assert relative_error(actual, expected) < 1e-6
        for actual, expected in ((rank[1], gradients), (rank[2], weights)):
            assert list(actual) == list(expected)
            for parameter, tensor in expected.items():
                assert relative_error(actual[parameter], tensor) < 1e-5, parameter


def _logits(parallel_output):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    case = CASES["swiglu-gqa-rope-rms"]
    model = build(case, tensor_model_parallel_size=2)
    model.parallel_output = parallel_output
    ids, labels = batch()
    return model(ids).detach(), model(ids, labels=labels).detach()


def test_sharded_and_gathered_logits_give_equal_losses():
    model = build(CASES["swiglu-gqa-rope-rms"])
    ids, labels = batch()
    logits, losses = model(ids).detach(), model(ids, labels=labels).detach()
    cut, gathered = run_distributed(_logits, 2, True), run_distributed(_logits, 2, False)
    for rank in range(2):
        torch.testing.assert_close(cut[rank][0], logits.chunk(2, -1)[rank])
        torch.testing.assert_close(gathered[rank][0], logits)
        torch.testing.assert_close(gathered[rank][1], losses)


def _with_dropout(granularity, sequence_parallel):
    """Returns losses and gradients under dropout, and what the shared and the unshared random stream draw next."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    changes = {"recompute_granularity": granularity}
    if granularity == "full":
        changes |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    model = build(
        CASES["swiglu-gqa-rope-rms"],
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        **changes,
    )
    model_parallel_manual_seed(99)
    try:
        ids, labels = batch()
        losses = model(ids, labels=labels)
        losses.mean().backward()
        with get_rng_tracker().fork():
            unshared = torch.rand(1)
        return losses.detach(), [_whole(p, p.grad) for p in model.parameters()], torch.rand(1), unshared
    finally:
        get_rng_tracker().reset()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_recomputation_repeats_dropout(sequence_parallel):
    plain = run_distributed(_with_dropout, 2, None, sequence_parallel)
    assert torch.equal(plain[0][0], plain[1][0])  # the ranks agree on the loss, whichever masks they drew
    for granularity in ("selective", "full"):
        for actual, expected in zip(
            run_distributed(_with_dropout, 2, granularity, sequence_parallel), plain, strict=True
        ):
            assert torch.equal(actual[0], expected[0])
            assert torch.equal(actual[2], expected[2]) and torch.equal(actual[3], expected[3])
            assert all(map(torch.equal, actual[1], expected[1]))
