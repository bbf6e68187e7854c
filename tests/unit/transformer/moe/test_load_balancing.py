"""Losses that balance experts: their formulas, and one meaning of a coefficient."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core.base.errors import ConfigError, ParallelConfigError, warn_once
from core.base.module_protocol import counting_modules
from core.models.gpt import GPTModel
from core.transformer.moe import add_auxiliary_losses, load_balancing
from tests.unit.transformer.moe._layers import config_of, layer_of


def test_switch_loss_equals_the_loop_and_is_one_if_balanced():
    shares = torch.rand(12, 4, dtype=torch.float64).softmax(-1)
    counts = torch.tensor([10, 7, 5, 2])
    expected = sum(4 * (shares[:, e].mean().item()) * (counts[e].item() / (12 * 2)) for e in range(4))
    assert math.isclose(load_balancing.switch_loss(shares, counts, 12, 2).item(), expected, rel_tol=1e-12)
    balanced = load_balancing.switch_loss(torch.full((12, 4), 0.25), torch.full((4,), 6), 12, 2)
    assert math.isclose(balanced.item(), 1.0, rel_tol=1e-6)


def test_parts_of_a_micro_batch_add_up():
    shares, logits = torch.rand(2, 12, 4).softmax(-1), torch.randn(12, 4)
    counts = torch.tensor([[10, 7, 5, 2], [6, 6, 6, 6]])
    whole = load_balancing.switch_loss(shares, counts, 12, 2)
    parts = [load_balancing.switch_loss(part, counts, 12, 2) for part in shares.chunk(2, 1)]
    torch.testing.assert_close(sum(parts), whole)
    halves = [load_balancing.z_loss(part, 12) for part in logits.chunk(2)]
    torch.testing.assert_close(sum(halves), load_balancing.z_loss(logits, 12))
    torch.testing.assert_close(load_balancing.z_loss(logits, 12), logits.exp().sum(-1).log().square().mean())


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_a_router_computes_its_losses(kind):
    fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25}
    layer = layer_of(**fields).double()
    seen, expected = torch.zeros(4, dtype=torch.float64), None
    for _ in range(2):  # the second micro-batch of a step has the counts of both, with "global_aux_loss"
        x = torch.randn(6, 3, 8, dtype=torch.float64)
        output = layer(x).sum()
        pending = load_balancing.pop_balance_loss(layer.router)
        output.backward()
        logits = x @ layer.router.weight.t()  # [s, b, experts]
        shares, chosen = logits.softmax(-1), torch.nn.functional.one_hot(logits.topk(2).indices, 4).sum(-2)
        seen += chosen.sum((0, 1))
        counts = {"aux_loss": chosen.sum((0, 1)), "global_aux_loss": seen * 36 / seen.sum()}
        if kind == "seq_aux_loss":
            balance = (4 * shares.mean(0) * chosen.sum(0) / (6 * 2)).sum(-1).mean()
        else:
            balance = (4 * shares.mean((0, 1)) * counts[kind] / (18 * 2)).sum()
        expected = 0.5 * balance + 0.25 * logits.exp().sum(-1).log().square().mean()
        torch.testing.assert_close(pending, expected, rtol=1e-6, atol=1e-6)
    assert load_balancing.pop_balance_loss(layer.router) is None


def test_several_losses_add_up_with_their_own_coefficients():
    x, found = torch.randn(6, 3, 8), {}
    for kinds, coefficients in [
        (["aux_loss"], [0.5]),
        ("seq_aux_loss", 0.25),
        (["aux_loss", "seq_aux_loss"], [0.5, 0.25]),
    ]:
        layer = layer_of(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coefficients)
        _output = layer(x)
        found[str(kinds)] = load_balancing.pop_balance_loss(layer.router)
    one, other, both = found.values()
    torch.testing.assert_close(one + other, both)


def test_counts_of_the_loss_are_those_without_bias():
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 1.0}
    layer = layer_of(**fields)
    x, losses = torch.randn(6, 3, 8), []
    for bias in (0.0, 9.0):  # chosen for all tokens, and yet not overloaded in the eyes of the loss
        layer.router.expert_bias[3] = bias
        _output = layer(x)
        losses.append(load_balancing.pop_balance_loss(layer.router))
    assert torch.equal(*losses)


def test_a_layer_that_runs_twice_has_both_losses():
    layer = layer_of(moe_aux_loss_coeff=1.0)
    inputs, each = torch.randn(2, 6, 3, 8), []
    for x in inputs:
        _output = layer(x)
        each.append(load_balancing.pop_balance_loss(layer.router))
    _outputs = [layer(x) for x in inputs]
    torch.testing.assert_close(load_balancing.pop_balance_loss(layer.router), sum(each))


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss"])
def test_a_forward_that_raised_leaves_nothing(kind):
    def train(model):
        model(TOKENS, labels=TOKENS).mean().backward()

    def fail_and_train(model):
        with pytest.raises(ZeroDivisionError), _failing(model.decoder.layers[1]):
            model(TOKENS.roll(1, 0), labels=TOKENS)
        train(model)

    found = []
    for use in (train, fail_and_train):
        model = _gpt(moe_aux_loss_coeff=1.0, moe_router_load_balancing_type=kind)
        for _ in range(2):  # "global_aux_loss" reads the counts of the first
            use(model)
        sums = [layer.mlp.router.step_sums.clone() for layer in model.decoder.layers]
        found.append([*sums, _router_gradients(model)])
    assert all(map(torch.equal, *found))


@contextmanager
def _failing(module):
    def fail(*_):
        raise ZeroDivisionError

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_evaluation_leaves_nothing_behind():
    layer = layer_of(moe_aux_loss_coeff=1.0, moe_router_load_balancing_type="global_aux_loss").eval()
    _outputs = [layer(torch.randn(3, 2, 8))]
    with torch.no_grad():
        _outputs.append(layer.train()(torch.randn(3, 2, 8)))
    assert not load_balancing.notes_of(layer.router) and not layer.router.step_sums.any()


def _gpt(**fields):
    torch.manual_seed(5)
    config = config_of(num_layers=2, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, **fields)
    return GPTModel(config, vocab_size=16, max_sequence_length=8).double()


def _router_gradients(model):
    found = [layer.mlp.router.weight.grad.clone() for layer in model.decoder.layers]
    model.zero_grad()
    return torch.stack(found)


def _effect(use, **fields):
    """Returns what the losses of experts add to the routers' gradients when `use` trains on them."""
    parts = []
    for coefficient in (1.0, 0.0):
        model = _gpt(moe_aux_loss_coeff=coefficient, **fields)
        use(model)
        parts.append(_router_gradients(model))
    return parts[0] - parts[1]


