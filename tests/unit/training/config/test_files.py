"""Files of settings: sections or flat names, one order of precedence, and every mistake at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.base.errors import ConfigError, MissingExtraError
from core.training.config import PretrainConfig
from core.training.config.arguments import parse_arguments
from core.training.config.files import read_settings
from tests.unit.training._configs import SMALL

FSDP2_FLAGS = "--use-torch-fsdp2 --reshard-to-ranks 2 --reshard-overrides decoder.layers.0=False --param-dtype bf16"
MOE_FLAGS = "--num-experts 4 --moe-layer-freq [0,1] --moe-router-topk 2 --moe-router-load-balancing-type aux_loss"
DEFAULTS = {**SMALL, "swiglu": True, "ffn_hidden_size": 40, "min_lr": 1e-4, "lr_warmup_fraction": 0.1}
"""A program's defaults."""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write_file


def _parse(*words: object, defaults: dict = DEFAULTS) -> PretrainConfig:
    return parse_arguments([str(word) for word in words], defaults)


YAML = """
model:
  num-layers: 3
  bf16: true
optimizer:
  lr: 1e-3
  optimizer: sgd
data:
checkpoint: {save: runs/a}
run: {trackers: wandb}
num-experts: 4
disable-bias-linear: true
moe_aux_loss_coeff: [0.5]
"""
TOML = """
num-experts = 4
disable_bias_linear = true
moe-aux-loss-coeff = 0.5
bf16 = true
lr = 0.001
[model]
num_layers = 3
[optimizer]
optimizer = "sgd"
[checkpoint]
save = "runs/a"
[run]
trackers = ["wandb"]
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.YML", YAML), ("run.toml", TOML)])
def test_sections_and_names_of_flags_are_settings(write: Write, name: str, text: str):
    assert read_settings(write(name, text)) == {
        "num_layers": 3,
        "bf16": True,
        "lr": 1e-3,
        "optimizer": "sgd",
        "save": Path("runs/a"),
        "trackers": ("wandb",),
        "num_moe_experts": 4,
        "add_bias_linear": False,
        "moe_aux_loss_coeff": (0.5,),
    }
    config = _parse("--config", write(name, text), "--micro-batch-size", "4")
    assert config.model.bf16 and config.optimizer.bf16 and not config.model.add_bias_linear
    assert (config.model.num_layers, config.model.num_moe_experts, config.data.micro_batch_size) == (3, 4, 4)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        FSDP2_FLAGS,
        MOE_FLAGS,
        "--use-distributed-optimizer --bf16",
        "--no-use-distributed-optimizer --no-swiglu --activation-func gelu",
        "--data-parallel-sharding-strategy optim --lr-warmup-iters 2",
        "--data-parallel-sharding-strategy optim_grads_params --lora-rank 2 --lora-targets linear_qkv",
        "--num-layers-per-virtual-pipeline-stage 1 --num-layers 4 --pipeline-model-parallel-size 2",
    ],
)
def test_the_file_of_a_run_gives_its_settings(write: Write, flags: str):
    pytest.importorskip("pydantic")  # which cyclopts uses where a program has imported it
    config = _parse(*flags.split())
    file = write("config.json", json.dumps(config.to_json()))
    for defaults in (DEFAULTS, {}, {**DEFAULTS, "use_torch_fsdp2": True, "bf16": True, "group_query_attention": None}):
        assert _parse("--config", file, defaults=defaults) == config


def test_flags_override_files_and_these_the_defaults(write: Write):
    first = write("a.yaml", "{lr: 0.5, seed: 1, log_interval: 7}")
    second = write("b.toml", "seed = 2\nlog-interval = 8")
    config = _parse("--config", first, "--log-interval", "9", f"--config={second}")
    assert (config.optimizer.lr, config.run.seed, config.run.log_interval) == (0.5, 2, 9)
    assert config.optimizer.min_lr is None  # the default's was of another lr
    assert (config.model.num_layers, config.model.ffn_hidden_size) == (2, 40)
    assert _parse("--config", second, "--config", first).run.seed == 1


def test_alternatives_of_a_file_yield_to_a_flag(write: Write):
    run = write("config.json", json.dumps(_parse("--use-torch-fsdp2", "--bf16").to_json()))
    config = _parse("--config", run, "--use-distributed-optimizer", "--fp16", "--hidden-size", "32")
    assert (config.ddp.strategy, config.model.fp16, config.model.bf16) == ("optim", True, False)
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (128, 16)
    heads = _parse("--config", run, "--num-attention-heads", "4").model
    assert (heads.num_attention_heads, heads.num_query_groups) == (4, 4)  # of no grouped queries these are not made
    grouped = write("grouped.json", json.dumps(_parse("--num-query-groups", "1").to_json()))
    assert _parse("--config", grouped, "--num-attention-heads", "4").model.num_query_groups == 1
    strategy = ("--data-parallel-sharding-strategy", "optim_grads")
    assert _parse("--config", run, *strategy).ddp.strategy == "optim_grads"
    assert _parse("--config", run, "--no-use-torch-fsdp2").ddp.strategy == "optim_grads_params"
    config = _parse("--config", run, "--lr-warmup-iters", "0", "--activation-func", "gelu", "--reshard-to-ranks", "2")
    assert config.scheduler.lr_warmup_fraction is None and config.model.activation_func == "gelu"
    assert config.ddp.reshard_after_forward == 2  # type: ignore[attr-defined]
    zero = write("zero.yaml", "data_parallel_sharding_strategy: optim")
    assert _parse("--config", zero, "--use-torch-fsdp2").use_torch_fsdp2
    assert _parse("--config", run, "--config", zero).ddp.strategy == "optim"


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        ("--use-distributed-optimizer", "collectives, param_dtype, reshard_after_forward, reshard_overrides"),
        ("--no-use-torch-fsdp2", "collectives"),
    ],
)
def test_what_another_wrapper_lacks_is_named_and_dropped(write: Write, capsys, monkeypatch, flags: str, lost: str):
    file = write("config.json", json.dumps(_parse(*FSDP2_FLAGS.split(), "--collectives", "torch").to_json()))
    said = f"warning: dropped from --config, since the wrapper of the flags has none: {lost}\n"
    for rank, line in (("0", said), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        config = _parse("--config", file, *flags.split())
        assert capsys.readouterr().err == line and not config.use_torch_fsdp2
    with pytest.raises(ConfigError, match="collectives is a setting of FSDP2 alone"):
        _parse("--config", file, *flags.split(), "--collectives", "torch")


def test_a_file_that_contradicts_its_own_wrapper_is_refused(write: Write):
    file = write("run.yaml", "{use_distributed_optimizer: true, forward_prefetch: 2}")
    with pytest.raises(ConfigError, match="forward_prefetch is a setting of wrappers that shard parameters"):
        _parse("--config", file, "--lr", "1e-3")


WRONG = """
model: {num_layers: two, num_layerz: 3, lr: 1.0, hidden_size: 16.0, bf16: 1, params_dtype: bfloat16}
optimizer: {lr: 1e400, adam_eps: 1.0e-60, fp16: yes}
seed: true
save: ""
trackers: [wandb, 3]
save_retain: 3
padded_vocab_size: 4
position_embedding_type: alibi
data: [1]
fp16: no
config: other.yaml
num-workers: 1e999999
"""


def test_all_mistakes_of_a_file_are_one_error(write: Write):
    with pytest.raises(ConfigError) as error:
        _parse("--config", write("run.yaml", WRONG))
    lines = str(error.value).splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "model.num_layers is 'two'; it takes int",
        "model.num_layerz is unknown; did you mean num_layers?",
        "model.lr is in the wrong section; it belongs to optimizer",
        "model.hidden_size is 16.0; it takes int",
        "model.bf16 is 1; it takes bool",
        "model.params_dtype is 'bfloat16'; only programs set it: drop it",
        "optimizer.lr is '1e400'; it takes a number that fp32 holds",
        "optimizer.adam_eps is 1e-60; it takes a number that fp32 holds",
        "seed is True; it takes int",
        "save is ''; it takes Path",
        "trackers is ['wandb', 3]; it takes tuple[str, ...]",
        "save_retain is unknown; did you mean save_retain_interval?",
        "padded_vocab_size is unknown; write --vocab-size and --make-vocab-size-divisible-by instead",
        "position_embedding_type is 'alibi'; it takes learned_absolute | rope",
        "data is a section; write it once, at the top, with settings by name below it",
        "config is unknown; drop it",
        "num-workers is '1e999999'; it takes int",
        "fp16 is False, and optimizer.fp16 is True; drop one",
    ]
    assert all(line.startswith("--config ") and "run.yaml: " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: 1\nb: [2", "a.yaml cannot be read: line 2, column 6: expected"),
        ("a.toml", "a = 1\nb = = 2", "a.toml cannot be read: .*line 2, column 5"),
        ("a.json", '{"a": 1,\n2}', "a.json cannot be read: .*line 2 column 1"),
        ("a.yaml", "- 1", r"it holds \[1\]; write names with values"),
        ("a.yaml", "lr: 2024-13-45", "a.yaml cannot be read: month"),
        ("a.json", "[" * 100000, "a.json cannot be read: .*deep"),
        ("a.toml", "x = " + "[" * 100000, "a.toml cannot be read: "),
        ("a.yaml", "x: " + "[" * 100000, "a.yaml cannot be read: "),
        ("a.txt", "", "ends in none of .yaml, .yml, .toml, .json; rename it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(write: Write, name: str, text: str, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        _parse("--config", write(name, text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be read: No such file or directory"):
        _parse("--config", tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="--config requires an argument"):
        _parse("--config")


def test_yaml_needs_an_extra(write: Write, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"yaml.*shardstack\[train\]"):
        _parse("--config", write("run.yaml", "lr: 1"))
    assert _parse("--config", write("run.toml", "lr = 1")).optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "model: {num_layers: 2}\nmodel: {bf16: true}", "line 1, column 1: model is there twice"),
        ("a.json", '{"lr": 1, "seed": 2, "lr": 1}', "not valid JSON (lr is there twice)"),
        ("a.json", '{"model": {"num_layers": 2, "num_layers": 3}}', "not valid JSON (num_layers is there twice)"),
        ("a.yaml", "lr: .nan", "lr is nan; it takes a number that fp32 holds"),
        ("a.yaml", "model: [1]", "model is a section; write it once, at the top"),
        ("a.toml", "[modle]\nlr = 1", "modle is unknown; did you mean model"),
    ],
)
def test_what_a_file_may_not_hold(write: Write, name: str, text: str, says: str):
    with pytest.raises(ConfigError) as caught:
        read_settings(write(name, text))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_an_empty_file_sets_nothing(write: Write, name: str):
    assert read_settings(write(name, "# nothing\n")) == {} == read_settings(write(name, "\ufeff"))
