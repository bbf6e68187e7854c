"""The matrices of experts: initial values, kernels, and rows that belong to no expert."""

from types import SimpleNamespace

import pytest
import torch

from core.base.errors import ConfigError
from core.base.initialization import initialize_parameters
from core.transformer.lora import add_lora
from core.transformer.moe import experts as module
from core.transformer.moe.dispatch import drop_over_capacity, sort_by_expert
from tests.unit.transformer.moe._layers import config_of, layer_of, permutation_of


def test_initial_values_of_an_expert_do_not_depend_on_the_others():
    few, many = layer_of(num_moe_experts=2), layer_of(num_moe_experts=6)
    for layer in (few, many):
        initialize_parameters(layer, 11)
    for part in ("linear_fc1", "linear_fc2"):
        ours, theirs = (getattr(layer.experts, part).weight for layer in (few, many))
        assert torch.equal(ours, theirs[:2])
        assert not torch.equal(theirs[0], theirs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_gradient_of_a_bias_is_rounded_once(dtype):
    """A sum of 8,192 ones in bf16 would stay at 256, and one of random numbers be off by some percent."""
    rows, experts = torch.arange(8192), 3
    row_experts = (rows >= 8000).long() * 2  # the second expert has none
    numbers = torch.randn(8192, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for grad in (torch.ones(8192, 5, dtype=dtype), numbers):
        bias = torch.zeros(experts, 5, dtype=dtype, requires_grad=True)
        module.rows_of_experts(bias, row_experts, dtype).backward(grad)
        expected = torch.stack([grad.double()[row_experts == e].sum(0) for e in range(experts)])
        # Sums of at most 8,192 numbers in fp32 or wider, then one rounding.
        wide = torch.finfo(torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64).eps
        bound = 8192 * wide * grad.double().abs().sum(0) / 2 + torch.finfo(dtype).eps / 2 * expected.abs()
        assert ((bias.grad.double() - expected).abs() <= bound).all()
    assert module.rows_of_experts(bias, row_experts, torch.float32).dtype == torch.float32


def test_rows_of_experts_have_their_vectors_and_derivatives():
    vectors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    row_experts = torch.tensor([0, 0, 2, 2, 2])
    assert torch.equal(module.rows_of_experts(vectors, row_experts, torch.float64), vectors[row_experts])
    assert torch.autograd.gradcheck(lambda v: module.rows_of_experts(v, row_experts, torch.float64), (vectors,))


def test_an_initializer_sees_one_matrix_at_a_time():
    shapes = []

    def init(tensor):
        shapes.append(tuple(tensor.shape))
        torch.nn.init.xavier_uniform_(tensor)

    layer_of(init_method=init, output_layer_init_method=init)
    assert shapes.count((24, 8)) == 4 and shapes.count((8, 12)) == 4  # the router's is (4, 8)


def test_rows_past_the_last_end_hold_nothing_of_memory():
    """torch computes no row past the last end, in forward and for the input's gradient: there is what was there."""
    weight = torch.randn(2, 16, 8, requires_grad=True)
    permutation = permutation_of([3, 5], rows=9)
    for multiply in (module.grouped_matmul, module.looped_matmul):
        rows = torch.randn(9, 8)
        rows[5:] = torch.nan
        rows.requires_grad_()
        blocks = [torch.full((9, 16), torch.nan) for _ in range(8)]
        del blocks  # the allocator gives such memory next
        output = multiply(rows, weight, permutation)
        output.sum().backward()  # an expanded gradient, which the kernel refuses
        assert output.isfinite().all() and not output[5:].any()
        assert rows.grad.isfinite().all() and not rows.grad[5:].any()
        assert weight.grad.isfinite().all()
        torch.testing.assert_close(output[3:5], rows[3:5] @ weight[1].t())


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 6), (torch.bfloat16, 12)])
def test_without_a_kernel_experts_are_computed_one_by_one(dtype, width):
    """torch has no grouped product in double, nor of rows that are no multiple of 16 bytes."""
    rows, weight = torch.randn(7, width, dtype=dtype), torch.randn(2, 8, width, dtype=dtype)
    permutation = permutation_of([4, 7], rows=7, has_dropped=False)
    assert torch.equal(
        module.grouped_matmul(rows, weight, permutation), module.looped_matmul(rows, weight, permutation)
    )


