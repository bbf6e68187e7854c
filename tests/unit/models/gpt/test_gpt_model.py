"""GPTModel against a GPT written once more, from meta, and with input that it cannot take."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from core import parallel_state
from core.errors import CheckpointError, ConfigError, DataError, ParallelConfigError
from core.models.gpt import GPTModel, get_gpt_layer_local_spec, gpt_model
from core.models.gpt.architecture import architecture_of
from core.models.gpt.hf_config import choose_layout
from core.transformer import TransformerConfig, materialize
from core.transformer.mlp import MLP
from core.transformer.norms import RMSNorm
from core.transformer.spec_utils import ModuleSpec
from core.transformer.transformer_block import TransformerBlockSubmodules
from tests.unit._spawn import run_distributed
from tests.unit.models._cases import BATCH, CASES, LENGTH, VOCAB, Case, batch, build, relative_error
from tests.unit.models._reference import fp64_parameters, reference_losses

SMALL = CASES["gelu-learned-tied"]


def config(**changes):
    return TransformerConfig(**(SMALL.config | changes))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_reference(name):
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


def test_the_comparison_sees_a_swap_of_gate_and_up():
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
    alone = torch.cat(
        [
            model(part, labels=next_)
            for part, next_ in ((ids[:, :cut], labels[:, :cut]), (ids[:, cut:], labels[:, cut:]))
        ],
        1,
    )
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(packed, model(ids, positions, None, labels=labels))


def test_a_mask_hides_more_but_never_shows_the_future():
    model = build(SMALL)
    ids, labels = batch()
    nothing_hidden = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(model(ids, None, nothing_hidden, labels=labels), model(ids, labels=labels))


def test_given_positions_are_used_under_both_kinds_of_embedding():
    for name in ("gelu-learned-tied", "swiglu-gqa-rope-rms"):
        model = build(CASES[name])
        ids, labels = batch()
        plain = model(ids, labels=labels)
        counted = torch.arange(LENGTH).expand(BATCH, -1)
        torch.testing.assert_close(model(ids, counted, labels=labels), plain)
        assert not torch.allclose(model(ids, counted.flip(1), labels=labels), plain)


@pytest.mark.parametrize("name", CASES)
def test_meta_then_materialize_equals_direct_construction(name):
    case = CASES[name]

    def make():
        torch.manual_seed(3)
        return GPTModel(
            TransformerConfig(**case.config),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type=case.positions,
        )

    direct, after_direct = make(), torch.rand(1)
    with torch.device("meta"):
        model = make()
    after_meta = torch.rand(1)
    marks = {key: dict(vars(parameter)) for key, parameter in model.named_parameters()}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert materialize(model, "cpu") is model
    assert torch.equal(after_direct, after_meta)  # both drew equally from the stream
    for (key, found), (_, expected) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(found, expected), key
        assert vars(found) == vars(expected) == marks[key], key
    ids, labels = batch()
    assert torch.equal(model(ids, labels=labels), direct(ids, labels=labels))


UNEVEN = Case(SMALL.config | {"hidden_size": 15, "num_attention_heads": 3}, tied=True, positions="learned_absolute")


def _make_uneven():
    torch.manual_seed(3)
    return GPTModel(
        TransformerConfig(**UNEVEN.config),
        vocab_size=VOCAB + 1,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=UNEVEN.tied,
        position_embedding_type=UNEVEN.positions,
    )


def _materialize_sharded():
    direct = _make_uneven()
    with torch.device("meta"):
        model = _make_uneven()
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    materialize(model)
    for (name, found), (_, expected) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), expected), name
        assert {key: getattr(found, key) for key in vars(expected)} == vars(expected), name
    ids, labels = batch()
    return torch.equal(model(ids, labels=labels), direct(ids, labels=labels))


def test_meta_then_sharded_then_materialized_equals_direct_construction():
    assert run_distributed(_materialize_sharded, 2) == [True, True]


def test_the_seed_decides_initial_values_and_names_tell_them_apart():
    torch.manual_seed(1)
    first = GPTModel(
        config(init_method_std=0.02), vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope"
    )
    torch.manual_seed(2)
    other = GPTModel(
        config(init_method_std=0.02), vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope"
    )
    assert not torch.equal(first.output_layer.weight, other.output_layer.weight)
    layers = first.decoder.layers
    assert not torch.equal(layers[0].mlp.linear_fc1.weight, layers[1].mlp.linear_fc1.weight)
    assert layers[0].mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)  # sqrt(2 x 2 layers)
    assert torch.equal(layers[0].input_layernorm.weight, torch.ones(16))
    assert not layers[0].mlp.linear_fc1.bias.any()


def test_names_are_megatrons():
    tied, untied = (
        build(SMALL).state_dict(),
        build(CASES["qk-norm-partial-rope-tied"]._replace(tied=False)).state_dict(),
    )
    assert "output_layer.weight" not in tied and "embedding.position_embeddings.weight" in tied
    layer = [name.removeprefix("decoder.layers.1.") for name in untied if name.startswith("decoder.layers.1.")]
    assert sorted(layer) == sorted(
        f"{module}.{kind}"
        for module in (
            "input_layernorm",
            "self_attention.linear_qkv",
            "self_attention.q_layernorm",
            "self_attention.k_layernorm",
            "self_attention.linear_proj",
            "pre_mlp_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
        for kind in ("weight", "bias")
    )
    assert sorted(name for name in untied if not name.startswith("decoder.layers.")) == [
        "decoder.final_layernorm.bias",
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]


def test_a_shared_embedding_is_marked_and_is_the_output_weight():
    tied, untied = build(SMALL), build(CASES["geglu-rope"])
    weight = tied.embedding.word_embeddings.weight
    assert weight.shared_embedding
    assert not hasattr(weight, "shared")  # the mark of a second copy, which a gradient norm leaves out
    assert tied.shared_embedding_or_output_weight() is weight
    assert not hasattr(untied.embedding.word_embeddings.weight, "shared_embedding")
    assert untied.shared_embedding_or_output_weight() is untied.output_layer.weight


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("changes", [{}, {"num_query_groups": 1}, {"recompute_granularity": "selective"}])
def test_causal_attention_never_makes_a_tensor_of_s_times_s(changes):
    length = 1024
    model = GPTModel(config(**changes), vocab_size=VOCAB, max_sequence_length=length, position_embedding_type="rope")
    ids = torch.zeros(1, length, dtype=torch.long)

    def largest(mask):
        with _LargestTensor() as seen:
            model(ids, None, mask, labels=ids).sum().backward()
        return seen.elements

    assert largest(None) < length * length / 8
    assert largest(torch.zeros(1, 1, length, length, dtype=torch.bool)) >= length * length  # the count can see one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_embedding_type": "alibi"}, '\'alibi\'.*"rope" or "learned_absolute"'),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_sequence_length": -1}, "max_sequence_length is -1"),
    ],
)
def test_arguments_that_cannot_be_honoured(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GPTModel(config(), **({"vocab_size": VOCAB, "max_sequence_length": LENGTH} | arguments))


@pytest.mark.parametrize("degree", ["pipeline_model_parallel_size", "expert_model_parallel_size"])
def test_degrees_that_models_do_not_have_are_refused(degree):
    with pytest.raises(ParallelConfigError, match=f"{degree} is 2"):
        GPTModel(config(**{degree: 2}), vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope")


def test_batches_that_cannot_be_taken():
    model = build(SMALL)
    ids, labels = batch()
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    for arguments, message in (
        ((torch.zeros(1, LENGTH + 1, dtype=torch.long),), f"{LENGTH + 1} tokens.*max_sequence_length of {LENGTH}"),
        ((ids[0],), r"takes \[batch, sequence\]"),
        ((ids, None, None, None, labels[:, 1:]), r"labels has shape \[2, 11\], but input_ids \[2, 12\]"),
        ((ids, torch.arange(LENGTH)), r"position_ids has shape \[12\]"),
        ((ids, torch.full_like(ids, LENGTH)), f"positions outside 0 to {LENGTH - 1}"),
        ((ids, None, mask[:, 0]), r"attention_mask has shape \[2, 12, 12\]"),
        ((ids, None, mask.long()), r"takes torch.bool, True where a token is hidden"),
        ((torch.full_like(ids, VOCAB),), f"token id {VOCAB}"),
    ):
        with pytest.raises(DataError, match=message):
            model(*arguments)


def test_without_initialization_nothing_is_filled_and_the_draw_is_the_same(monkeypatch):
    filled = []
    monkeypatch.setattr(gpt_model, "initialize_parameters", lambda model, seed: filled.append(seed))
    seeds = []
    for perform in (True, False):
        torch.manual_seed(5)
        seeds.append(
            GPTModel(
                config(perform_initialization=perform),
                vocab_size=VOCAB,
                max_sequence_length=LENGTH,
                position_embedding_type="rope",
            ).init_seed
        )
    assert seeds[0] == seeds[1] and filled == seeds[:1]


def _refuses_groups_of_another_degree() -> None:
    small = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    for sizes, said in (
        (
            {"pipeline_model_parallel_size": 2},
            "initialised with pipeline_model_parallel_size 2, but GPTModel supports only 1",
        ),
        ({"context_parallel_size": 2}, "config.context_parallel_size is 1, but .* groups of 2"),
    ):
        parallel_state.initialize_model_parallel(**sizes)
        with pytest.raises(ParallelConfigError, match=said):
            GPTModel(TransformerConfig(**small), vocab_size=16, max_sequence_length=8, position_embedding_type="rope")
        parallel_state.destroy_model_parallel()
    with pytest.raises(ParallelConfigError, match=r"config.context_parallel_size is 2, but .* groups of 1"):
        GPTModel(
            TransformerConfig(**small, context_parallel_size=2),
            vocab_size=16,
            max_sequence_length=8,
            position_embedding_type="rope",
        )


def test_process_groups_of_a_degree_that_the_model_lacks_are_refused():
    run_distributed(_refuses_groups_of_another_degree, 2)


def test_arguments_stand_in_megatrons_order():
    model = GPTModel(config(), get_gpt_layer_local_spec(), VOCAB, LENGTH)
    assert model.position_embedding_type == "learned_absolute" and model.embedding.position_embeddings is not None
    with pytest.raises(ConfigError, match="transformer_layer_spec is 16; as in Megatron-LM the second argument"):
        GPTModel(config(), 16, 8)
    ids, labels = batch()
    with pytest.raises(DataError, match=r"decoder_input has shape .* labels are the fifth: give labels by name"):
        model(ids, None, None, labels)
    assert torch.equal(model(ids, None, None, None, labels), model(ids, labels=labels))


def test_a_spec_of_the_same_classes_is_the_same_model():
    models = []
    for spec in (None, get_gpt_layer_local_spec(), ModuleSpec(("core.transformer", "TransformerLayer"))):
        torch.manual_seed(3)
        models.append(GPTModel(config(), spec, VOCAB, LENGTH).eval())
    ids, labels = batch()
    plain, *others = (model(ids, labels=labels) for model in models)
    assert all(torch.equal(plain, other) for other in others)


class _Halved(MLP):
    """As an MLP of Megatron-LM's, which also returns a bias."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2, torch.ones(1)


