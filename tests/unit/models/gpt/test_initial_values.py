"""Initial values of a GPTModel: from meta, sharded, by the seed, or not at all."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core.models.gpt import gpt_model
from core.transformer import materialize
from tests.unit._spawn import on_ranks
from tests.unit.models._cases import CASES, SMALL, VOCAB, Case, batch, construct


@pytest.mark.parametrize("name", CASES)
def test_meta_then_materialize_equals_direct_construction(name):
    direct, after_direct = construct(CASES[name]), torch.rand(1)
    with torch.device("meta"):
        model = construct(CASES[name])
    after_meta = torch.rand(1)
    marks = {key: dict(vars(parameter)) for key, parameter in model.named_parameters()}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert materialize(model, "cpu") is model
    assert torch.equal(after_direct, after_meta)  # both drew equally from the stream
    for (key, actual), (_, expected) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(actual, expected), key
        assert vars(actual) == vars(expected) == marks[key], key
    ids, labels = batch()
    assert torch.equal(model(ids, labels=labels), direct(ids, labels=labels))


UNEVEN = Case(SMALL.config | {"hidden_size": 15, "num_attention_heads": 3}, tied=True, positions="learned_absolute")


@on_ranks(2)
def test_meta_sharded_materialized_equals_direct_construction():
    direct = construct(UNEVEN, vocab_size=VOCAB + 1)
    with torch.device("meta"):
        model = construct(UNEVEN, vocab_size=VOCAB + 1)
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    materialize(model)
    for (name, actual), (_, expected) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert isinstance(actual, DTensor)
        assert torch.equal(actual.full_tensor(), expected), name
        assert {key: getattr(actual, key) for key in vars(expected)} == vars(expected), name
    ids, labels = batch()
    assert torch.equal(model(ids, labels=labels), direct(ids, labels=labels))


def test_seed_and_names_decide_initial_values():
    case = CASES["geglu-rope"]
    first, other = (construct(case, seed, init_method_std=0.02, gated_linear_unit=False) for seed in (1, 2))
    assert not torch.equal(first.output_layer.weight, other.output_layer.weight)
    layers = first.decoder.layers
    assert not torch.equal(layers[0].mlp.linear_fc1.weight, layers[1].mlp.linear_fc1.weight)
    assert layers[0].mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)  # sqrt(2 x 2 layers)
    assert torch.equal(layers[0].input_layernorm.weight, torch.ones(16))
    assert not layers[0].mlp.linear_fc1.bias.any()


def test_perform_initialization_false_leaves_memory(monkeypatch):
    filled = []
    monkeypatch.setattr(gpt_model, "initialize_parameters", lambda model, seed: filled.append(seed))
    seeds = [construct(CASES["geglu-rope"], perform_initialization=perform).init_seed for perform in (True, False)]
    assert seeds[0] == seeds[1] and filled == seeds[:1]
