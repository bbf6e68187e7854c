"""Arguments, degrees, batches and process groups that a GPTModel cannot take."""

import pytest
import torch

from core import parallel_state
from core.base.errors import ConfigError, DataError, ParallelConfigError
from core.models.gpt import GPTModel
from core.transformer.mlp import MLP
from core.transformer.spec_utils import ModuleSpec
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks
from tests.unit.models._cases import BATCH, CASES, LENGTH, SMALL, VOCAB, batch, build, construct, small_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_embedding_type": "alibi"}, "'alibi'; it takes one of rope, learned_absolute"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_sequence_length": -1}, "max_sequence_length is -1"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GPTModel(small_config(), **({"vocab_size": VOCAB, "max_sequence_length": LENGTH} | arguments))


@pytest.mark.parametrize(
    "fields",
    [{"pipeline_model_parallel_size": 2, "num_layers": 2}, {"expert_model_parallel_size": 2, "num_moe_experts": 4}],
)
def test_degrees_without_their_groups_are_refused(fields):
    with pytest.raises(ParallelConfigError, match=f"{next(iter(fields))} is 2"):
        construct(CASES["geglu-rope"], **fields)


def test_stages_that_are_not_at_their_place_are_refused():
    cut = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
    config = small_config(**cut, pipeline_parallel_schedule="ZBVZeroBubble")
    sizes = {"vocab_size": VOCAB, "max_sequence_length": LENGTH}
    with fake_world(0, 2):
        parallel_state.initialize_model_parallel(1, 2, 2)
        for arguments, said in (
            ({"vp_stage": 0}, "post_process is True on pipeline stage 0 of 4 .* post_process=stage.is_last"),
            ({"vp_stage": 1, "post_process": True}, "pre_process is True on pipeline stage 3 of 4"),
            ({"vp_stage": 2}, "vp_stage is 2 and virtual_pipeline_model_parallel_size 2"),
            (
                {"vp_stage": 0, "post_process": False, "share_embeddings_and_output_weights": True},
                "'ZBVZeroBubble' has the first and the last stage on one rank",
            ),
        ):
            with pytest.raises(ParallelConfigError, match=said):
                GPTModel(config, **sizes, **arguments)


def test_malformed_batches_are_refused():
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


@on_ranks(2)
def test_process_groups_of_unsupported_degrees_are_refused():
    for sizes, said in (
        ({"pipeline_model_parallel_size": 2}, "config.pipeline_model_parallel_size is 1, but .* groups of 2"),
        ({"context_parallel_size": 2}, "config.context_parallel_size is 1, but .* groups of 2"),
    ):
        parallel_state.initialize_model_parallel(**sizes)
        with pytest.raises(ParallelConfigError, match=said):
            construct(CASES["geglu-rope"])
        parallel_state.destroy_model_parallel()
    with pytest.raises(ParallelConfigError, match=r"config.context_parallel_size is 2, but .* groups of 1"):
        construct(CASES["geglu-rope"], context_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp16_lm_cross_entropy": True}, "GPTModel: fp16_lm_cross_entropy is True"),
        ({"rope_scaling": True}, "change rotary_base"),
        ({"mtp_block_spec": ModuleSpec(MLP)}, "mtp_block_spec"),
        ({"vp_stage": 0}, "vp_stage is 0 and virtual_pipeline_model_parallel_size None"),
    ],
)
def test_missing_features_are_refused_by_megatrons_name(given, message):
    with pytest.raises(ParallelConfigError, match=message):
        GPTModel(small_config(), None, VOCAB, LENGTH, **given)
    model = GPTModel(small_config(), None, VOCAB, LENGTH)
    ids, _ = batch()
    with pytest.raises(ParallelConfigError, match=r"packed_seq_params .* document_starts"):
        model(ids, packed_seq_params=object())
