"""Megatron-LM's specs, its order of arguments its models without ends, and what is written about a model so built."""

import pytest
import torch

from core.base.errors import CheckpointError, ConfigError, DataError, ParallelConfigError
from core.models.gpt import GPTModel, get_gpt_layer_local_spec
from core.models.gpt.architecture import architecture_of
from core.models.gpt.hf_config import choose_layout
from core.transformer.mlp import MLP
from core.transformer.norms import RMSNorm
from core.transformer.spec_utils import ModuleSpec
from core.transformer.transformer_block import TransformerBlockSubmodules
from tests.unit.models._cases import LENGTH, VOCAB, batch, small_config


def test_argument_order_is_megatrons():
    model = GPTModel(small_config(), get_gpt_layer_local_spec(), VOCAB, LENGTH)
    assert model.position_embedding_type == "learned_absolute" and model.embedding.position_embeddings is not None
    with pytest.raises(ConfigError, match="transformer_layer_spec is 16; as in Megatron-LM the second argument"):
        GPTModel(small_config(), 16, 8)
    ids, labels = batch()
    with pytest.raises(DataError, match=r"decoder_input has shape .* labels are the fifth: give labels by name"):
        model(ids, None, None, labels)
    assert torch.equal(model(ids, None, None, None, labels), model(ids, labels=labels))


def test_default_spec_builds_equal_model():
    models = []
    for spec in (None, get_gpt_layer_local_spec(), ModuleSpec(("core.transformer", "TransformerLayer"))):
        torch.manual_seed(3)
        models.append(GPTModel(small_config(), spec, VOCAB, LENGTH).eval())
    ids, labels = batch()
    plain, *others = (model(ids, labels=labels) for model in models)
    assert all(torch.equal(plain, other) for other in others)


class _Halved(MLP):
    """As an MLP of Megatron-LM's, which also returns a bias."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2, torch.ones(1)


def test_spec_with_other_classes():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.mlp = _Halved
    layer = GPTModel(small_config(), spec, VOCAB, LENGTH).eval().decoder.layers[0]
    assert isinstance(layer.input_layernorm, RMSNorm) and isinstance(layer.self_attention.q_layernorm, RMSNorm)
    x = torch.randn(4, 1, 16)
    attended = x + layer.self_attention(layer.input_layernorm(x))
    assert torch.equal(layer(x), attended + (MLP.forward(layer.mlp, layer.pre_mlp_layernorm(attended)) / 2 + 1))
    with pytest.raises(ConfigError, match="layer_specs has 1 entries, num_layers is 2"):
        GPTModel(small_config(), TransformerBlockSubmodules([spec]), VOCAB, LENGTH)
    spec.submodules.mlp_bda = torch.add
    with pytest.raises(ParallelConfigError, match=r"mlp_bda .* the layer adds the branch"):
        GPTModel(small_config(), spec, VOCAB, LENGTH)


def test_model_without_embedding_or_head():
    torch.manual_seed(3)
    whole = GPTModel(small_config(), None, VOCAB, LENGTH).eval()
    first = GPTModel(small_config(), None, VOCAB, LENGTH, post_process=False).eval()
    last = GPTModel(small_config(), None, VOCAB, LENGTH, pre_process=False).eval()
    assert first.output_layer is None and first.decoder.final_layernorm is None and last.embedding is None
    first.load_state_dict(whole.state_dict(), strict=False)
    last.load_state_dict(whole.state_dict(), strict=False)
    ids, _ = batch()
    embedded = whole.embedding(ids)
    expected = whole(ids)
    assert torch.equal(whole(ids, decoder_input=embedded), expected)
    assert torch.equal(last(ids, decoder_input=embedded), expected)
    last.set_input_tensor([embedded])
    assert torch.equal(last(ids), expected)
    hidden = first(ids)
    assert torch.equal(whole.output_layer(whole.decoder.final_layernorm(hidden))[0].transpose(0, 1), expected)
    with pytest.raises(ParallelConfigError, match=r"share_embeddings_and_output_weights .* without pre_process"):
        GPTModel(small_config(), None, VOCAB, LENGTH, pre_process=False, share_embeddings_and_output_weights=True)


def test_architecture_of_built_model():
    model = GPTModel(
        small_config(), None, VOCAB, LENGTH, position_embedding_type="rope", rotary_base=500, rotary_percent=0.5
    )
    actual = architecture_of(model)
    assert (actual["rotary_base"], actual["rotary_percent"]) == (500.0, 0.5)
    with pytest.raises(CheckpointError, match=r"layer 0 of the model was built by a transformer_layer_spec"):
        architecture_of(GPTModel(small_config(), get_gpt_layer_local_spec(normalization="RMSNorm"), VOCAB, LENGTH))
    named = GPTModel(small_config(activation_func=torch.sin), None, VOCAB, LENGTH)
    with pytest.raises(CheckpointError, match="a function without a name"):
        choose_layout(architecture_of(named))
