"""Command lines of Megatron-LM: every flag that it has is sorted, and its defaults hold where ours differ."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.training.config import section_types
from core.training.config.arguments import _run_flags, parse_arguments, parse_values
from core.training.config.megatron import flag_name, refusal, sort_flags, with_megatron_defaults

FLAGS: dict[str, int] = json.loads((Path(__file__).parent / "megatron_lm_flags.json").read_text())
"""Every flag of Megatron-LM 0.16.1 to 0.20.0, and whether it takes values."""
LINE = "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 8 --micro-batch-size 2 --train-iters 4"
MEGATRON = [*LINE.split(), "--use-mcore-models"]


def test_every_flag_of_megatron_lm_is_ours_harmless_or_refused():
    known = _run_flags()
    unsorted, twice, wrong = [], [], []
    for flag, takes_value in FLAGS.items():
        words = [flag, "1"] if takes_value else [flag]
        left, _, _ = sort_flags(words, known)
        is_ours = flag_name(flag) in known
        ways = (is_ours, left != words and not is_ours, bool(refusal(flag)))
        (unsorted if not any(ways) else twice if sum(ways) > 1 else []).append(flag)
        if ways[1] and takes_value and left:
            wrong.append(flag)
    assert (unsorted, twice, wrong) == ([], [], [])
    assert sort_flags(["--num-layerz", "2"], known) == (["--num-layerz", "2"], [], [])


def test_a_switch_takes_no_value_and_values_go_with_their_flag():
    words = ["--manual-gc", "--lr=1", "--ckpt-format", "torch_dist", "--recompute_modules", "a", "b", "--seed", "-1"]
    left, ignored, signs = sort_flags(words, _run_flags())
    assert left == ["--lr=1", "--seed", "-1"]
    assert ignored == signs == ["--manual-gc", "--ckpt-format", "--recompute-modules"]
    with pytest.raises(ConfigError, match="unexpected value 'corpus'"):
        parse_arguments([*MEGATRON, "--manual-gc", "corpus"])


def test_positions_are_not_switched_off():
    assert parse_arguments([*MEGATRON, "--no-position-embedding", "--position-embedding-type", "rope"])
    with pytest.raises(ConfigError, match=r"--no-position-embedding is given, and .* is not rope"):
        parse_arguments([*MEGATRON, "--no-position-embedding"])


def test_defaults_are_those_of_megatron_lms_parser():
    ours = {"num_layers": 3, "normalization": "RMSNorm", "hidden_dropout": 0.0, "adam_beta2": 0.95, "lr": 1e-3}
    config = parse_arguments(MEGATRON, ours)
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.normalization, model.activation_func) == (2, "LayerNorm", "gelu_tanh")
    assert (model.add_bias_linear, model.hidden_dropout, model.attention_dropout) == (True, 0.1, 0.1)
    assert (model.ffn_hidden_size, model.init_method_std, model.layernorm_epsilon) == (96, 0.02, 1e-5)
    assert config.gpt.position_embedding_type == "learned_absolute"
    assert not config.gpt.untie_embeddings_and_output_weights and config.gpt.make_vocab_size_divisible_by == 128
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.lr) == (0.01, 1.0, None)
    assert (config.scheduler.lr_decay_style, config.run.seed) == ("linear", 1234)
    assert (config.checkpoint.keep_last, model.num_query_groups, config.ddp.grad_reduce_in_fp32) == (None, 4, False)


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("--bf16", "ddp", {"grad_reduce_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", "ddp", {"grad_reduce_in_fp32": False}),
        ("--swiglu", "model", {"ffn_hidden_size": 64, "activation_func": "silu"}),
        ("--swiglu --ffn-hidden-size 40", "model", {"ffn_hidden_size": 40}),
        ("--no-bias-gelu-fusion", "model", {"activation_func": "gelu"}),
        ("--disable-bias-linear", "model", {"activation_func": "gelu"}),
        ("--squared-relu", "model", {"activation_func": "squared_relu"}),
        ("--num-query-groups 2", "model", {"num_query_groups": 4}),
        ("--group-query-attention", "model", {"num_query_groups": 1}),
        ("--sequence-parallel", "model", {"sequence_parallel": False}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "model", {"sequence_parallel": True}),
        ("--tensor-model-parallel-size 2", "gpt", {"make_vocab_size_divisible_by": 256}),
        ("--use-rotary-position-embeddings", "gpt", {"position_embedding_type": "rope"}),
        ("--recompute-activations", "model", {"recompute_granularity": "selective"}),
        ("--use-megatron-fsdp --use-distributed-optimizer", "ddp", {"sharding_strategy": "optim_grads_params"}),
        (
            "--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp",
            "ddp",
            {"sharding_strategy": "optim_grads"},
        ),
        ("--optimizer muon", "optimizer", {"muon_preset": "megatron"}),
        ("--wandb-project p --wandb-exp-name e", "run", {"wandb_exp_name": "e", "wandb_project": "p"}),
        ("--split '99,1,0'", "data", {"split": "99,1,0"}),
        ("--save-retain-interval 5", "checkpoint", {"keep_last": 1, "keep_every": 5}),
        ("", "ddp", {"check_for_nan_in_grad": True}),
        ("--no-check-for-nan-in-loss-and-grad", "ddp", {"check_for_nan_in_grad": False}),
        ("--fp16", "ddp", {"check_for_nan_in_grad": False}),
        ("--fp16 --loss-scale 8", "ddp", {"check_for_nan_in_grad": True}),
        ("--use-torch-fsdp2", "ddp", {"check_for_nan_in_grad": True}),
        ("--no-load-optim --load-main-params-from-ckpt", "checkpoint", {"load_optim": False}),
        ("--no-load-optim --no-save-rng", "checkpoint", {"load_optim": False, "load_rng": True, "save_rng": False}),
    ],
)
def test_conditions_of_megatron_lms_parser_hold(flags: str, section: str, expected: dict):
    part = getattr(parse_arguments([*MEGATRON, *flags.split()]), section)
    assert {name: getattr(part, name) for name in expected} == expected


def test_one_line_lists_what_is_ignored_and_one_says_why(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    parse_values([*MEGATRON, "--ckpt-format", "torch_dist", "--use-mcore-models"])
    assert capsys.readouterr().err.splitlines() == [
        "warning: ignored, since they change no number here: --use-mcore-models, --ckpt-format",
        "defaults are Megatron-LM's, since the command line has --use-mcore-models; --no-megatron-defaults takes the "
        "program's",
    ]
    values = parse_values([*MEGATRON, "--no-megatron-defaults"], {"swiglu": True})
    assert values["swiglu"] and "activation_func" not in values
    assert "defaults are" not in capsys.readouterr().err
    values = parse_values([*LINE.split(), "--megatron-defaults"], {"swiglu": True})
    assert "swiglu" not in values and values["activation_func"] == "gelu_tanh"


def test_a_file_is_final_and_flags_override_it(tmp_path):
    first = parse_arguments([*MEGATRON, "--swiglu", "--bf16", "--tensor-model-parallel-size", "2"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(first.to_json()))
    assert parse_arguments(["--config", str(file), "--manual-gc"]) == first
    assert parse_arguments(["--config", str(file)], {"normalization": "RMSNorm", "num_layers": 9}) == first
    changed = parse_arguments(["--config", str(file), "--manual-gc", "--make-vocab-size-divisible-by", "8"])
    assert changed.gpt.make_vocab_size_divisible_by == 16 and changed.ddp == first.ddp
    (tmp_path / "run.yaml").write_text("{activation_func: gelu, bf16: true, grad_reduce_in_fp32: false}")
    config = parse_arguments([*MEGATRON, "--config", str(tmp_path / "run.yaml")])
    assert config.model.activation_func == "gelu" and not config.ddp.grad_reduce_in_fp32


def test_rules_name_fields_that_exist():
    every = {"swiglu": True, "bf16": True, "optimizer": "muon", "keep_every": 2}
    made = with_megatron_defaults(every, every).keys() | with_megatron_defaults({}, {}).keys()
    names = {entry.name for kind in section_types("no_shard").values() for entry in fields(kind)}
    assert made - {"swiglu"} <= names
