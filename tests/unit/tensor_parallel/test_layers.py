"""Layers split over two ranks compared with the serial layer: outputs and gradients, bitwise on exact integers."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from core import parallel_state
from core.base.errors import ConfigError, DataError, ParallelConfigError
from core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    draw_init_seed,
    initialize_parameters,
)
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.tensor_parallel._layers import OUT, B, H, S, V, all_gather, config, integer_tensor, integers, own, pair


def _check_column(sequence_parallel: bool, gather_output: bool, skip_bias_add: bool) -> None:
    options = {"gather_output": gather_output, "skip_bias_add": skip_bias_add}
    serial, parallel = pair(ColumnParallelLinear, H, OUT, sequence_parallel=sequence_parallel, **options)
    whole = integer_tensor(S, B, H)  # [s, b, h]
    x = whole.clone().requires_grad_()
    x_part = (own(whole, 0) if sequence_parallel else whole).clone().requires_grad_()
    y, bias = serial(x)
    y_part, bias_part = parallel(x_part)
    assert torch.equal(y_part, y if gather_output else own(y, -1))
    upstream = integer_tensor(S, B, OUT, seed=8)
    y.backward(upstream)
    y_part.backward(upstream if gather_output else own(upstream, -1))
    assert torch.equal(x_part.grad, own(x.grad, 0) if sequence_parallel else x.grad)
    assert torch.equal(all_gather(parallel.weight.grad, 0), serial.weight.grad)
    if skip_bias_add:
        assert torch.equal(all_gather(bias_part, 0), bias)
    else:
        assert bias_part is None
        assert torch.equal(all_gather(parallel.bias.grad, 0), serial.bias.grad)


def _check_row(sequence_parallel: bool, input_is_parallel: bool, skip_bias_add: bool) -> None:
    options = {"input_is_parallel": input_is_parallel, "skip_bias_add": skip_bias_add}
    serial, parallel = pair(RowParallelLinear, H, OUT, sequence_parallel=sequence_parallel, **options)
    whole = integer_tensor(S, B, H)
    x = whole.clone().requires_grad_()
    x_part = (own(whole, -1) if input_is_parallel else whole).clone().requires_grad_()
    y, bias = serial(x)
    y_part, bias_part = parallel(x_part)
    assert torch.equal(y_part, own(y, 0) if sequence_parallel else y)
    upstream = integer_tensor(S, B, OUT, seed=8)
    y.backward(upstream)
    y_part.backward(own(upstream, 0) if sequence_parallel else upstream)
    assert torch.equal(x_part.grad, own(x.grad, -1) if input_is_parallel else x.grad)
    assert torch.equal(all_gather(parallel.weight.grad, 1), serial.weight.grad)
    if skip_bias_add:
        assert torch.equal(bias_part, bias)
        return
    bias_grad = parallel.bias.grad
    assert parallel.bias.sequence_parallel is sequence_parallel
    if sequence_parallel:  # which the mark promises: each rank saw a part of the sequence
        dist.all_reduce(bias_grad)
    assert torch.equal(bias_grad, serial.bias.grad)


def _check_embedding(sequence_parallel: bool) -> None:
    serial, parallel = pair(
        VocabParallelEmbedding, V, H, sequence_parallel=sequence_parallel, reduce_scatter_embeddings=sequence_parallel
    )
    ids = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(5))  # [b, s]
    y, y_part = serial(ids), parallel(ids)
    upstream = integer_tensor(*y.shape)
    assert y.shape == ((S, B, H) if sequence_parallel else (B, S, H))
    assert torch.equal(y_part, own(y, 0) if sequence_parallel else y)
    y.backward(upstream)
    y_part.backward(own(upstream, 0) if sequence_parallel else upstream)
    assert torch.equal(all_gather(parallel.weight.grad, 0), serial.weight.grad)


def _check_tied() -> None:
    """The output layer reads the embedding's rows: one table, two gradients that add up in it."""
    embedding, embedding_part = pair(VocabParallelEmbedding, V, H)
    ids = torch.arange(S * B).view(B, S) % V
    upstream = integer_tensor(B, S, V)
    for table, cut in ((embedding, None), (embedding_part, -1)):
        options = {"config": table.config, "init_method": integers, "tp_group": table.tp_group}
        head = ColumnParallelLinear(H, V, bias=False, skip_weight_param_allocation=True, **options)
        assert not list(head.parameters())
        with pytest.raises(ConfigError, match="owns no weight"):
            head(torch.zeros(1, 1, H))
        with pytest.raises(ConfigError, match=r"\(3, 4\), not"):
            head(torch.zeros(1, 1, H), torch.zeros(3, H))
        logits, _ = head(table(ids), table.weight)
        logits.backward(upstream if cut is None else own(upstream, cut))
    assert torch.equal(all_gather(embedding_part.weight.grad, 0), embedding.weight.grad)


