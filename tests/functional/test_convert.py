"""A run becomes a model of Hugging Face's, and that a checkpoint again, which writes the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit._program import TINY, one_line, run_program

FLAGS = (
    *(*TINY, "--train-iters", "4", "--lr", "1e-2", "--num-query-groups", "1", "--qk-layernorm"),
    *("--untie-embeddings-and-output-weights", "--norm-epsilon", "1e-6"),
)


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ended = run_program("pretrain_gpt", *FLAGS, "--data-path", corpus, "--save", folder / "a", folder=folder)
    assert ended.status == 0, ended.err
    return folder / "a"


def _text(run: Path) -> str:
    flags = ["--prompt", "the square of ", "--num-tokens", "15", "--temperature", "0"]
    ended = run_program("generate", "--load", run, *flags, folder=run.parent)
    assert ended.status == 0, ended.err
    return ended.out


def test_conversion_round_trips(corpus: Path, run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    there = run_program("convert", "--load", run, "--save", tmp_path / "hf", "--max-shard-gb", "1e-5", folder=tmp_path)
    assert there.status == 0 and "AutoModelForCausalLM.from_pretrained" in there.out, there.err
    assert len([*(tmp_path / "hf").glob("model-*.safetensors")]) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("the square of ", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=15, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = _text(run)
    assert text.rstrip("\n").startswith(tokenizer.decode(written[0]).removesuffix(tokenizer.eos_token))

    back = run_program("convert", "--load", tmp_path / "hf", "--save", tmp_path / "b", folder=tmp_path)
    assert back.status == 0, back.err
    assert _text(tmp_path / "b") == text

    # The flags that it printed start a run from these weights: its first loss is not that of a new model.
    printed = back.out.splitlines()[-1].split()[2:]
    more = [
        "--train-iters",
        "4",
        "--data-path",
        corpus,
        "--save",
        tmp_path / "c",
        "--seq-length",
        "32",
        "--lr",
        "1e-6",
    ]
    rest = ["--micro-batch-size", "2", "--log-interval", "1", "--eval-iters", "0", "--min-lr", "0"]
    on = run_program("pretrain_gpt", *printed, *more, *rest, "--use-torch-fsdp2", folder=tmp_path)
    assert on.status == 0, on.err
    losses = [json.loads(line)["loss"] for folder in (run, tmp_path / "c") for line in _log(folder)]
    assert losses[4] < losses[0] - 0.3


@pytest.mark.long
def test_adapters_are_trained_on_a_run_and_merged(corpus: Path, run: Path, tmp_path: Path) -> None:
    # In bf16 the frozen weights have no fp32 masters: they are cast from the run's, and to what merges them.
    rank = [*FLAGS, "--bf16", "--data-path", corpus, "--lora-rank", "4"]
    lora = [*rank, "--lora-targets", "linear_qkv", "linear_fc2"]
    start = ["--pretrained-checkpoint", run, "--save", tmp_path / "a"]
    ended = run_program("pretrain_gpt", *lora, *start, folder=tmp_path)
    assert ended.status == 0, ended.err
    losses = [json.loads(line)["loss"] for folder in (run, tmp_path / "a") for line in _log(folder)]
    assert losses[4] < losses[0] - 0.3  # it starts from the run's weights
    text = _text(tmp_path / "a")
    assert text != _text(run)  # and trains
    for source, target in ((tmp_path / "a", tmp_path / "hf"), (tmp_path / "hf", tmp_path / "b")):
        ended = run_program("convert", "--load", source, "--save", target, folder=tmp_path)
        assert ended.status == 0, ended.err
    assert _text(tmp_path / "b") == text

    for flags, said in (
        ([*FLAGS, "--data-path", corpus, "--load", tmp_path / "a"], "lora_rank 4 there and None here"),
        ([*lora, "--load", run], "lora_rank None there and 4 here"),
        ([*lora, "--load", tmp_path / "a", "--lora-alpha", "9"], "lora_alpha None there and 9.0 here"),
        ([*lora, "--pretrained-checkpoint", tmp_path / "a", "--save", "x"], "holds LoRA adapters; continue their run"),
        ([*rank, "--lora-targets", "--save", "x"], "requested without a target"),
    ):
        assert said in one_line(run_program("pretrain_gpt", *flags, folder=tmp_path))


def _log(run: Path) -> list[str]:
    return [line for line in (run / "log.jsonl").read_text().splitlines() if '"loss"' in line]


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    for flags, said in (
        (["--load", tmp_path / "no", "--save", "x"], "no such folder"),
        (["--load", run, "--save", "x", "--layout", "gpt2"], "the layout gpt2 cannot express"),
        (["--load", run, "--save", "x", "--max-shard-gb", "0"], "--max-shard-gb is 0"),
        (["--load", run, "--save", "x", "--vocab-size", "9999"], "vocab_size is 9999; the model has"),
    ):
        assert said in one_line(run_program("convert", *flags, folder=tmp_path))
    assert not [*tmp_path.iterdir()]