TOKENS = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1))


def test_the_effect_follows_the_weight_of_the_tokens():
    def mean(model):
        model(TOKENS, labels=TOKENS).mean().backward()

    def scaled(model):  # by a loss scale
        (1024 * model(TOKENS, labels=TOKENS).mean()).backward()

    def accumulated(model):  # the same micro-batch four times
        for _ in range(4):
            (model(TOKENS, labels=TOKENS).mean() / 4).backward()

    def summed(model):  # per token: sums, and one division
        model(TOKENS, labels=TOKENS).sum().backward()
        for parameter in model.parameters():
            parameter.grad /= TOKENS.numel()

    def masked(model):  # half of the tokens, each with twice the weight
        mask = torch.arange(8) % 2
        (model(TOKENS, labels=TOKENS) * mask).sum().div(mask.sum() * 4).backward()

    def without_labels(model):  # half of the tokens, and a loop that adds up the zeros of the others
        labels = TOKENS.masked_fill(torch.arange(8) % 2 == 0, -100)
        (model(TOKENS, labels=labels).sum() / (labels != -100).sum()).backward()

    def by_hand(model):  # from logits, as a loop with a loss of its own
        logits = model(TOKENS)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(), reduction="none")
        add_auxiliary_losses(losses, model).mean().backward()

    expected = _effect(mean)
    assert expected.abs().max() > 1e-4
    for use in (scaled, accumulated, summed, masked, without_labels, by_hand):
        found = _effect(use) / (1024 if use is scaled else 1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=use.__name__)


def test_the_effect_is_that_of_adding_the_loss():
    model = _gpt(moe_aux_loss_coeff=1.0)
    with torch.no_grad():
        plain = _gpt(moe_aux_loss_coeff=0.0)(TOKENS, labels=TOKENS)
    losses = model(TOKENS, labels=TOKENS)
    assert torch.equal(losses, plain)  # what is reported is the loss of the predictions
    losses.mean().backward()
    ours = _router_gradients(model)
    logits = model(TOKENS)
    pending = [load_balancing.pop_balance_loss(layer.mlp.router) for layer in model.decoder.layers]
    main = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
    (main + sum(pending)).backward()
    torch.testing.assert_close(ours, _router_gradients(model), rtol=1e-6, atol=1e-9)


def test_independent_of_accumulation_by_sequence():
    """Losses by sequence, and of logits, are the same however sequences are dealt to micro-batches."""

    def together(model):
        model(TOKENS, labels=TOKENS).mean().backward()

    def apart(model):
        for row in TOKENS.split(1):
            (model(row, labels=row).mean() / 4).backward()

    fields = {"moe_router_load_balancing_type": "seq_aux_loss"}
    torch.testing.assert_close(_effect(together, **fields), _effect(apart, **fields), rtol=1e-6, atol=1e-9)


def test_losses_that_nothing_adds_are_warned_about():
    model = _gpt(moe_aux_loss_coeff=1.0)
    output = model(TOKENS).sum()
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="were computed and not trained: the model was called without labels"):
        output.backward()
    assert load_balancing.pop_balance_loss(model.decoder.layers[0].mlp.router) is None


_GLOBAL = {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "global_aux_loss"}
_RECOMPUTED = [
    {},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
]


