"""The contract of a wrapper (`_BaseDataParallel`), run over every wrapper on two ranks."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import ParallelConfigError, ShardstackError, WrapError
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import (
    GradientTraffic,
    accumulate,
    batches,
    build,
    full,
    gradients,
    loss_of,
    oracle,
    toy,
)

pytestmark = pytest.mark.parametrize("kind", _toys.WRAPPERS)


def _accumulates_like_the_oracle(kind: str, tied: bool) -> None:
    model = build(kind, toy(tied=tied))
    for _ in range(2):  # a second step shows what the first left behind
        model.zero_grad_buffer()
        accumulate(model)
        finalize_model_grads([model])
        assert_same(gradients(model), oracle(tied=tied))


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_bitwise_the_mean_over_ranks(kind, tied):
    run_distributed(_accumulates_like_the_oracle, 2, kind, tied)


def _skips_the_last_sync(kind: str) -> None:
    model = build(kind, toy())
    with model.no_sync(), GradientTraffic() as inside:
        accumulate(model)
    assert not inside.calls, "gradients crossed ranks inside no_sync"
    finalize_model_grads([model])
    assert_same(gradients(model), oracle())


def test_no_gradient_crosses_ranks_inside_no_sync(kind):
    run_distributed(_skips_the_last_sync, 2, kind)


def _counts_collectives(kind: str, micro_batches: int) -> tuple[int, int]:
    model = build(kind, toy(tied=False))
    with GradientTraffic() as traffic:
        steps = batches(dist.get_rank(), micro_batches)
        for index, tokens in enumerate(steps):
            with nullcontext() if index == len(steps) - 1 else model.no_sync():
                loss_of(model, tokens).backward()
        finalize_model_grads([model])
    return traffic.calls, len(getattr(model, "_buckets", ()))


def test_gradient_collectives_do_not_grow_with_micro_batches(kind):
    for micro_batches in (1, 4):
        found = run_distributed(_counts_collectives, 2, kind, micro_batches)
        calls, buckets = found[0]
        assert found[1] == found[0]
        if kind == "fsdp2":
            assert calls == 4  # embedding, two blocks, head; the root holds a frozen weight only
        else:
            assert calls == buckets  # the half that is the other rank's, in one message


def _survives_an_exception(kind: str) -> None:
    model = build(kind, toy())
    with pytest.raises(ZeroDivisionError), model.no_sync():
        with model.no_sync():
            pass
        with pytest.raises(ShardstackError, match="inside no_sync"):
            model.finish_grad_sync()
        raise ZeroDivisionError
    accumulate(model)
    model.finish_grad_sync()
    assert_same(gradients(model), oracle())


def test_no_sync_nests_and_is_restored_on_exceptions(kind):
    run_distributed(_survives_an_exception, 2, kind)


def _sums_per_token(kind: str, as_tensor: bool) -> None:
    model = build(kind, toy(), config=SimpleNamespace(calculate_per_token_loss=True))
    accumulate(model)
    own_tokens = [3, 10][dist.get_rank()]
    num_tokens = torch.tensor(own_tokens, dtype=torch.float64) if as_tensor else own_tokens
    finalize_model_grads([model], num_tokens)
    assert int(num_tokens) == own_tokens
    assert_same(gradients(model), {name: total * (1 / 13) for name, total in oracle(reduce="sum").items()})


@pytest.mark.parametrize("as_tensor", [True, False])
def test_per_token_loss_divides_by_the_global_token_count(kind, as_tensor):
    run_distributed(_sums_per_token, 2, kind, as_tensor)


def _refuses_half_a_per_token_loss(kind: str) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        finalize_model_grads([build(kind, toy())], 5)
    with pytest.raises(ValueError, match="give both or neither"):
        finalize_model_grads([build(kind, toy(), config=SimpleNamespace(calculate_per_token_loss=True))])


def test_a_token_count_belongs_to_a_per_token_loss(kind):
    run_distributed(_refuses_half_a_per_token_loss, 1, kind)


def _scales(kind: str, factor: float | torch.Tensor) -> None:
    model = build(kind, toy())
    accumulate(model)
    model.finish_grad_sync()
    model.scale_gradients(factor)
    assert_same(gradients(model), {name: gradient * 0.375 for name, gradient in oracle().items()})


@pytest.mark.parametrize("factor", [0.375, torch.tensor(0.375)], ids=["float", "tensor"])
def test_scale_gradients_reaches_every_gradient(kind, factor):
    run_distributed(_scales, 2, kind, factor)


def _zeroes(kind: str) -> None:
    model = build(kind, toy())
    accumulate(model)
    model.finish_grad_sync()
    with model.no_sync():
        loss_of(model, batches(dist.get_rank())[0]).backward()  # an abandoned step leaves whole gradients behind
    model.zero_grad_buffer()
    assert all(not gradient.any() for gradient in gradients(model).values())
    accumulate(model)
    finalize_model_grads([model])
    assert_same(gradients(model), oracle())
    for parameter in model.parameters():
        parameter.grad = None  # always legal between steps
    model.zero_grad_buffer()
    accumulate(model)
    finalize_model_grads([model])
    assert_same(gradients(model), oracle())


def test_zero_grad_buffer_forgets_an_abandoned_step(kind):
    run_distributed(_zeroes, 2, kind)


def _broadcasts(kind: str) -> None:
    module = toy(seed=1 + dist.get_rank())
    module.offset += dist.get_rank()
    model = build(kind, module)
    model.broadcast_params()
    state = {name: full(tensor) for name, tensor in model.state_dict().items()}
    assert_same(state, toy(seed=1).state_dict())


def test_broadcast_params_makes_replicas_equal_to_rank_0(kind):
    run_distributed(_broadcasts, 2, kind)


def _keeps_names_and_attributes(kind: str) -> None:
    model = build(kind, toy())
    names = list(toy().state_dict())
    assert list(model.state_dict()) == names
    assert list(model.state_dict_for_save_checkpoint()) == names
    assert model.module.embedding.weight is model.module.head.weight
    assert model.module.embedding.weight.partition_dim == 0
    if kind == "zero3":
        with pytest.raises(WrapError, match=r"from torch\.float32 on cpu to torch\.float64 on cpu; move and convert"):
            model.to(torch.float64)
        model.to(torch.float32)
        return
    model.to(torch.float64)
    assert model.module.embedding.weight.partition_dim == 0


def test_names_ties_and_parameter_attributes_survive(kind):
    run_distributed(_keeps_names_and_attributes, 2, kind)


def _loads(kind: str) -> None:
    model = build(kind, toy(seed=1))
    model.load_state_dict(model.state_dict())
    given = toy(seed=2).state_dict()
    model.load_state_dict(given)
    assert all(torch.equal(full(tensor), given[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"frozen"):
        model.load_state_dict({name: tensor for name, tensor in given.items() if name != "frozen"})
    if kind in ("zero3", "fsdp2"):
        with pytest.raises(ParallelConfigError, match="assign=True"):
            model.load_state_dict(given, assign=True)


def test_load_state_dict_copies_and_misses_no_key(kind):
    run_distributed(_loads, 2, kind)


def _names_the_bad_gradient(kind: str) -> str:
    model = build(kind, toy(), check_for_nan_in_grad=True)
    accumulate(model)
    model.finish_grad_sync()  # finite: passes
    model.zero_grad_buffer()
    with model.no_sync():
        accumulate(model)
    bad = dict(model.module.named_parameters())["blocks.1.down.weight"]
    if kind == "fsdp2":  # it looks at reduced shards
        model.finish_grad_sync()
        bad.grad.to_local().fill_(float("nan"))
        model._step = 1
    else:
        bad.main_grad[dist.get_rank(), 1] = float("inf")
    try:
        model.finish_grad_sync()
    except ShardstackError as error:
        return str(error)
    return "no error"


def test_a_non_finite_gradient_is_named_with_rank_and_step(kind):
    reduced = ", reduced over ranks that may each be at fault," if kind == "fsdp2" else ""
    for rank, message in enumerate(run_distributed(_names_the_bad_gradient, 2, kind)):
        assert f"rank {rank}, step 1: the gradient of blocks.1.down.weight{reduced} is not finite" in message


def _accumulates_low_precision_in_fp32(kind: str) -> None:
    config = SimpleNamespace(bf16=True)
    model = build(kind, toy().bfloat16(), config=config, grad_reduce_in_fp32=True)
    accumulate(model)
    finalize_model_grads([model])
    totals: dict[str, torch.Tensor] = {}
    for rank in range(2):
        for tokens in batches(rank):  # each micro-batch's bf16 gradient, added in fp32
            serial = toy().bfloat16()
            loss_of(serial, tokens).backward()
            for name, gradient in gradients(serial).items():
                totals.setdefault(f"{rank}.{name}", torch.zeros_like(gradient, dtype=torch.float32)).add_(gradient)
    for name, gradient in gradients(model).items():
        expected = (totals[f"0.{name}"] + totals[f"1.{name}"]) / 2
        assert torch.equal(gradient, expected.to(gradient.dtype)), name


def test_grad_reduce_in_fp32_accumulates_and_reduces_in_fp32(kind):
    run_distributed(_accumulates_low_precision_in_fp32, 2, kind)


def _trains_and_evaluates(kind: str, evaluates_before: str) -> dict[str, torch.Tensor]:
    model = build(kind, toy(tied=False))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05), [model])

    def evaluate(moment: str) -> None:
        if moment == evaluates_before:
            with torch.no_grad():
                loss_of(model, batches(dist.get_rank())[0])

    for _ in range(3):
        evaluate("zero_grad_buffer")
        model.zero_grad_buffer()
        evaluate("backward")
        accumulate(model)
        evaluate("finalize_model_grads")
        finalize_model_grads([model])
        evaluate("step")
        optimizer.step()
    return {name: full(tensor) for name, tensor in model.state_dict().items()}  # which waits for overlapped gathers


@pytest.mark.parametrize(
    "moment",
    quick(["zero_grad_buffer", "backward", "finalize_model_grads", "step"], {"backward", "step"}.__contains__),
)
def test_an_evaluation_at_any_moment_changes_nothing(kind, moment):
    assert_same(run_distributed(_trains_and_evaluates, 2, kind, moment)[0], _undisturbed(kind))


@functools.cache
def _undisturbed(kind: str) -> dict[str, torch.Tensor]:
    return run_distributed(_trains_and_evaluates, 2, kind, "never")[0]


class _Router(nn.Module):
    """Each rank uses one of two branches, and no rank a third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank()](x)


