"""Random streams that ranks share or not and their state, and recomputation that draws the numbers of the forward."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core import parallel_state
from core.base.errors import ConfigError, ParallelStateError, warn_once
from core.base.random_streams import packed_rng_state, set_packed_rng_state
from core.base.recomputation import recompute
from core.tensor_parallel import (
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
)
from core.training.state import seed_everything
from tests.unit._spawn import run_distributed


@pytest.fixture(autouse=True)
def _tracker_is_empty():
    get_rng_tracker().reset()
    yield
    get_rng_tracker().reset()


def _draws() -> dict[str, list[float]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    get_rng_tracker().reset()
    with pytest.raises(ParallelStateError, match="model_parallel_manual_seed"), get_rng_tracker().fork():
        pass  # unlike for a rank alone, the default stream would be wrong here
    model_parallel_manual_seed(11)
    shared = torch.rand(3)
    with get_rng_tracker().fork():
        own = torch.rand(3)
    shared_again = torch.rand(3)
    with get_rng_tracker().fork():
        own_again = torch.rand(3)
    get_rng_tracker().reset()
    return {"shared": [*shared.tolist(), *shared_again.tolist()], "own": [*own.tolist(), *own_again.tolist()]}


def test_ranks_share_the_default_stream_and_have_their_own():
    first, second = run_distributed(_draws, 2)
    assert first["shared"] == second["shared"]
    assert first["own"] != second["own"]
    # Megatron's rule, and neither stream disturbs the other
    torch.manual_seed(11)
    assert first["shared"] == torch.rand(6).tolist()
    for rank, drawn in enumerate((first, second)):
        torch.manual_seed(11 + 2718 + rank)
        assert drawn["own"] == torch.rand(6).tolist()


def test_fork_restores_and_advances_on_exceptions_too():
    model_parallel_manual_seed(11)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="planted"), get_rng_tracker().fork():
        first = torch.rand(2)
        raise RuntimeError("planted")
    assert torch.equal(torch.get_rng_state(), before)
    with get_rng_tracker().fork():
        assert not torch.equal(torch.rand(2), first)


def test_states_are_a_snapshot():
    model_parallel_manual_seed(11)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(2)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(2), first)


def test_streams_by_name():
    tracker = get_rng_tracker()
    before = torch.get_rng_state()
    tracker.add("mine", 3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match="'mine' exists"):
        tracker.add("mine", 4)
    with (
        pytest.raises(ParallelStateError, match=r"no random stream 'other' \(there are \['mine'\]\)"),
        tracker.fork("other"),
    ):
        pass
    torch.manual_seed(3)
    expected = torch.rand(2)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(2), expected)


def test_unseeded_tracker_uses_default_stream():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with get_rng_tracker().fork():
        assert torch.equal(torch.rand(2), expected)


def _block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Applies dropout from both streams between operations that keep activations."""
    x = F.dropout(torch.tanh(x @ weight), 0.5)
    with get_rng_tracker().fork():
        x = F.dropout(x * x, 0.5)
    return F.dropout(torch.tanh(x @ weight), 0.5)


def _run(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Runs two blocks in a row, and draws after the forward, from both streams, that a recomputation must not
    follow."""
    model_parallel_manual_seed(11)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator).requires_grad_()
    weight = torch.randn(6, 6, generator=generator).requires_grad_()
    y = call(_block, call(_block, x, weight), weight)
    after_forward = torch.rand(4)
    with get_rng_tracker().fork():
        own_after_forward = torch.rand(4)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    after_backward = torch.rand(4)
    with get_rng_tracker().fork():
        own_after_backward = torch.rand(4)
    drawn = (after_forward, own_after_forward, after_backward, own_after_backward)
    return (y.detach(), once, x.grad, weight.grad, *drawn)


def test_recomputation_changes_no_output_gradient_or_stream():
    saved = _run(lambda fn, *args: fn(*args))
    recomputed = _run(lambda fn, *args: checkpoint(fn, False, *args))
    for one, other in zip(saved, recomputed, strict=True):
        assert torch.equal(one, other)
    assert saved[1].any()
    # torch's own does not know the tracked stream: what this one adds shows
    naive = _run(lambda fn, *args: torch_checkpoint(fn, *args, use_reentrant=False))
    assert torch.equal(naive[0], saved[0])
    assert not torch.equal(naive[1], saved[1])


def test_recomputation_saves_no_activations():
    calls = []

    def fn(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        calls.append(scale)
        return (x * scale).exp().exp()

    x = torch.randn(3, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = recompute(fn, x, scale=0.5)
    # The argument alone; torch 2.11 saves an empty tensor with it.
    assert [tensor is x for tensor in saved if tensor.numel()] == [True]
    y.sum().backward()
    assert calls == [0.5, 0.5]


def test_checkpoint_second_argument_is_checked():
    x = torch.randn(3, requires_grad=True)
    for distributes in (False, True):
        y = checkpoint(torch.mul, distributes, x, 2.0)
        assert torch.equal(y, x * 2.0)
    with pytest.raises(
        ConfigError, match=r"distribute_saved_activations is of type Tensor.*checkpoint\(function, False"
    ):
        checkpoint(torch.mul, x, 2.0)


def test_distribute_saved_activations_warns_once():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="checkpoint ignores distribute_saved_activations"):
        checkpoint(torch.neg, True, torch.ones(1))


def test_megatrons_names_of_streams_take_its_arguments():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="model_parallel_cuda_manual_seed ignores ep_rank"):
        model_parallel_cuda_manual_seed(5, False, False, False, 3, 1)
    actual = get_cuda_rng_tracker().get_states()
    model_parallel_manual_seed(5, tp_rank=3)
    expected = get_cuda_rng_tracker(False, False, False).get_states()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def draws() -> list[float]:
    with get_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [torch.rand(()).item(), tracked, random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_rng_state_roundtrip():
    # Alone in its tensor-parallel group a rank forks to the default stream only where none was added.
    seed_everything(5)
    draws()  # leaves half a pair of normal numbers in both generators that make them in pairs
    packed = packed_rng_state()
    expected = draws()
    assert draws() != expected
    set_packed_rng_state(packed)
    assert draws() == expected


def test_streams_differ_between_seeds():
    seed_everything(5)
    first = draws()
    seed_everything(6)
    assert all(a != b for a, b in zip(first, draws(), strict=True))
    seed_everything(5)
    assert draws() == first