@pytest.mark.parametrize("fields", _RECOMPUTED, ids=str)
def test_counts_are_those_up_to_a_forward(fields):
    def one_after_the_other(model):
        for shift in range(3):
            model(TOKENS.roll(shift, 0) % (5 + shift), labels=TOKENS).mean().backward()

    def forwards_first(model):
        losses = [model(TOKENS.roll(shift, 0) % (5 + shift), labels=TOKENS).mean() for shift in range(3)]
        for loss in losses:
            loss.backward()

    def overlapping(model):  # as in a pipeline
        first, second = (model(TOKENS.roll(shift, 0) % (5 + shift), labels=TOKENS).mean() for shift in range(2))
        first.backward()
        third = model(TOKENS.roll(2, 0) % 7, labels=TOKENS).mean()
        second.backward()
        third.backward()

    found = []
    for use, own in ((one_after_the_other, {}), *((use, fields) for use in (forwards_first, overlapping))):
        model = _gpt(**_GLOBAL, **own)
        use(model)
        counts = [layer.mlp.router.global_counts.clone() for layer in model.decoder.layers]
        assert all(count.sum() == 3 * TOKENS.numel() * 2 for count in counts)
        found.append([*counts, _router_gradients(model)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def _forget(model: torch.nn.Module) -> None:
    for layer in counting_modules(model):
        layer.clear_step_sums()


def test_counts_that_belong_to_no_graph_are_not_counted():
    """Neither those of forwards whose output is gone, nor those of a step that was cleared."""
    found = []
    for is_disturbed in (False, True):
        model, errors = _gpt(**_GLOBAL), []
        if is_disturbed:
            try:
                with _failing(model.decoder.layers[1]):
                    model(TOKENS % 3, labels=TOKENS)
            except ZeroDivisionError as error:
                errors.append(error)  # which keeps the graph
            _forget(model)
            model(TOKENS % 3, labels=TOKENS)
            with torch.no_grad():
                model(TOKENS % 3, labels=TOKENS)
        for _ in range(2):
            model(TOKENS, labels=TOKENS).mean().backward()
        found.append(_router_gradients(model))
    assert torch.equal(*found)


def test_a_backward_through_a_kept_graph_counts_nothing():
    model = _gpt(**_GLOBAL)
    loss = model(TOKENS, labels=TOKENS).mean()
    loss.backward(retain_graph=True)
    before = [model.decoder.layers[0].mlp.router.step_sums.clone(), _router_gradients(model)]
    loss.backward()
    assert torch.equal(before[0], model.decoder.layers[0].mlp.router.step_sums)
    assert torch.equal(before[1], _router_gradients(model))


def test_torchs_checkpoint_does_not_keep_the_counts():
    layer = layer_of(**_GLOBAL)
    output = torch_checkpoint(layer, torch.randn(4, 2, 8, requires_grad=True), use_reentrant=False)
    with pytest.raises(ParallelConfigError, match="recomputed by torch's checkpoint, which does not keep the counts"):
        output.sum().backward()


def _token_losses(logits):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(), reduction="none")


def test_forwards_in_between_take_no_losses():
    def at_once(model):
        add_auxiliary_losses(_token_losses(model(TOKENS)), model).mean().backward()

    def after_a_sample(model):
        logits = model(TOKENS)
        with torch.no_grad():
            model(TOKENS.roll(1, 0))
            model(TOKENS.roll(1, 0), labels=TOKENS)
        add_auxiliary_losses(_token_losses(logits), model).mean().backward()

    def after_an_evaluation(model):
        logits = model(TOKENS)
        sample = model.eval()(TOKENS.roll(1, 0))
        model.train()
        add_auxiliary_losses(_token_losses(logits), model).mean().backward()
        assert sample.requires_grad

    def after_gradients_were_cleared(model):
        logits = model(TOKENS)
        _forget(model)
        add_auxiliary_losses(_token_losses(logits), model).mean().backward()

    def after_a_forward_that_nothing_keeps(model):
        model(TOKENS.roll(1, 0))
        at_once(model)

    def after_one_with_labels(model):
        logits = model(TOKENS)
        other = model(TOKENS.roll(1, 0), labels=TOKENS)
        add_auxiliary_losses(_token_losses(logits), model).mean().backward()
        assert other.requires_grad

    expected = _effect(at_once)
    assert expected.abs().max() > 1e-4
    for use in (
        *(after_a_sample, after_an_evaluation, after_gradients_were_cleared),
        *(after_a_forward_that_nothing_keeps, after_one_with_labels),
    ):
        assert torch.equal(_effect(use), expected), use.__name__


def test_losses_of_two_forwards_have_to_be_told_apart():
    model = _gpt(moe_aux_loss_coeff=1.0)
    kept, logits = model(TOKENS.roll(1, 0)), model(TOKENS)
    with pytest.raises(ConfigError, match=r"called once for 2 forwards.*call it after each forward"):
        add_auxiliary_losses(_token_losses(logits), model)
    assert kept.requires_grad
