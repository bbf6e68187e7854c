"""Flags are the fields of the sections: each has its flag, its help and its type, and nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from core.training.config import PretrainConfig, section_types
from core.training.config.arguments import flag_documentation, parse_arguments, parse_call
from core.training.config.build import build_config
from tests.unit.training._configs import SMALL

REQUIRED = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "4"),
]


def test_megatrons_flags_reach_their_fields():
    config = parse_arguments(
        [
            *REQUIRED,
            *("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "24", "--swiglu"),
            *("--max-position-embeddings", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
            *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--norm-epsilon", "1e-6"),
            *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1"),
            *("--weight-decay", "0.2", "--clip-grad", "0.5", "--global-batch-size", "8", "--bf16"),
            *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-torch-fsdp2"),
            *("--torch-fsdp2-no-reshard-after-forward", "--accumulate-allreduce-grads-in-fp32"),
            "--no-gradient-accumulation-fusion",
            *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
            *("--save", "runs/a", "--load", "runs/b", "--save-interval", "2", "--eval-interval", "3"),
            *("--eval-iters", "1", "--log-interval", "5", "--tensorboard-dir", "tb", "--seed", "7"),
            *("--data-path", "data/c", "--split", "9,1,0", "--num-workers", "0", "--calculate-per-token-loss"),
        ]
    )
    assert config.model.num_query_groups == 2 and config.model.ffn_hidden_size == 24
    assert config.model.gated_linear_unit and config.model.activation_func == "silu"
    assert not config.model.add_bias_linear and config.model.layernorm_epsilon == 1e-6
    assert config.model.bf16 and config.optimizer.bf16
    assert not config.model.gradient_accumulation_fusion
    assert config.model.calculate_per_token_loss and config.model.sequence_parallel
    assert config.gpt.untie_embeddings_and_output_weights and config.max_sequence_length == 32
    assert isinstance(config.ddp, TorchFullyShardedDataParallelConfig)
    assert config.ddp.grad_reduce_in_fp32 and not config.ddp.reshard_after_forward
    assert (config.optimizer.lr, config.optimizer.min_lr, config.optimizer.clip_grad) == (1e-3, 1e-4, 0.5)
    assert config.scheduler.lr_warmup_fraction == 0.1
    assert config.checkpoint.save == Path("runs/a") and config.checkpoint.load == Path("runs/b")
    assert config.data.data_path == Path("data/c") and config.data.num_workers == 0
    assert config.run.tensorboard_dir == Path("tb") and config.run.seed == 7


def test_fsdp2_and_adapter_settings_are_flags_and_survive_json():
    config = parse_arguments(
        [
            *(*REQUIRED, "--use-torch-fsdp2", "--reshard-to-ranks", "2", "--forward-prefetch", "0"),
            *("--reshard-overrides", "decoder.layers.0=False", "--reshard-overrides", "=True"),
            *("--param-dtype", "bf16", "--collectives", "torch", "--cpu-offload"),
            *("--backward-prefetch", "2", "--reduce-every-micro-batch"),
            *("--lora-rank", "2", "--lora-targets", "linear_qkv", "linear_fc2", "--lora-alpha", "4"),
        ]
    )
    assert config.ddp == TorchFullyShardedDataParallelConfig(
        reshard_after_forward=2,
        forward_prefetch=0,
        backward_prefetch=2,
        reshard_overrides=("decoder.layers.0=False", "=True"),
        param_dtype="bf16",
        collectives="torch",
        cpu_offload=True,
        reduce_every_micro_batch=True,
    )
    assert (config.gpt.lora_rank, config.gpt.lora_targets) == (2, ("linear_qkv", "linear_fc2"))
    stored = json.loads(json.dumps(config.to_json()))
    assert stored == config.to_json()  # which a checkpoint's settings are compared with
    assert PretrainConfig.from_json(stored) == config


def test_without_flags_every_section_has_its_own_defaults():
    config = parse_arguments(REQUIRED)
    assert type(config.ddp) is DistributedDataParallelConfig
    for section, kind in section_types("no_shard").items():
        given = getattr(config, section)
        required = {"model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}}
        required |= {"data": {"seq_length": 8, "micro_batch_size": 2}, "run": {"train_iters": 4}}
        assert given == kind(**required.get(section, {}))


def test_every_field_has_a_docstring_that_becomes_its_help():
    for kind in section_types("fsdp2").values():
        texts = flag_documentation(kind)
        assert {entry.name for entry in fields(kind)} <= texts.keys()
        assert all(texts.values())


def test_fields_of_several_sections_mean_the_same():
    names = Counter(entry.name for kind in section_types("fsdp2").values() for entry in fields(kind))
    shared = {name for name, count in names.items() if count > 1}
    assert shared == {"fp16", "bf16", "use_distributed_optimizer"}  # one flag sets them all: look twice at another


def test_program_defaults_yield_to_flags_and_alternatives():
    defaults = {**SMALL, "swiglu": True, "lr_warmup_fraction": 0.1, "add_bias_linear": False, "use_torch_fsdp2": True}
    config = parse_arguments(["--hidden-size", "32"], defaults)
    assert config.model.hidden_size == 32 and config.model.ffn_hidden_size == 128
    assert config.model.activation_func == "silu" and not config.model.add_bias_linear and config.use_torch_fsdp2
    flags = ["--activation-func", "gelu", "--lr-warmup-iters", "1", "--add-bias-linear", "--no-use-torch-fsdp2"]
    config = parse_arguments(flags, defaults)
    assert config.model.activation_func == "gelu" and not config.model.gated_linear_unit
    assert config.scheduler.lr_warmup_fraction is None and config.scheduler.lr_warmup_iters == 1
    assert config.model.add_bias_linear and not config.use_torch_fsdp2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-layerz", "2"], "Unknown option: --num-layerz: did you mean --num-layers"),
        (["--nproc", "2"], "Unknown option: --nproc: did you mean --nproc-per-node of the launcher"),
        (["--nproc_per_nod=2"], "Unknown option: --nproc-per-nod: did you mean --nproc-per-node of the launcher"),
        (["--nproc_per_node", "2"], "Unknown option: --nproc-per-node: did you mean --nproc-per-node of the launcher"),
        (["--lr"], "--lr.*requires an argument"),
        (["corpus"], "'corpus'; every value follows its flag"),
        (["--squared-relu=false"], "Unknown option: --squared-relu"),
        (["-lr", "3e-4"], "unexpected value '-lr' '3e-4'; every value follows its flag"),
        (["--seed", "1.5"], "--seed.*1.5.*integer"),
        (["--seed", "none"], "--seed.*none.*integer"),
        (["--position-embedding-type", "alibi"], "alibi.*learned_absolute.*rope"),
        (["--lora-rank", "2", "--lora-targets", "linear_q"], "linear_q.*linear_qkv.*linear_fc2"),
        (["--no-sync-module-states"], "sync_module_states is a setting of wrappers that shard parameters"),
        (["--no-group-query-attention", "--num-query-groups", "2"], "group_query_attention is turned off"),
        (["--torch-fsdp2-no-reshard-after-forward"], "reshard_after_forward is a setting of wrappers that shard"),
        (["--finetune"], "--finetune: write --pretrained-checkpoint in the place of --load"),
        (["--yaml_cfg", "a.yaml"], "--yaml-cfg: write --config with a file of settings"),
        (["--lr-warmup-sample", "3"], "--lr-warmup-sample: did you mean --lr-warmup-samples"),
        (["--lr-warmup-tokens", "3"], "Unknown option: --lr-warmup-tokens: see --help"),
        (["--log-throughputs"], "Unknown option: --log-throughputs: see --help"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        parse_arguments([*REQUIRED, *flags])


SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fp16": True, "bf16": True}, "fp16.*bf16.*choose one"),
        ({"group_query_attention": True}, "num_query_groups is None; say how many groups"),
        ({"swiglu": True, "activation_func": "gelu"}, "swiglu and activation_func gelu"),
        ({"num_query_groups": 3}, "num_query_groups 3"),
        (
            {"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "optim"},
            "use_torch_fsdp2.* is optim; drop one",
        ),
        ({"use_torch_fsdp2": True, "use_distributed_optimizer": True}, "use_distributed_optimizer"),
        ({"forward_prefetch": 2}, "forward_prefetch is a setting of wrappers that shard parameters"),
        (SHARDED | {"collectives": "torch"}, "collectives is a setting of FSDP2 alone"),
        (
            {"use_torch_fsdp2": True, "reshard_to_ranks": 2, "reshard_after_forward": False},
            "reshard_to_ranks 2 and reshard_after_forward",
        ),
        ({"nonsense": 1}, "unknown settings: nonsense"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        build_config(SMALL | settings)


@pytest.mark.parametrize(
    ("settings", "strategy", "is_fsdp2", "asked_of_the_optimizer"),
    [
        ({}, "no_shard", False, None),
        ({"use_distributed_optimizer": True}, "optim", False, True),
        ({"data_parallel_sharding_strategy": "optim"}, "optim", False, None),
        ({"data_parallel_sharding_strategy": "optim_grads"}, "optim_grads", False, None),
        (SHARDED, "optim_grads_params", False, None),
        ({"use_torch_fsdp2": True}, "optim_grads_params", True, None),
    ],
)
def test_every_sharding_strategy_can_be_chosen(settings, strategy, is_fsdp2, asked_of_the_optimizer):
    config = build_config(SMALL | settings)
    assert (config.ddp.sharding_strategy, config.use_torch_fsdp2) == (strategy, is_fsdp2)
    assert config.optimizer.use_distributed_optimizer is asked_of_the_optimizer


def test_unit_settings_belong_to_both_sharding_wrappers():
    for engine in ({"use_torch_fsdp2": True}, SHARDED):
        config = build_config(SMALL | engine | {"forward_prefetch": 2, "reshard_after_forward": False})
        assert (config.ddp.forward_prefetch, config.ddp.reshard_after_forward) == (2, False)
        assert PretrainConfig.from_json(config.to_json()) == config


def test_defaults_that_follow_from_a_given_flag_are_dropped():
    defaults = {**SMALL, "ffn_hidden_size": 40, "lr": 1e-3, "min_lr": 1e-4}
    config = parse_arguments(["--hidden-size", "32", "--lr", "1e-5"], defaults)
    assert (config.model.ffn_hidden_size, config.optimizer.min_lr) == (128, None)
    config = parse_arguments(["--hidden-size", "32", "--ffn-hidden-size", "48", "--min-lr", "1e-6"], defaults)
    assert (config.model.ffn_hidden_size, config.optimizer.lr, config.optimizer.min_lr) == (48, 1e-3, 1e-6)


def test_a_required_flag_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="missing: train_iters and train_samples"):
        parse_arguments(REQUIRED[:-2])
    with pytest.raises(ConfigError, match="missing: --seq-length; see --help"):
        parse_arguments([*REQUIRED[:6], *REQUIRED[8:]])
    with pytest.raises(ConfigError, match="seq_length is required"):
        build_config({name: value for name, value in SMALL.items() if name != "seq_length"})


def test_all_mistakes_of_a_command_line_are_one_error():
    flags = "--num-layerz 2 --fp8-format hybrid --fp8_margin=1 --wandb-projekt a --no-save-optin --num-query-groups 3"
    with pytest.raises(ConfigError) as error:
        parse_arguments([*REQUIRED, *flags.split()])
    assert str(error.value).splitlines() == [
        "Unknown option: --num-layerz: did you mean --num-layers?",
        "--fp8-margin: fp8 here is --fp8-format and --fp8-recipe for the products of all layers, with scales that "
        "have no history; drop it",
        "Unknown option: --wandb-projekt: did you mean --wandb-project?",
        "Unknown option: --no-save-optin: did you mean --no-save-optim?",
        "num_query_groups 3 does not divide num_attention_heads 4; take 2 or 4 groups | fp8_recipe is None; it "
        "takes one of tensorwise, rowwise",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run.yaml", "'run.yaml' is no flag; did you mean --config run.yaml?"),
        ("--lr 1e-3 runs/a/config.JSON", "'runs/a/config.JSON' is no flag; did you mean --config runs/a/config.JSON?"),
        ("--num-layerz 2", "Unknown option: --num-layerz: did you mean --num-layers?"),
        ("corpus", "unexpected value 'corpus'; every value follows its flag, see --help"),
        ("--seed", "Parameter --seed requires an argument."),
    ],
)
def test_a_word_that_is_no_flag_is_said_before_what_lacks(words: str, said: str):
    with pytest.raises(ConfigError) as error:
        parse_arguments(words.split())
    assert str(error.value) == said


def test_help_is_printed_by_the_first_rank_alone(capsys, monkeypatch):
    for rank, expected in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parse_arguments(["--help"], SMALL, description="Trains.", name="train.py")
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert ("--num-layers" in out) is expected
        words = " ".join(out.replace("│", " ").split())
        assert "there is no other value" not in words and ("What is sharded: " in words) is expected
        assert ("Number of transformer layers." in words and "[default: 2]" in out) is expected


def test_a_function_is_called_as_the_command_line_asks():
    def add(*, first: int, second: int = 2) -> int:
        return first + second

    assert parse_call(add, ["--first", "3"]) == 5
    with pytest.raises(ConfigError, match="--first"):
        parse_call(add, [])


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        *(
            (flag, "", f"{flag}: the path is empty")
            for flag in ("--save", "--load", "--data-path", "--tensorboard-dir")
        ),
        *(
            ("--lr", text, f'--lr: "{text}" is 0 or infinity')
            for text in ("1e-400", "1E-46", "-1e-50", "1e39", "1e400")
        ),
        ("--adam-eps", "1e-50", '--adam-eps: "1e-50" is 0'),
        ("--train-iters", "1.5", '"1.5" is not an integer'),
    ],
)
def test_words_that_would_become_another_value_are_refused(flag: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_arguments([flag, text], SMALL)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0.0), ("0e-9", 0.0), ("1e-45", 1e-45), ("3e38", 3e38), ("none", None)]
)
def test_words_that_fp32_holds_are_taken(text: str, value: float | None) -> None:
    def program(*, lr: float | None = 1.0, save: Path = Path("x"), names: tuple[str, ...] = ()) -> object:
        return lr, save, names

    parsed = parse_call(program, ["--save", ".", "--names", "", *(["--lr", text] if value is not None else [])])
    assert parsed == (1.0 if value is None else value, Path(), ("",))
