"""Experts cut over ranks: a layer on all of them equals the layer of one process, and its experts start the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import DataError, ParallelConfigError
from core.base.initialization import initialize_parameters
from core.base.parameters import copy_partition
from core.transformer.moe import MoELayer
from core.transformer.moe.load_balancing import pop_balance_loss
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.training._reads import watched
from tests.unit.transformer.moe._layers import config_of, layer_of

LENGTH, BATCH = 8, 3
BIASED = {"add_bias_linear": True, "params_dtype": torch.float64}


def _inputs(replica: int, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of a data-parallel rank, and the weights of its output in the loss, `[s, b, h]`."""
    generator = torch.Generator().manual_seed(replica)
    x, weights = torch.randn(2, length, BATCH, 8, dtype=torch.float64, generator=generator)
    return x, weights


def _filled(layer: MoELayer) -> MoELayer:
    initialize_parameters(layer, 11)
    for owner in (layer.experts.linear_fc1, layer.experts.linear_fc2, layer.router):
        whole = torch.linspace(-1, 1, 4 * 24, dtype=torch.float64).view(4, 24)
        bias, group, ep_group = owner.bias, owner.tp_group, owner.ep_group
        if bias is not None:
            width = bias.shape[-1] * (group.size() if group is not None and bias.tensor_model_parallel else 1)
            with torch.no_grad():
                copy_partition(whole[:, 0] if bias.ndim == 1 else whole[:, :width], bias, group, ep_group)
    return layer