def _check_autocast() -> None:
    """Computes in bf16, with a weight gradient in fp32."""
    serial, parallel = pair(ColumnParallelLinear, H, OUT)
    results = []
    for layer in (serial, parallel):
        x = integer_tensor(S, B, H).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x)
        assert y.dtype is torch.bfloat16
        upstream = integer_tensor(S, B, OUT, seed=8).bfloat16()
        y.backward(upstream if layer is serial else own(upstream, -1))
        assert layer.weight.grad.dtype is torch.float32
        results.append((x.grad, layer.weight.grad))
    # bf16 rounds each rank's addend of the input gradient: three of its last places at values up to 160.
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=3.0)
    assert torch.equal(all_gather(results[1][1], 0), results[0][1])


def _check_copied_and_saved() -> None:
    """Marks of parameters survive copies and assignment."""
    _, layer = pair(RowParallelLinear, H, OUT, sequence_parallel=True)
    twin = copy.deepcopy(layer)
    assert twin.tp_group is layer.tp_group
    assert twin.weight.partition_dim == 1
    twin.load_state_dict(layer.state_dict(), assign=True)
    assert twin.weight.tensor_model_parallel
    assert twin.bias.sequence_parallel
    assert torch.equal(twin(integer_tensor(S, B, 2))[0], layer(integer_tensor(S, B, 2))[0])


