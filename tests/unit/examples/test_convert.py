"""A model of Hugging Face's becomes a run: the flags that make it, and the folder that it is written to."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from core.base.errors import CheckpointError
from core.models.gpt.architecture import model_fields
from core.models.gpt.hugging_face import hf_architecture, save_hugging_face
from core.training.config.arguments import parse_arguments
from examples.gpt.convert import flags_of, run_from_hugging_face
from tests.unit._program import load_program
from tests.unit.models.gpt.test_hugging_face import KINDS, build


@pytest.mark.parametrize(("kind", "tied"), [(kind, number % 2 == 0) for number, kind in enumerate(KINDS)])
def test_the_printed_flags_make_the_model(kind: str, tied: bool, tmp_path: Path):
    save_hugging_face(build(kind, tied), tmp_path / "hf")
    architecture = hf_architecture(tmp_path / "hf")
    program = load_program("pretrain_gpt").DEFAULTS | {"seq_length": 8}  # which would say otherwise
    rest = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]
    config = parse_arguments([*shlex.split(shlex.join(flags_of(architecture))), *rest], program)
    actual = model_fields(config.model)
    for name, value in architecture.transformer.items():
        assert actual[name] == value, name
    assert config.gpt.position_embedding_type == architecture.position_embedding_type
    assert config.gpt.untie_embeddings_and_output_weights is not tied
    assert config.max_sequence_length == architecture.max_sequence_length


def test_a_folder_in_use_is_left_alone(tmp_path: Path):
    save_hugging_face(build("llama"), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        run_from_hugging_face(tmp_path / "hf", tmp_path)
