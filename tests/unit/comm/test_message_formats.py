"""Values in fewer bits on their way: how far they are off has a bound, and no cut over ranks changes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.base import fused
from core.comm.message_formats import BLOCK, OWN_DTYPE, MessageFormat, format_of_all, has_whole_blocks, message_bytes
from tests.unit._on_gpu import needs_gpu

FORMATS = ("int8", "fp8", "bf16")
DTYPES = (torch.float32, torch.bfloat16)


def _values(numel: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes over many binades, with zeros, a block of zeros and one of numbers below the normal ones."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).mul(3).exp()
    values[::17] = 0.0
    values[BLOCK : 2 * BLOCK] = 0.0
    values[2 * BLOCK : 3 * BLOCK] = torch.randn(BLOCK, generator=generator) * 1e-40
    return values.to(dtype)


def _sent(values: Tensor, name: str, shards: int = 1) -> Tensor:
    format_ = format_of_all(name, len(values) // shards, values.dtype)
    arrived = torch.full_like(values, torch.nan)
    format_.decode(format_.encode(values), arrived)
    return arrived


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_what_arrives_is_within_the_stated_bound(name: str, dtype: torch.dtype) -> None:
    values = _values(40 * BLOCK, dtype)
    blocks, error = (t.double().view(-1, BLOCK) for t in (values, _sent(values, name).double() - values.double()))
    largest = blocks.abs().amax(1, keepdim=True)
    bound = {
        "int8": (largest / 254).expand_as(blocks),
        "fp8": torch.maximum(blocks.abs() / 16, largest / 458_752),
        "bf16": blocks.abs() / 256,
    }[name]
    # Three roundings in fp32 on the way, then one to the tensor's dtype, and below its normal numbers a fixed step.
    own = torch.finfo(dtype)
    slack = (largest + bound) * (4 * torch.finfo(torch.float32).eps + own.eps / 2 * (dtype != torch.float32))
    least = torch.finfo(torch.bfloat16 if name == "bf16" else dtype)
    assert (error.abs() <= bound + slack + 4 * least.smallest_normal * least.eps).all()
    if name != "bf16":
        assert (error.abs() > bound / 4).any()  # the bound says something
        assert torch.equal(_sent(values, name).view(-1, BLOCK).abs().amax(1), values.view(-1, BLOCK).abs().amax(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_shards_send_what_one_rank_would(name: str, dtype: torch.dtype) -> None:
    values = _values(24 * BLOCK, dtype)
    once = _sent(values, name)
    for shards in (2, 3, 4, 8, 24):
        assert torch.equal(_sent(values, name, shards), once)
        parts = [_sent(part, name) for part in values.chunk(shards)]  # cast, then gathered
        assert torch.equal(torch.cat(parts), once)
    assert torch.equal(_sent(once, name), once)  # as neighbours send what they keep of a gathered unit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_runs_travel_next_to_what_is_not_encoded(name: str, dtype: torch.dtype) -> None:
    segments = [(3, OWN_DTYPE), (2 * BLOCK, name), (7, OWN_DTYPE), (BLOCK, name), (1, OWN_DTYPE)]
    length = sum(numel for numel, _ in segments)
    values = _values(3 * length, dtype)
    format_ = MessageFormat(segments, dtype)
    messages, arrived = format_.encode(values), torch.full_like(values, torch.nan)
    assert len(messages) == 3 * sum(message_bytes(of, numel, dtype) for numel, of in segments)
    format_.decode(messages, arrived)
    alone = torch.full((length,), torch.nan)
    format_.decode(messages.chunk(3)[1], alone)  # as a rank adds it in fp32
    for row, source in zip(arrived.view(3, -1), values.view(3, -1), strict=True):
        for part, own, (_, of) in zip(
            row.split([n for n, _ in segments]), source.split([n for n, _ in segments]), segments, strict=True
        ):
            assert torch.equal(part, own if of == OWN_DTYPE else _sent(own.clone(), name))
    assert torch.equal(alone.to(dtype), arrived.view(3, -1)[1])


def test_compiled_code_sends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _values(8 * BLOCK, torch.float32)
    expected = _sent(values, "int8")
    monkeypatch.setattr(fused, "COMPILED_ON", ["cuda", "cpu"])
    assert torch.equal(_sent(values, "int8"), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_sends_codes_within_a_step_of_a_cpus(name: str, dtype: torch.dtype) -> None:
    """Its kernel may divide otherwise in the last bit, which changes the code of a value in the middle of two."""
    values = _values(24 * BLOCK, dtype)
    here, there = _sent(values, name), _sent(values.cuda(), name).cpu()
    step = values.float().view(-1, BLOCK).abs().amax(1, keepdim=True) / 127 + values.float().abs().view(-1, BLOCK) / 8
    assert ((here.float() - there.float()).view(-1, BLOCK).abs() <= step).all()
    for shards in (2, 8):
        assert torch.equal(_sent(values.cuda(), name, shards).cpu(), there)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """An overflow of scaled gradients has to be seen after their reduction."""
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    is_finite = _sent(values, name).isfinite().view(3, BLOCK)
    assert not is_finite[1, 5] and is_finite[0].all() and is_finite[2].all()


def test_bytes_are_a_quarter_of_fp32() -> None:
    assert message_bytes("int8", 1 << 20, torch.float32) == (1 << 20) + 4 * (1 << 12) < 0.26 * (4 << 20)
    assert message_bytes("fp8", 1 << 20, torch.bfloat16) == (1 << 20) + 4 * (1 << 12)
    assert message_bytes("bf16", 1 << 20, torch.float32) == 2 << 20
    assert message_bytes(None, 10, torch.bfloat16) == message_bytes(OWN_DTYPE, 10, torch.bfloat16) == 20


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 256), True), ((8, 2, 128), True), ((256,), False), ((256, 100), False), ((3, 0), False), ((), False)],
)
def test_rows_of_whole_blocks_are_found(shape: tuple[int, ...], expected: bool) -> None:
    assert has_whole_blocks(shape) is expected