def _serial(fields: dict[str, Any], replicas: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns the output for each data-parallel rank's input, and the values and gradients of parameters."""
    layer, outputs, of_inputs = _filled(layer_of(**fields)), [], []
    for replica in range(replicas):
        x, weights = _inputs(replica)
        x.requires_grad_()
        output = layer(x)
        ((output * weights).sum() + pop_balance_loss(layer.router)).backward()
        outputs.append(output.detach())
        of_inputs.append(x.grad)
    found = {name: (p.detach(), p.grad) for name, p in layer.named_parameters()}
    return outputs, {"parameters": found, "inputs": of_inputs, "sums": layer.router.step_sums}


_CASES = [
    (2, {"expert_model_parallel_size": 2}, False),
    (4, {"expert_model_parallel_size": 2}, False),
    (4, {"expert_model_parallel_size": 4}, False),
    (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, False),
    (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, True),
    (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, False),
    (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}, True),
    (2, {"expert_tensor_parallel_size": 2}, False),
    (4, {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}, False),
]
_QUICK = (_CASES[0], _CASES[4], _CASES[6], _CASES[8])


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(("world", "sizes", "is_split"), quick(_CASES, lambda case: case in _QUICK))
@on_ranks("world")
def test_a_layer_on_ranks_equals_one_process(world, sizes, is_split, dispatcher):
    fields = {**BIASED, "moe_token_dispatcher_type": dispatcher, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
    outputs, expected = _serial(fields, dist.get_world_size() // sizes.get("tensor_model_parallel_size", 1))
    parallel_state.initialize_model_parallel(**sizes)
    layer = _filled(MoELayer(config_of(**fields, **sizes, sequence_parallel=is_split)))
    tp = parallel_state.get_tensor_model_parallel_group()
    replica, own = parallel_state.get_data_parallel_rank(), slice(None)
    if is_split:
        part = LENGTH // tp.size()
        own = slice(tp.rank() * part, (tp.rank() + 1) * part)
    x, weights = _inputs(replica)
    x, weights = x[own].clone().requires_grad_(), weights[own]
    output = layer(x)
    ((output * weights).sum() + pop_balance_loss(layer.router)).backward()
    torch.testing.assert_close(output, outputs[replica][own])
    torch.testing.assert_close(x.grad, expected["inputs"][replica][own])
    for name, parameter in layer.named_parameters():
        value, gradient = expected["parameters"][name]
        group = parallel_state.get_data_parallel_group()
        if getattr(parameter, "expert_model_parallel", False):
            assert not parameter.allreduce
            group = parallel_state.get_expert_data_parallel_group()
        whole_value, whole_gradient = torch.empty_like(parameter), torch.empty_like(parameter)
        ranks = parallel_state.get_expert_tensor_parallel_group() if "experts" in name else tp
        for whole, part in ((value, whole_value), (gradient, whole_gradient)):
            part.expert_model_parallel = getattr(parameter, "expert_model_parallel", False)
            part.tensor_model_parallel, part.partition_dim = parameter.tensor_model_parallel, parameter.partition_dim
            copy_partition(whole, part, ranks, parallel_state.get_expert_model_parallel_group(False))
        assert torch.equal(parameter, whole_value), name
        dist.all_reduce(parameter.grad, group=group)
        if parameter.sequence_parallel:
            dist.all_reduce(parameter.grad, group=tp)
        torch.testing.assert_close(parameter.grad, whole_gradient, msg=name)
    sums = layer.router.step_sums
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    if layer.splits_tokens:
        dist.all_reduce(sums, group=tp)
    torch.testing.assert_close(sums, expected["sums"])


def _drops_as_one_process(dispatcher: str) -> None:
    """The capacity is that of a rank's own tokens."""
    fields = {**BIASED, "moe_expert_capacity_factor": 0.6, "moe_token_dispatcher_type": dispatcher}
    x, alone = _inputs(dist.get_rank())[0], _filled(layer_of(**fields))
    expected = alone(x)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    layer = _filled(MoELayer(config_of(**fields, expert_model_parallel_size=2)))
    found = layer(x)
    torch.testing.assert_close(found, expected)
    for output in (expected, found):
        output.sum().backward()
    assert torch.equal(alone.router.step_sums, layer.router.step_sums) and layer.router.step_sums[5] > 0


def _all_to_one(dispatcher: str) -> None:
    """All tokens go to one expert of one rank."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = config_of(moe_router_topk=1, moe_router_pre_softmax=True, expert_model_parallel_size=2,
                       moe_token_dispatcher_type=dispatcher, moe_grouped_gemm=dispatcher == "allgather",
                       ffn_hidden_size=16)  # fmt: skip
    layer = MoELayer(config)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3] = 10.0
    x = torch.rand(6, 2, 8, requires_grad=True)
    layer(x).sum().backward()
    for part in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        gradient = part.weight.grad
        assert gradient is not None and not gradient[0].any()  # zeros, not None, on a rank without tokens too
        assert bool(gradient[1].any()) == (dist.get_rank() == 1)
    assert x.grad is not None and x.grad.abs().min() > 0


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("job", [_drops_as_one_process, _all_to_one])
def test_full_and_idle_experts_on_two_ranks(job, dispatcher):
    run_distributed(job, 2, dispatcher)


def _num_reads(**fields: Any) -> int:
    """Returns how often the host waits for the device in a layer's forward, and checks that it never does later."""
    layer = layer_of(ffn_hidden_size=16, **fields)
    x = torch.randn(6, 2, 8, requires_grad=True)
    with watched() as reads:
        output = layer(x)
        num_reads = len(reads.at)
        output.sum().backward()
    assert len(reads.at) == num_reads
    return num_reads


_WAYS = [
    {"moe_grouped_gemm": grouped, "moe_expert_capacity_factor": factor}
    for grouped in (True, False)
    for factor in (None, 0.6)
]


def _reads_once_between_ranks() -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    over_ranks = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    assert [_num_reads(**over_ranks, **fields) for fields in _WAYS] == [1, 1, 1, 1]


def test_a_layer_reads_from_the_device_at_most_once():
    assert [_num_reads(**fields) for fields in _WAYS] == [0, 0, 1, 1]
    run_distributed(_reads_once_between_ranks, 2)


def _of_other_lengths() -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    fields = {**BIASED, "moe_token_dispatcher_type": "alltoall"}
    layer, rank = _filled(MoELayer(config_of(**fields, expert_model_parallel_size=2))), dist.get_rank()
    outputs = layer(_inputs(rank)[0][: 3 + rank])
    assert outputs.shape == (3 + rank, BATCH, 8)


def _refuses_other_lengths() -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    layer, rank = MoELayer(config_of(expert_model_parallel_size=2)), dist.get_rank()
    with pytest.raises(
        DataError, match=rf"of different sizes, and this one of {9 + 3 * rank} tokens; take .* 'alltoall'"
    ):
        layer(torch.randn(3 + rank, BATCH, 8))


def _refuses() -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    with pytest.raises(ParallelConfigError, match=r"expert_model_parallel_size is 1, but .* of 2; call initialize"):
        MoELayer(config_of())
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    with pytest.raises(ParallelConfigError, match=r"expert_tensor_parallel_size is 2, but .* of 1"):
        MoELayer(config_of(**sizes))


@pytest.mark.parametrize("job", [_of_other_lengths, _refuses_other_lengths, _refuses])
def test_lengths_and_sizes_that_two_ranks_take_or_refuse(job):
    run_distributed(job, 2)
