"""GPTModel against a GPT written once more: losses, gradients, names, and the memory of its attention."""

import pytest
import torch

from core.models.gpt import GPTModel
from tests.unit.models._cases import BATCH, CASES, LENGTH, SMALL, VOCAB, batch, build, relative_error, small_config
from tests.unit.models._reference import fp64_parameters, reference_losses
from tests.unit.tensor_parallel.test_linear_cross_entropy import LargestTensor


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_reference(name):
    # fp32 against fp64: what is left is fp32 rounding, 1e-7 for the loss and about ten of these for a gradient.
    model = build(CASES[name])
    ids, labels = batch()
    losses = model(ids, labels=labels)
    losses.mean().backward()
    parameters = fp64_parameters(model)
    expected = reference_losses(model, parameters, ids, labels)
    expected.mean().backward()
    assert losses.dtype == torch.float32 and losses.shape == ids.shape
    assert relative_error(losses, expected) < 1e-6
    for parameter_name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, parameters[parameter_name].grad) < 1e-5, parameter_name


def test_swapped_gate_and_up_are_detected():
    model = build(CASES["geglu-rope"])
    ids, labels = batch()
    parameters = fp64_parameters(model)
    weight = parameters["decoder.layers.1.mlp.linear_fc1.weight"]
    parameters["decoder.layers.1.mlp.linear_fc1.weight"] = weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    assert relative_error(model(ids, labels=labels), reference_losses(model, parameters, ids, labels)) > 1e-3


def test_logits_without_labels_give_the_losses():
    model = build(SMALL)
    ids, labels = batch()
    logits = model(ids)
    assert logits.shape == (BATCH, LENGTH, VOCAB) and logits.is_contiguous()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(model(ids, labels=labels).flatten(), expected)


@pytest.mark.parametrize("name", ["gelu-learned-tied", "swiglu-gqa-rope-rms"])
def test_packed_documents_do_not_see_each_other(name):
    model = build(CASES[name]).eval()
    ids, labels = batch()
    cut = 5
    hidden = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    hidden[..., cut:, :cut] = True
    positions = torch.cat((torch.arange(cut), torch.arange(LENGTH - cut))).expand(BATCH, -1)
    packed = model(ids, positions, hidden, labels=labels)
    documents = (slice(0, cut), slice(cut, None))
    alone = torch.cat([model(ids[:, part], labels=labels[:, part]) for part in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(packed, model(ids, positions, None, labels=labels))


def test_attention_mask_only_hides():
    model = build(SMALL)
    ids, labels = batch()
    nothing_hidden = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(model(ids, None, nothing_hidden, labels=labels), model(ids, labels=labels))


def test_explicit_positions_under_both_embeddings():
    for name in ("gelu-learned-tied", "swiglu-gqa-rope-rms"):
        model = build(CASES[name])
        ids, labels = batch()
        plain = model(ids, labels=labels)
        counted = torch.arange(LENGTH).expand(BATCH, -1)
        torch.testing.assert_close(model(ids, counted, labels=labels), plain)
        assert not torch.allclose(model(ids, counted.flip(1), labels=labels), plain)


def test_parameter_names_equal_megatrons():
    untied = build(CASES["qk-norm-partial-rope-tied"]._replace(tied=False)).state_dict()
    tied = build(SMALL).state_dict()
    assert "output_layer.weight" not in tied and "embedding.position_embeddings.weight" in tied
    layer = [name.removeprefix("decoder.layers.1.") for name in untied if name.startswith("decoder.layers.1.")]
    assert sorted(layer) == sorted(
        f"{module}.{kind}"
        for module in (
            *("input_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
            *(f"self_attention.{part}" for part in ("linear_qkv", "q_layernorm", "k_layernorm", "linear_proj")),
        )
        for kind in ("weight", "bias")
    )
    assert sorted(name for name in untied if not name.startswith("decoder.layers.")) == [
        "decoder.final_layernorm.bias",
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]


def test_shared_embedding_is_the_output_weight():
    tied, untied = build(SMALL), build(CASES["geglu-rope"])
    weight = tied.embedding.word_embeddings.weight
    assert weight.shared_embedding
    assert not hasattr(weight, "shared")  # the mark of a second copy, which a gradient norm leaves out
    assert tied.shared_embedding_or_output_weight() is weight
    assert not hasattr(untied.embedding.word_embeddings.weight, "shared_embedding")
    assert untied.shared_embedding_or_output_weight() is untied.output_layer.weight


@pytest.mark.parametrize("changes", [{}, {"num_query_groups": 1}, {"recompute_granularity": "selective"}])
def test_causal_attention_memory_is_not_quadratic(changes):
    length = 1024
    model = GPTModel(
        small_config(**changes), vocab_size=VOCAB, max_sequence_length=length, position_embedding_type="rope"
    )
    ids = torch.zeros(1, length, dtype=torch.long)

    def largest(mask):
        with LargestTensor() as seen:
            model(ids, None, mask, labels=ids).sum().backward()
        return seen.most

    assert largest(None) < length * length / 8
    assert largest(torch.zeros(1, 1, length, length, dtype=torch.bool)) >= length * length  # the count can see one