def _reaches_other_parameters_on_each_rank(kind: str) -> None:
    torch.manual_seed(1)
    model = build(kind, _Router(), unit_classes=())
    for _ in range(2):
        model.zero_grad_buffer()
        for index in range(2):
            with nullcontext() if index else model.no_sync():
                model(torch.ones(1, 3)).sum().backward()
        finalize_model_grads([model])
    found = gradients(model)
    for branch in range(2):  # each of two micro-batches adds one, and the ranks' mean halves it
        assert torch.equal(found[f"branches.{branch}.weight"], torch.ones(3, 3)), found
    assert torch.equal(found["branches.2.weight"], torch.zeros(3, 3))


def test_a_parameter_few_ranks_reach_has_the_mean_gradient(kind):
    run_distributed(_reaches_other_parameters_on_each_rank, 2, kind)


def _does_the_verbs(kind: str) -> None:
    model = build(kind, toy(tied=False))
    part, planned = model.plan.updated_part, {p.name: p for unit in model.plan.units for p in unit.params}
    cuts = model.plan.shards_parameters
    for name, parameter in model.module.named_parameters():
        bounds = planned[name].bounds
        held = bounds[part + 1] - bounds[part] if cuts else bounds[-1]
        assert model.shard(parameter).numel() == held
    accumulate(model)
    assert sum(tensor.numel() for tensor in model.held_tensors()["gradients"])
    finalize_model_grads([model])
    for name, parameter in model.module.named_parameters():
        gradient = model.local_gradient(parameter)
        assert (gradient is not None) == parameter.requires_grad
        if gradient is not None:
            bounds = planned[name].bounds
            assert gradient.numel() == bounds[part + 1] - bounds[part]
    model.recover()  # of nothing: gradients stay
    assert model.gradient_state.is_reduced
    model.settle_parameters()
    with model.whole_parameters():
        assert_same({n: full(p) for n, p in model.module.named_parameters()}, dict(toy(tied=False).named_parameters()))


def test_every_engine_has_the_verbs_of_its_plan(kind):
    run_distributed(_does_the_verbs, 2, kind)