def test_a_spec_may_name_other_classes():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.mlp = _Halved
    layer = GPTModel(config(), spec, VOCAB, LENGTH).eval().decoder.layers[0]
    assert isinstance(layer.input_layernorm, RMSNorm) and isinstance(layer.self_attention.q_layernorm, RMSNorm)
    x = torch.randn(4, 1, 16)
    attended = x + layer.self_attention(layer.input_layernorm(x))
    assert torch.equal(layer(x), attended + (MLP.forward(layer.mlp, layer.pre_mlp_layernorm(attended)) / 2 + 1))
    with pytest.raises(ConfigError, match="layer_specs has 1 entries, and num_layers is 2"):
        GPTModel(config(), TransformerBlockSubmodules([spec]), VOCAB, LENGTH)
    spec.submodules.mlp_bda = torch.add
    with pytest.raises(ParallelConfigError, match=r"mlp_bda .* the layer adds the branch"):
        GPTModel(config(), spec, VOCAB, LENGTH)


def test_the_ends_of_a_model_may_be_left_out():
    torch.manual_seed(3)
    whole = GPTModel(config(), None, VOCAB, LENGTH).eval()
    first = GPTModel(config(), None, VOCAB, LENGTH, post_process=False).eval()
    last = GPTModel(config(), None, VOCAB, LENGTH, pre_process=False).eval()
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
        GPTModel(config(), None, VOCAB, LENGTH, pre_process=False, share_embeddings_and_output_weights=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp16_lm_cross_entropy": True}, "GPTModel: fp16_lm_cross_entropy is True"),
        ({"rope_scaling": True}, "change rotary_base"),
        ({"mtp_block_spec": ModuleSpec(MLP)}, "mtp_block_spec"),
        ({"vp_stage": 0}, "a rank holds one pipeline stage"),
    ],
)
def test_what_a_model_lacks_is_refused_by_megatrons_name(given, message):
    with pytest.raises(ParallelConfigError, match=message):
        GPTModel(config(), None, VOCAB, LENGTH, **given)
    model = GPTModel(config(), None, VOCAB, LENGTH)
    ids, _ = batch()
    with pytest.raises(ParallelConfigError, match=r"packed_seq_params .* document_starts"):
        model(ids, packed_seq_params=object())


def test_what_a_model_computes_is_described_as_it_was_built():
    model = GPTModel(
        config(), None, VOCAB, LENGTH, position_embedding_type="rope", rotary_base=500, rotary_percent=0.5
    )
    found = architecture_of(model)
    assert (found["rotary_base"], found["rotary_percent"]) == (500.0, 0.5)
    with pytest.raises(CheckpointError, match=r"layer 0 of the model was built by a transformer_layer_spec"):
        architecture_of(GPTModel(config(), get_gpt_layer_local_spec(normalization="RMSNorm"), VOCAB, LENGTH))
    named = GPTModel(config(activation_func=torch.sin), None, VOCAB, LENGTH)
    with pytest.raises(CheckpointError, match="a function without a name"):
        choose_layout(architecture_of(named))
