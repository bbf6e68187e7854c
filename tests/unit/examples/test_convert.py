"""A model of Hugging Face's becomes a run: the flags that make it, and the folder that it is written to."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from core.base.errors import CheckpointError, ConfigError
from core.models.gpt.architecture import architecture_of, model_fields
from core.models.gpt.hugging_face import hf_architecture, save_hugging_face
from core.models.gpt.megatron_layout import load_megatron
from core.training.config.arguments import parse_arguments
from core.training.config.build import build_config
from examples.gpt.convert import convert, flags_of, run_from_hugging_face, save_weights, settings_of
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


def test_a_run_becomes_weights_for_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = build("qwen3", vocab_size=64)
    save_weights(model, build_config(settings_of(architecture_of(model))), tmp_path / "run")
    convert(load=tmp_path / "run", save=tmp_path / "there", layout="megatron")
    assert f"pretrain_gpt.py --load {tmp_path / 'there'} --ckpt-format torch_dist" in capsys.readouterr().out
    load_megatron(back := build("qwen3", vocab_size=64, seed=4), tmp_path / "there")
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="--vocab-size is about Hugging Face's models"):
        convert(load=tmp_path / "run", save=tmp_path / "other", layout="megatron", vocab_size=48)