def _check_default_group() -> None:
    """A column and a row layer in a row, with the sequence cut outside of them, in the group of parallel_state."""
    serial = _two_layers(tp=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    parallel = _two_layers(tp=2)
    assert parallel[0].tp_group is parallel_state.get_tensor_model_parallel_group()
    whole = integer_tensor(S, B, H)
    x, x_part = whole.clone().requires_grad_(), own(whole, 0).clone().requires_grad_()
    y = serial[1](serial[0](x)[0])[0]  # built before there was a group, these two stay alone
    y_part = parallel[1](parallel[0](x_part)[0])[0]
    assert torch.equal(y_part, own(y, 0))
    y.backward(integer_tensor(S, B, H, seed=8))
    y_part.backward(own(integer_tensor(S, B, H, seed=8), 0))
    assert torch.equal(x_part.grad, own(x.grad, 0))
    assert torch.equal(all_gather(parallel[0].weight.grad, 0), serial[0].weight.grad)
    assert torch.equal(all_gather(parallel[1].weight.grad, 1), serial[1].weight.grad)
    before = serial[0].weight.detach().clone()
    torch.manual_seed(0)
    initialize_parameters(serial[0], draw_init_seed())
    assert torch.equal(serial[0].weight, before)


def _two_layers(tp: int) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    torch.manual_seed(0)
    options = {"config": config(tp, sequence_parallel=tp > 1), "init_method": integers}
    return ColumnParallelLinear(H, OUT, **options), RowParallelLinear(OUT, H, **options)


def _check_under_fsdp2() -> None:
    """FSDP2 gathers the fp32 weight as bf16 and frees it between forward and backward; the integers fit in bf16."""
    serial, parallel = pair(ColumnParallelLinear, H, OUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mesh = parallel_state.get_data_parallel_mesh()  # of this rank alone
    fully_shard(parallel, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x, x_cast = integer_tensor(S, B, H).requires_grad_(), integer_tensor(S, B, H).requires_grad_()
    y, y_part = serial(x)[0], parallel(x_cast)[0]
    assert y_part.dtype is torch.bfloat16
    assert torch.equal(y_part.float(), own(y, -1))
    upstream = integer_tensor(S, B, OUT, seed=8)
    y.backward(upstream)
    y_part.backward(own(upstream, -1).bfloat16())
    assert torch.equal(x_cast.grad, x.grad)
    assert torch.equal(all_gather(parallel.weight.grad.to_local(), 0), serial.weight.grad)
    assert torch.equal(all_gather(parallel.bias.grad.to_local(), 0), serial.bias.grad)


@on_ranks(2)
def test_layers_over_two_ranks_equal_serial():
    for settings in product([False, True], repeat=3):
        _check_column(*settings)
    for cuts, skip_bias_add in product([(False, True), (False, False), (True, True)], [False, True]):
        _check_row(*cuts, skip_bias_add)
    for sequence_parallel in (False, True):
        _check_embedding(sequence_parallel)


@pytest.mark.parametrize(
    "check", [_check_tied, _check_autocast, _check_default_group, _check_under_fsdp2, _check_copied_and_saved]
)
def test_two_ranks_agree_with_one(check):
    run_distributed(check, 2)


def test_single_rank_linear_equals_torch_in_autograd():
    layer = ColumnParallelLinear(H, OUT, config=config(), init_method=integers)
    output, bias = layer(integer_tensor(S, B, H))
    reference = torch.nn.functional.linear(integer_tensor(S, B, H), layer.weight, layer.bias)
    assert bias is None
    assert torch.equal(output, reference)
    assert output.grad_fn.name() == reference.grad_fn.name()


def _refusals() -> list[str]:
    messages = []
    group = dist.group.WORLD
    for build in (
        lambda: ColumnParallelLinear(4, 5, config=config(2), init_method=integers, tp_group=group),
        lambda: RowParallelLinear(5, 4, config=config(2), init_method=integers, tp_group=group),
        lambda: VocabParallelEmbedding(5, 4, config=config(2), init_method=integers, tp_group=group),
        lambda: ColumnParallelLinear(4, 4, config=config(4), init_method=integers, tp_group=group),
        lambda: RowParallelLinear(
            4, 4, config=config(2, True), init_method=integers, input_is_parallel=False, tp_group=group
        ),
    ):
        with pytest.raises(ParallelConfigError) as caught:
            build()
        messages.append(str(caught.value))
    embedding = VocabParallelEmbedding(V, H, config=config(2), init_method=integers, tp_group=group)
    with pytest.raises(DataError) as unknown:
        embedding(torch.tensor([[0, 99]]))
    return [*messages, str(unknown.value)]


def test_indivisible_sizes_are_refused_with_remedy():
    column, row, embedding, degree, whole_input, unknown = run_distributed(_refusals, 2)[1]
    assert "output_size of a ColumnParallelLinear is 5" in column
    assert "make it 6" in column
    assert "input_size of a RowParallelLinear is 5" in row
    assert "vocabulary (num_embeddings) of a VocabParallelEmbedding is 5" in embedding
    assert "tensor_model_parallel_size is 4" in degree
    assert "there are such groups of 2" in degree
    assert "input_is_parallel=False" in whole_input
    assert "token id 99" in unknown
    assert "12 tokens" in unknown


def test_degree_without_group_is_refused_with_remedy():
    with pytest.raises(ParallelConfigError, match="call initialize_model_parallel"):
        ColumnParallelLinear(4, 4, config=config(2), init_method=integers)


@pytest.mark.parametrize("bad", [-1, V])
def test_unknown_token_is_a_data_error(bad: int):
    embedding = VocabParallelEmbedding(V, H, config=config(), init_method=integers)
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of {V}"):
        embedding(torch.tensor([[1, bad]]))
