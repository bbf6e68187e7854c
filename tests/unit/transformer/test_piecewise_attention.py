"""Attention to two sets of keys, put together, against torch's attention to both at once."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from core.transformer.attention_backend import (
    PartialAttention,
    attend,
    attend_backward,
    combine,
    has_flash_kernel,
    has_kernel,
)
from core.transformer.document_attention import attend_within_documents
from core.transformer.piecewise_attention import attend_in_pieces
from core.transformer.sequences import PackedDocuments
from tests.unit._on_gpu import ON_GPU
from tests.unit.transformer._flash import flash_attention_by_hand

BATCH, HEADS, GROUPS, LENGTH, BEFORE, CHANNELS = 2, 4, 2, 9, 14, 6


def _tensors(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Makes query, key, value and the gradient of the output; keys are those before the queries, then the queries'
    own."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, LENGTH), (GROUPS, BEFORE + LENGTH), (GROUPS, BEFORE + LENGTH), (HEADS, LENGTH)]
    return [
        torch.randn(length, BATCH, heads, CHANNELS, generator=generator).to(device, dtype).permute(1, 2, 0, 3)
        for heads, length in shapes
    ]


def _in_two(device: str, dtype: torch.dtype, dropout: float = 0.0) -> list[torch.Tensor]:
    query, key, value, grad = _tensors(device, dtype)
    before, own = slice(0, BEFORE), slice(BEFORE, None)
    parts = [
        attend(query, key[:, :, keys], value[:, :, keys], causal=causal, dropout=dropout)
        for keys, causal in ((before, False), (own, True))
    ]
    both = combine(*parts)
    grads = [
        attend_backward(
            *(
                grad,
                query,
                key[:, :, keys],
                value[:, :, keys],
                PartialAttention(both.output, both.logsumexp, part.random if dropout else ()),
            ),
            causal=causal,
            dropout=dropout,
        )
        for keys, causal, part in ((before, False, parts[0]), (own, True, parts[1]))
    ]
    key_and_value = [torch.cat((grads[0][i], grads[1][i]), 2) for i in (1, 2)]
    return [both.output, grads[0][0] + grads[1][0], *key_and_value]


def _at_once() -> list[torch.Tensor]:
    query, key, value, grad = _tensors("cpu", torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    visible = torch.ones(LENGTH, BEFORE + LENGTH, dtype=torch.bool).tril(BEFORE)
    output = F.scaled_dot_product_attention(*leaves, visible, enable_gqa=True)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 1e-2),
        pytest.param("cuda", torch.float32, 2e-3, marks=ON_GPU),  # the kernel may use TF32
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=ON_GPU),
        pytest.param("cuda", torch.float16, 2e-3, marks=ON_GPU),
    ],
)
def test_combine_equals_attention_to_all_keys(device: str, dtype: torch.dtype, tolerance: float):
    for actual, expected in zip(_in_two(device, dtype), _at_once(), strict=True):
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert (actual.cpu().double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16)])
def test_backward_repeats_dropout(dtype: torch.dtype):
    output, _, _, grad_value = _in_two("cuda", dtype, dropout=0.5)
    assert not torch.allclose(output, _in_two("cuda", dtype)[0])
    _, _, value, grad = _tensors("cuda", dtype)
    # The output is linear in the values, with weights that are those of the backward only if the same were dropped.
    actual, expected = (grad_value.double() * value.double()).sum(), (output.double() * grad.double()).sum()
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.2)


def test_dropout_has_no_kernel_on_cpu():
    query = torch.zeros(1, 1, 1, 8)
    assert has_kernel(query, 0.0) and not has_kernel(query, 0.1)


@pytest.mark.parametrize(("capability", "has_flash"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_before_ampere_have_no_flash_kernel(capability: tuple[int, int], has_flash: bool):
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        for dtype, expected in ((torch.bfloat16, has_flash), (torch.float16, has_flash), (torch.float32, True)):
            query: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"), dtype=dtype, shape=(1, 1, 4, 8))
            assert has_kernel(query, 0.0) is expected
            assert has_flash_kernel(query) is (expected and dtype is not torch.float32)


STARTS = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 7, 7], [0, 1, 1, 1, 1, 5, 5, 5, 8]])
"""Where documents begin, `[b, s]`."""


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=ON_GPU),
        pytest.param("cuda", torch.float16, 2e-3, marks=ON_GPU),
    ],
)
def test_varlen_kernel_equals_call_per_document(device, dtype, tolerance, monkeypatch):
    if device == "cpu":  # which has no such kernel
        flash_attention_by_hand(monkeypatch)
    documents = PackedDocuments(STARTS)
    # Queries, keys and values have lengths of the file's other tests: here all are as long as the queries.
    query, key, value, grad = (t.permute(2, 0, 1, 3)[-LENGTH:] for t in _tensors(device, dtype))
    actual, expected = [], []
    for results, attention in (
        (actual, lambda *leaves: attend_within_documents(*leaves, documents.bounds.to(device), documents.counts)),
        (expected, lambda *leaves: attend_in_pieces(*leaves, STARTS)),
    ):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*leaves)
        output.backward(grad)
        results += [output.detach(), *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_operations_pass_opcheck(device: str):
    """Shapes, strides, derivatives and purity, as torch checks them."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    documents = PackedDocuments(STARTS)
    leaves = [t.permute(2, 0, 1, 3)[-LENGTH:].detach().requires_grad_() for t in _tensors(device, dtype)[:3]]
    within, in_pieces = torch.ops.shardstack.attend_within_documents, torch.ops.shardstack.attend_in_pieces
    if device == "cuda":
        torch.library.opcheck(within.default, (*leaves, documents.bounds, documents.counts))
    for starts in (STARTS, None):
        torch.library.opcheck(in_pieces.default, (*leaves, starts, ""))
