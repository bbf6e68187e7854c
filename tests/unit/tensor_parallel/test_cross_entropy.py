"""The loss over a split vocabulary compared with torch's over the whole: values, gradients, precision, extremes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.base.errors import ConfigError, DataError
from core.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy
from tests.unit._spawn import on_ranks
from tests.unit.tensor_parallel._layers import all_gather, own

S, B, V = 5, 3, 14


def _logits(scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(S, B, V, generator=torch.Generator().manual_seed(2)) * scale).to(dtype)


def _targets() -> torch.Tensor:
    targets = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(4))
    targets[0, 0], targets[1, 1], targets[2, 0] = 0, V - 1, -100
    return targets


@pytest.mark.parametrize(
    ("scale", "dtype", "chunk_elements"),
    [
        (3.0, torch.float32, 2**24),  # all tokens at once
        (3.0, torch.float32, 3 * V),  # a few at a time, uneven at the end
        (1e4, torch.float32, 2**24),  # finite losses of large logits
        (3.0, torch.bfloat16, 2**24),  # summed in fp32
    ],
)
@on_ranks(2)
def test_two_ranks_equal_torch_on_the_whole_vocabulary(scale: float, dtype: torch.dtype, chunk_elements: int):
    target = _targets()
    weights = torch.rand(S, B, generator=torch.Generator().manual_seed(6))
    whole = _logits(scale, dtype).requires_grad_()
    reference = F.cross_entropy(whole.double().view(-1, V), target.view(-1), reduction="none").view(S, B)
    (reference * weights).sum().backward()

    part = own(_logits(scale, dtype), -1).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_CHUNK_ELEMENTS", chunk_elements)
        loss = vocab_parallel_cross_entropy(part, target, tp_group=dist.group.WORLD)
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss.double(), reference.detach(), rtol=1e-06, atol=1e-06)
        assert loss[2, 0] == 0
        before = part.detach().clone()
        (loss * weights).sum().backward(retain_graph=True)
        first = part.grad.clone()
        part.grad = None
        (loss * weights).sum().backward()  # nothing that the first backward needed was overwritten
    assert torch.equal(part.grad, first)
    assert torch.equal(part, before)
    gradient = all_gather(part.grad, -1)
    assert gradient.dtype is dtype
    assert not gradient[2, 0].any()
    grad_tolerance = 4e-3 if dtype is torch.bfloat16 else 1e-06  # half a last place of the bf16 gradient
    torch.testing.assert_close(gradient, whole.grad, rtol=grad_tolerance, atol=1e-6)


@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 2**20])
def test_one_rank_equals_torch(chunk_elements, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", chunk_elements)
    target = _targets().view(-1)
    ours, theirs = (_logits(3.0, torch.float32).view(-1, V).requires_grad_() for _ in range(2))
    loss = vocab_parallel_cross_entropy(ours, target)
    reference = F.cross_entropy(theirs, target, reduction="none")
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    loss.square().sum().backward()
    reference.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def _plain_formula(
    logits: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns losses and the gradient of `[n, v]` logits, in torch's operations on all rows at once."""
    ignored, v = target == -100, logits.shape[1]
    column = target.masked_fill(ignored, 0).unsqueeze(1)
    off = smoothing * v / (v - 1)
    log_sum = logits.float().logsumexp(1)
    of_target = logits.float().gather(1, column).squeeze(1).masked_fill(ignored, 0.0)
    mean = (1.0 - off) * of_target + (off / v) * logits.float().sum(1) if smoothing else of_target
    probability = (logits.float() - log_sum.unsqueeze(1)).exp()
    if smoothing:
        probability = probability - off / v
    probability.scatter_add_(1, column, -(~ignored).float().mul_(1.0 - off).unsqueeze(1))
    gradient = probability * weights.masked_fill(ignored, 0.0).unsqueeze(1)
    return (log_sum - mean).masked_fill(ignored, 0.0), gradient.to(logits.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunks_of_rows_have_the_bits_of_the_formula(dtype, smoothing, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", 4 * V)  # uneven at the end
    target, weights = _targets().view(-1), torch.rand(S * B, generator=torch.Generator().manual_seed(6))
    logits = _logits(3.0, dtype).view(-1, V).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, target, smoothing)
    (loss * weights).sum().backward()
    expected, gradient = _plain_formula(before, target, weights, smoothing)
    assert torch.equal(loss, expected) and torch.equal(logits.grad, gradient) and torch.equal(logits, before)


@on_ranks(2)
def test_a_rank_whose_logits_are_all_masked():
    target = torch.full((4,), 1)
    whole = _logits(3.0, torch.float32).view(-1, V)[:4].clone()
    whole[:, V // 2 :] = -torch.inf
    part = own(whole, -1).requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, tp_group=dist.group.WORLD)
    loss.sum().backward()
    torch.testing.assert_close(loss, F.cross_entropy(whole[:, : V // 2], target, reduction="none"))
    assert all_gather(part.grad, -1)[:, V // 2 :].eq(0).all()


def test_no_tokens_have_no_losses():
    logits = torch.zeros(0, V, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(0, dtype=torch.long))
    loss.sum().backward()
    assert loss.shape == (0,) and logits.grad.shape == (0, V)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_traced_in_a_larger_graph(smoothing):
    torch._dynamo.reset()
    target = _targets().view(-1)
    ours, theirs = (_logits(3.0, torch.float32).view(-1, V).requires_grad_() for _ in range(2))

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits * 2, target, smoothing) * 2

    actual = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(ours)
    expected = loss_of(theirs)
    for loss in (actual, expected):
        loss.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_invalid_target_is_named_on_every_rank():
    with pytest.raises(DataError) as caught:
        vocab_parallel_cross_entropy(torch.zeros(1, 2, V // 2), torch.tensor([[0, V]]), tp_group=dist.group.WORLD)
    message = str(caught.value)
    assert f"target id {V} is outside the vocabulary of {V}" in message


@on_ranks(2)
def test_label_smoothing_is_over_the_whole_vocabulary():
    target = _targets()
    whole = _logits(3.0, torch.float32).requires_grad_()
    # torch gives every token smoothing / V of the target, Megatron-LM smoothing / (V - 1) to those that are not it
    reference = F.cross_entropy(
        whole.double().view(-1, V), target.view(-1), reduction="none", label_smoothing=0.1 * V / (V - 1)
    ).view(S, B)
    reference.sum().backward()
    part = own(_logits(3.0, torch.float32), -1).requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, 0.1, dist.group.WORLD)
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), reference.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(all_gather(part.grad, -1), whole.grad, rtol=1e-5, atol=1e-6)


def test_group_passed_as_label_smoothing_is_refused():
    for wrong in (1.0, -0.1, object()):
        with pytest.raises(ConfigError, match=r"label_smoothing is .*tp_group"):
            vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([0]), wrong)
