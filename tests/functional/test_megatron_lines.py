"""Command lines that Megatron-LM publishes, scaled down, train the models that Megatron-LM would train.

`megatron_lines.json` has each line as its script passes it on, with the version and the path of the script, sizes that
take its place here, the flags that are removed (fp8), the line about the model that a run begins with, and the samples
of its first steps.
"""

from __future__ import annotations

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.base.errors import ConfigError
from core.dist_checkpointing import load_metadata
from core.training.config.arguments import parse_arguments
from core.training.state import build_gpt, make_groups
from tests.unit._program import content, log, pretrain, run_program
from tests.unit._spawn import run_distributed
from tests.unit.adapters import _megatron

LINES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("megatron_lines.json").read_text())


def words_of(name: str, *, removed: bool = True, **places: str) -> list[str]:
    """Returns the words of a line, with sizes scaled, paths in place, and, by default, without its flags of fp8.

    No processes read samples: ranks of tests have none.
    """
    case, flags = LINES[name], list[list[str]]()
    for word in shlex.split(case["line"]):
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    words: list[str] = []
    for flag, *values in flags:
        if removed and flag in case["removed"]:
            continue
        if flag in case["scaled"]:
            values = shlex.split(case["scaled"][flag])
        words += [flag, *(places.get(value, value) for value in values)]
    return [*words, "--num-workers", "0"]


@pytest.fixture(scope="module")
def places(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by the names that they have in the lines. The vocabulary is that of the corpus: bytes and their end."""
    folder = tmp_path_factory.mktemp("files")
    alphabet = {chr(256 + index): index for index in range(256)}
    (folder / "vocab.json").write_text(json.dumps({**alphabet, "<|endoftext|>": 256}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{corpus}.{name}", folder / name)
    files = {"VOCAB": "vocab.json", "MERGES": "merges.txt", "TOKENIZER": "tokenizer.model", "TENSORBOARD": "log"}
    files["${DATA_PATH}/utils/nemotron_2_256k.model"] = "tokenizer.model"
    paths = {name: str(folder / file) for name, file in files.items()}
    return {
        **paths,
        "CORPUS": str(corpus),
        "$DATA_BLEND": str(corpus),
        "${CHECKPOINT_LOAD_PATH}": "${CHECKPOINT_SAVE_PATH}",
    }


@pytest.mark.parametrize("name", LINES)
def test_a_published_line_trains(name: str, places: dict[str, str], tmp_path: Path):
    words = words_of(name, **places)
    ended = run_program("pretrain_gpt", *words, folder=tmp_path, ranks=2, WANDB_MODE="disabled")
    assert ended.status == 0, ended.err
    assert f"model: {LINES[name]['model']}\n" in ended.out
    assert ended.err.count("warning: ignored, since they change no number here") == ("--use-mcore-models" in words)
    config = parse_arguments(words)
    folder = tmp_path / str(config.checkpoint.save)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 3 and all(line["loss"] > 0 for line in steps)
    metadata = load_metadata(folder / "iter_0000003")
    assert metadata["iteration"] == 3
    assert metadata["consumed_samples"] == sum(LINES[name]["batches"])


def test_a_line_with_fp8_is_refused_once_with_all_reasons():
    words = [*words_of("Llama 3 8B fp8", removed=False), "--multi-latent-attention", "--num-layerz", "2"]
    with pytest.raises(ConfigError) as error:
        parse_arguments(words)
    lines = str(error.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "--fp8-amax-history-len, --fp8-amax-compute-algo",
        "--fp8-param-gather",
        "--multi-latent-attention",
        "Unknown option",
        "fp8_recipe is None; it takes one of tensorwise, rowwise",
    ]
    assert lines[3].endswith("--num-layerz: did you mean --num-layers?")


def test_a_batch_that_grows_resumes_as_if_never_stopped(places: dict[str, str], tmp_path: Path):
    words = [*words_of("GPT-3 175B", **places), "--lr-warmup-fraction", "0.5", "--initial-loss-scale", "256"]
    for folder, stops in ((tmp_path / "whole", [[]]), (tmp_path / "stopped", [["--exit-interval", "2"], []])):
        for more in stops:
            run_distributed(pretrain, 2, *words, "--save", str(folder), "--load", str(folder), *more)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert sorted(path.name for path in stopped.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    assert log(stopped) == log(whole)
    assert content(stopped / "iter_0000003") == content(whole / "iter_0000003")
    rates = [line["lr"] for line in log(whole) if "lr" in line]
    # Samples 0, 2 and 6 of a warm-up over 24 of the 48 samples of the decay.
    assert rates == pytest.approx([0.0, 6e-5 * 2 / 24, 6e-5 * 6 / 24])


def _theirs(words: list[str]) -> nn.Module:
    """Builds the GPT that megatron-core makes of the GPT-3 line, whose other settings are its parser's defaults."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = dict(pairwise(words))
    names = ("--num-layers", "--hidden-size", "--num-attention-heads")
    config = TransformerConfig(
        **{name[2:].replace("-", "_"): int(given[name]) for name in names},
        init_method_std=float(given["--init-method-std"]),
        bias_activation_fusion=True,  # --no-bias-gelu-fusion is not given
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        transformer_impl="local",
    )
    length = int(given["--max-position-embeddings"])
    return GPTModel(config, get_gpt_layer_local_spec(), 512, length, share_embeddings_and_output_weights=True)


@pytest.mark.filterwarnings("ignore")
def test_gpt3_is_the_model_of_megatron_core(places: dict[str, str]):
    pytest.importorskip("megatron.core")
    words = words_of("GPT-3 175B", **places)
    words = [*words[: words.index("--fp16")], *words[words.index("--fp16") + 1 :], "--tensor-model-parallel-size", "1"]
    run_distributed(_are_equal, 1, words)


def _are_equal(words: list[str]) -> None:
    config = parse_arguments(words)
    make_groups(config)
    torch.manual_seed(3)
    ours = build_gpt(config, 512).eval()
    with _megatron.groups(), mock.patch.object(torch._dynamo.config, "disable", True):
        theirs = _theirs(words).eval()
        shapes = {name: tensor.shape for name, tensor in theirs.named_parameters()}
        assert {name: tensor.shape for name, tensor in ours.named_parameters()} == shapes
        for name, tensor in theirs.named_parameters():
            mine = ours.get_parameter(name)
            assert mine.std(correction=0).item() == pytest.approx(tensor.std(correction=0).item(), rel=0.15), name
            assert mine.mean().item() == pytest.approx(tensor.mean().item(), abs=1e-3), name
        theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
        tokens = torch.randint(0, 257, (2, 33), generator=torch.Generator().manual_seed(5))
        places, mask = torch.arange(32).expand(2, 32), torch.ones(32, 32).triu(1).bool()[None, None]
        losses = [model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]) for model in (theirs, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
