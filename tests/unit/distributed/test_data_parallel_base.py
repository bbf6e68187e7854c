"""The contract of a wrapper (`_BaseDataParallel`), run over every wrapper on two ranks."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import ParallelConfigError, ShardstackError, WrapError
from core.dist_checkpointing import load_model_state_dict, model_state_dict
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import (
    CountedTraffic,
    accumulate,
    batches,
    build,
    full,
    gradients,
    loss_of,
    oracle,
    toy,
)

pytestmark = pytest.mark.parametrize("kind", quick(_toys.WRAPPERS, lambda kind: kind not in ("ddp_overlap", "zero1")))


@on_ranks(2)
def test_gradients_are_bitwise_the_mean_over_ranks(kind: str) -> None:
    for tied in (True, False):
        model = build(kind, toy(tied=tied))
        for _ in range(2):  # a second step shows what the first left behind
            model.zero_grad_buffer()
            accumulate(model)
            finalize_model_grads([model])
            assert_same(gradients(model), oracle(tied=tied))


@on_ranks(2)
def test_no_gradient_crosses_ranks_inside_no_sync(kind: str) -> None:
    model = build(kind, toy())
    with model.no_sync(), CountedTraffic() as inside:
        accumulate(model)
    assert not inside.reductions, "gradients crossed ranks inside no_sync"
    finalize_model_grads([model])
    assert_same(gradients(model), oracle())


@on_ranks(2)
def test_gradient_collectives_do_not_grow_with_micro_batches(kind: str) -> None:
    for micro_batches in (1, 4):
        model = build(kind, toy(tied=False))
        with CountedTraffic() as traffic:
            accumulate(model, micro_batches)
            finalize_model_grads([model])
        # FSDP2: embedding, two blocks, head; the root holds a frozen weight only. Else of each bucket the half that is
        # the other rank's, in one message.
        assert traffic.reductions == (4 if kind == "fsdp2" else len(model.engine.buckets))


@on_ranks(2)
def test_no_sync_nests_and_is_restored_on_exceptions(kind: str) -> None:
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


@on_ranks(2)
def test_per_token_loss_divides_by_the_global_token_count(kind: str) -> None:
    own_tokens = [3, 10][dist.get_rank()]
    for num_tokens in (own_tokens, torch.tensor(own_tokens, dtype=torch.float64)):
        model = build(kind, toy(), config=SimpleNamespace(calculate_per_token_loss=True))
        accumulate(model)
        finalize_model_grads([model], num_tokens)
        assert int(num_tokens) == own_tokens
        assert_same(gradients(model), {name: total * (1 / 13) for name, total in oracle(reduce="sum").items()})


@on_ranks(1)
def test_a_token_count_belongs_to_a_per_token_loss(kind: str) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        finalize_model_grads([build(kind, toy())], 5)
    with pytest.raises(ValueError, match="give both or neither"):
        finalize_model_grads([build(kind, toy(), config=SimpleNamespace(calculate_per_token_loss=True))])


@on_ranks(2)
def test_scale_gradients_reaches_every_gradient(kind: str) -> None:
    for factor in (0.375, torch.tensor(0.375)):
        model = build(kind, toy())
        accumulate(model)
        model.finish_grad_sync()
        model.scale_gradients(factor)
        assert_same(gradients(model), {name: gradient * 0.375 for name, gradient in oracle().items()})


@on_ranks(2)
def test_zero_grad_buffer_forgets_an_abandoned_step(kind: str) -> None:
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


@on_ranks(2)
def test_replicas_are_made_equal_to_rank_0(kind: str) -> None:
    module = toy(seed=1 + dist.get_rank())
    module.offset += dist.get_rank()
    model = build(kind, module)
    for _ in range(2):
        state = {name: full(tensor) for name, tensor in model.state_dict().items()}
        assert_same(state, toy(seed=1).state_dict())
        model.broadcast_params()


@on_ranks(2)
def test_names_ties_and_parameter_attributes_survive(kind: str) -> None:
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


@on_ranks(2)
def test_load_state_dict_copies_and_misses_no_key(kind: str) -> None:
    model = build(kind, toy(seed=1))
    model.load_state_dict(model.state_dict())
    given = toy(seed=2).state_dict()
    if kind == "fsdp2":
        _check_that_nothing_is_loaded(model, given)
        return
    model.load_state_dict(given)
    assert all(torch.equal(full(tensor), given[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"frozen"):
        model.load_state_dict({name: tensor for name, tensor in given.items() if name != "frozen"})
    if kind == "zero3":
        with pytest.raises(ParallelConfigError, match="assign=True"):
            model.load_state_dict(given, assign=True)


def _check_that_nothing_is_loaded(model: nn.Module, others: dict[str, Tensor]) -> None:
    """FSDP2's `load_state_dict` is a no-op, which warns of tensors that are not the module's own."""
    before = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    own, copies = model.state_dict(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "load_state_dict" in vars(type(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for quiet in (own, model_state_dict(model.module), {name: own[name] for name in list(own)[:2]}, {}, None):
            for strict in (True, False):
                assert model.load_state_dict(quiet, strict) == ([], [])
        assert model.load_state_dict({"other": 3, "text": "a"}, assign=True) == ([], [])
    one_foreign = own | {"gone": torch.zeros(3)}
    for foreign in (others, copies, one_foreign, {"gone": torch.zeros(3)}, {"sparse": torch.eye(3).to_sparse()}):
        with pytest.warns(
            UserWarning, match=r"loads nothing.*shardstack\.dist_checkpointing\.load_model_state_dict\(module"
        ):
            assert model.load_state_dict(foreign, strict=True) == ([], [])
    loss_of(model, batches(0)[0])  # the last unit and the root stay gathered
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(own)
    assert all(torch.equal(full(tensor), before[name]) for name, tensor in model.state_dict().items())
    load_model_state_dict(model.module, others)
    assert all(torch.equal(full(tensor), others[name]) for name, tensor in model.state_dict().items())


@on_ranks(2)
def test_a_non_finite_gradient_is_named_with_rank_and_step(kind: str) -> None:
    model = build(kind, toy(), check_for_nan_in_grad=True)
    accumulate(model)
    model.finish_grad_sync()  # finite: passes
    model.zero_grad_buffer()
    with model.no_sync():
        accumulate(model)
    bad = dict(model.module.named_parameters())["blocks.1.down.weight"]
    reduced = ""
    if kind == "fsdp2":  # it looks at reduced shards
        model.finish_grad_sync()
        bad.grad.to_local().fill_(float("nan"))
        model.step.number = 1
        reduced = ", reduced over ranks that may each be at fault,"
    else:
        bad.main_grad[dist.get_rank(), 1] = float("inf")
    said = f"rank {dist.get_rank()}, step 1: the gradient of blocks.1.down.weight{reduced} is not finite"
    with pytest.raises(ShardstackError, match=said):
        model.finish_grad_sync()


@on_ranks(2)
def test_grad_reduce_in_fp32_accumulates_and_reduces_in_fp32(kind: str) -> None:
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


def _trains_and_evaluates(kind: str, evaluates_before: str) -> dict[str, torch.Tensor]:
    model = build(kind, toy(tied=False))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05), [model])
    calls = {
        "zero_grad_buffer": model.zero_grad_buffer,
        "backward": lambda: accumulate(model),
        "finalize_model_grads": lambda: finalize_model_grads([model]),
        "step": optimizer.step,
    }
    for _ in range(2):
        for moment, call in calls.items():
            if moment == evaluates_before:
                with torch.no_grad():
                    loss_of(model, batches(dist.get_rank())[0])
            call()
    return {name: full(tensor) for name, tensor in model.state_dict().items()}  # which waits for overlapped gathers


@on_ranks(2)
def test_an_evaluation_at_any_moment_changes_nothing(kind: str) -> None:
    undisturbed = _trains_and_evaluates(kind, "never")
    for moment in ("zero_grad_buffer", "backward", "finalize_model_grads", "step"):
        assert_same(_trains_and_evaluates(kind, moment), undisturbed)


class _Router(nn.Module):
    """Each rank uses one of two branches, and no rank a third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank()](x)


@on_ranks(2)
def test_a_parameter_few_ranks_reach_has_the_mean_gradient(kind: str) -> None:
    torch.manual_seed(1)
    model = build(kind, _Router(), unit_classes=())
    for _ in range(2):
        model.zero_grad_buffer()
        for x in _toys.synced_last(model, [torch.ones(1, 3)] * 2):
            model(x).sum().backward()
        finalize_model_grads([model])
    found = gradients(model)
    for branch in range(2):  # each of two micro-batches adds one, and the ranks' mean halves it
        assert torch.equal(found[f"branches.{branch}.weight"], torch.ones(3, 3)), found
    assert torch.equal(found["branches.2.weight"], torch.zeros(3, 3))
