"""CUDA's kernel for sequences of different lengths, computed by others that every device has."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F


def flash_attention_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernel and that of its derivative."""
    import torch._inductor.lowering  # reads all of torch.ops.aten when it is imported: before the replacement

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash_by_hand)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _flash_backward_by_hand)


def _flash_by_hand(query, key, value, bounds, bounds_k, longest, longest_k, dropout, causal, debug, *, scale):
    """Calls torch's kernel for documents, one behind the other, `[tokens, heads, d]`, on any device; without its
    rest."""
    assert (bounds.dtype, bounds_k, longest_k) == (torch.int32, bounds, longest) and causal and not debug
    assert all(tensor.shape[-1] % 8 == 0 for tensor in (query, key, value))
    ends = bounds.tolist()
    assert ends[-1] == len(query) and max(b - a for a, b in pairwise(ends)) == longest
    parts = []
    for begin, end in pairwise(ends):
        own = [tensor[begin:end].transpose(0, 1) for tensor in (query, key, value)]
        parts.append(F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True, scale=scale))
    return torch.cat(parts, 1).transpose(0, 1), query.new_zeros(query.shape[1], len(query))


def _flash_backward_by_hand(grad, query, key, value, output, logsumexp, *rest, scale):
    """Computes the derivative of `_flash_by_hand`."""
    *arguments, dropout, causal, _, _ = rest
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        actual = _flash_by_hand(*leaves, *arguments, dropout, causal, False, scale=scale)[0]
    torch.testing.assert_close(actual, output)
    return torch.autograd.grad(actual, leaves, grad)
