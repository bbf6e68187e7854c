"""Recomputation: what is computed twice, and that the numbers do not change."""

from itertools import product

import pytest
import torch

from tests.unit._quick import quick
from tests.unit.models._cases import CASES, batch, build

CASE = CASES["swiglu-gqa-rope-rms"]
LAYERS = 3


def _full(method, number):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


# recompute settings -> how often each layer's attention core runs in one forward and backward, and its layer
CHOICES = {
    "none": ({}, [1, 1, 1], [1, 1, 1]),
    "selective": ({"recompute_granularity": "selective"}, [2, 2, 2], [1, 1, 1]),
    "uniform-1": (_full("uniform", 1), [2, 2, 2], [2, 2, 2]),
    "uniform-2": (_full("uniform", 2), [2, 2, 2], [2, 2, 2]),
    "block-1": (_full("block", 1), [2, 1, 1], [2, 1, 1]),
    "block-3": (_full("block", 3), [2, 2, 2], [2, 2, 2]),
}


def _run(changes, masked=False, training=True):
    model = build(CASE, num_layers=LAYERS, hidden_dropout=0.2, attention_dropout=0.2, **changes)
    model.train(training)
    counts = {}
    for layer in model.decoder.layers:
        for module in (layer, layer.self_attention.core_attention):
            counts[module] = 0
            module.register_forward_pre_hook(lambda module, _: counts.__setitem__(module, counts[module] + 1))
    ids, labels = batch()
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool) if masked else None
    if mask is not None:
        mask[..., 5:, :5] = True
    torch.manual_seed(17)
    losses = model(ids, None, mask, labels=labels)
    losses.mean().backward()
    layers = [counts[layer] for layer in model.decoder.layers]
    cores = [counts[layer.self_attention.core_attention] for layer in model.decoder.layers]
    return losses.detach(), [p.grad for p in model.parameters()], torch.rand(1), cores, layers


@pytest.mark.parametrize(
    ("choice", "masked"),
    quick(
        product(CHOICES, (False, True)),
        lambda case: case[0] == "selective" or case[1] == (case[0] in ("none", "uniform-2", "block-1")),
    ),
)
def test_recomputation_is_bitwise_with_dropout(choice, masked):
    changes, expected_cores, expected_layers = CHOICES[choice]
    losses, gradients, after, _, _ = _run({}, masked)
    found_losses, found_gradients, found_after, cores, layers = _run(changes, masked)
    assert torch.equal(found_losses, losses) and torch.equal(found_after, after)
    assert all(map(torch.equal, found_gradients, gradients))
    assert (cores, layers) == (expected_cores, expected_layers)


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_is_recomputed_in_evaluation(choice):
    cores, layers = _run(CHOICES[choice][0], training=False)[3:]
    assert cores == layers == [1] * LAYERS