def test_under_autocast_products_are_in_its_dtype():
    layer = layer_of(moe_grouped_gemm=True, ffn_hidden_size=16)
    rows, permutation = torch.randn(7, 8), permutation_of([1, 2, 4, 7], rows=7, has_dropped=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.experts.linear_fc1(rows, permutation).dtype == torch.bfloat16


def test_rows_come_back_to_their_tokens():
    tokens = torch.randn(10, 8, requires_grad=True, dtype=torch.float64)
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    permutation = sort_by_expert(experts, 4)
    rows = permutation.to_rows(tokens)
    assert permutation.row_experts.tolist() == sorted(experts.flatten().tolist())
    back = permutation.from_rows(rows)
    assert torch.equal(back, tokens.unsqueeze(1).expand(10, 2, 8))
    assert torch.autograd.gradcheck(lambda t: permutation.from_rows(permutation.to_rows(t).square()), tokens)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_full_expert_keeps_the_best_or_the_first(policy):
    config = config_of(moe_router_topk=1, moe_router_pre_softmax=True, moe_expert_capacity_factor=1.0,
                       moe_token_drop_policy=policy)  # fmt: skip
    experts = torch.tensor([[1], [1], [1], [1], [1], [0], [3], [3]])
    probs = torch.tensor([[0.1], [0.5], [0.2], [0.4], [0.3], [0.1], [0.2], [0.1]])
    permutation = sort_by_expert(drop_over_capacity(experts, probs, config), 4, has_dropped=True)
    kept = permutation.order[: permutation.ends[-1]].tolist()
    assert sorted(kept) == {"probs": [1, 3, 5, 6, 7], "position": [0, 1, 5, 6, 7]}[policy]
    assert permutation.ends.tolist() == [1, 3, 3, 5]
    assert permutation.inverse[permutation.order].tolist() == list(range(8))


def test_places_without_a_row_are_zeros():
    experts = torch.tensor([[0, 2], [2, 1], [2, 2]])  # 2 is no expert here
    permutation = sort_by_expert(experts, 2, has_dropped=True).without_dropped()
    assert permutation.order.tolist() == [0, 3] and not permutation.has_dropped
    tokens = torch.randn(3, 8, requires_grad=True, dtype=torch.float64)
    places = permutation.from_rows(permutation.to_rows(tokens))
    assert torch.equal(places[:, 0], torch.cat([tokens[:1], torch.zeros(2, 8)]))
    assert torch.equal(places[:, 1], torch.stack([torch.zeros(8), tokens[1], torch.zeros(8)]))
    assert torch.autograd.gradcheck(lambda t: permutation.from_rows(permutation.to_rows(t).square()), tokens)


def test_adapters_of_experts_are_refused():
    layer = layer_of()
    with pytest.raises(
        ConfigError, match=r"LoRA targets .*include experts.linear_fc1, and the matrices of experts take"
    ):
        layer.shared_experts = torch.nn.Module()
        add_lora(_with_linears(layer), 2, targets=["linear_fc1"])


def _with_linears(layer):
    return torch.nn.ModuleDict(
        {"experts": layer.experts, "linear_fc1": layer_of(moe_shared_expert_intermediate_size=4).shared_experts}
    )


@pytest.mark.parametrize(
    ("dtype", "is_cuda", "capability", "expected"),
    [
        (torch.bfloat16, True, (9, 0), "grouped"),
        (torch.bfloat16, True, (10, 0), "grouped"),
        (torch.bfloat16, True, (8, 0), "looped"),
        (torch.float16, True, (9, 0), "looped"),
        (torch.bfloat16, False, (9, 0), "looped"),
    ],
)
def test_experts_are_one_call_where_a_gpu_has_a_kernel(dtype, is_cuda, capability, expected, monkeypatch):
    for name in ("grouped", "looped"):
        monkeypatch.setattr(module, f"{name}_matmul", lambda *unused, name=name: name)
    monkeypatch.setattr(module, "_capability", lambda device: capability)
    rows = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda:0")
    assert layer_of().experts.linear_fc1._multiply(rows, None, None) == expected
