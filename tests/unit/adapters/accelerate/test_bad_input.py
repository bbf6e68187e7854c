"""What `use_shardstack` cannot honour raises one line that says what to change."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from core.base.errors import ConfigError, ShardstackError
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters.accelerate._trainers import fresh_accelerate, tiny, trainer_of

pytestmark = needs("transformers", "accelerate")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sharding_strategy": "zero3"}, "sharding_strategy is 'zero3'; .*it takes one of no_shard"),
        ({"sharding_strategy": "optim_grad"}, "did you mean 'optim_grads'"),
        ({"sharding_strategy": "no_shard", "hybrid": True}, "hybrid is set under no_shard"),
        ({"sharding_strategy": "optim", "cpu_offload": True}, "has no setting 'cpu_offload'"),
        ({"reshard_after_foward": False}, "did you mean 'reshard_after_forward'"),
        ({"data_parallel_sharding_strategy": "optim"}, "sharding_strategy and hybrid decide it"),
        ({"reproducible_across_ranks": True}, "reproducible_across_ranks is set"),
        ({"grad_reduce_in_fp32": True, "reduce_dtype": "bf16"}, "drop one of the two"),
    ],
)
def test_a_plugin_says_what_contradicts(settings, said):
    from core.adapters.accelerate import ShardstackPlugin

    with pytest.raises(ConfigError, match=said):
        ShardstackPlugin(**settings)


def _refused_trainers(folder: str) -> list[str]:
    """Returns what is said to each of the trainers."""
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack
    from core.adapters.oumi import FSDPParams, prepare_model

    def said(make: Any) -> str:
        with fresh_accelerate(), pytest.raises(ShardstackError) as caught:
            make()
        return str(caught.value)

    def of_wrapped() -> None:
        trainer_of(prepare_model(tiny("llama"), FSDPParams()).module, folder, "optim")

    def with_optimizer(make: Any, strategy: str) -> None:
        model = tiny("llama")
        trainer_of(model, folder, strategy, optimizers=(make(model.parameters()), None)).train()

    def prepared_apart() -> None:
        from accelerate import Accelerator

        accelerator = use_shardstack(Accelerator(cpu=True), ShardstackPlugin("fsdp2"))
        optimizer = torch.optim.AdamW(tiny("llama").parameters())
        accelerator.prepare(tiny("llama"))
        accelerator.prepare(optimizer)

    def late() -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(tiny("llama"))
        use_shardstack(accelerator)

    def trained() -> None:
        trainer = trainer_of(tiny("llama"), folder, None, max_steps=1)
        trainer.train()
        trainer.model_wrapped = trainer.model
        use_shardstack(trainer)

    def a_part_is_clipped() -> None:
        from accelerate import Accelerator

        accelerator = use_shardstack(Accelerator(cpu=True), ShardstackPlugin("optim"))
        model = accelerator.prepare(tiny("llama"))
        accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)

    half = [torch.nn.Parameter(torch.zeros(2))]
    return [
        said(of_wrapped),
        said(lambda: with_optimizer(torch.optim.Adafactor, "optim_grads_params")),
        said(lambda: with_optimizer(lambda params: torch.optim.AdamW(half), "optim")),
        said(lambda: with_optimizer(lambda params: torch.optim.AdamW(list(params)[:3]), "optim")),
        said(prepared_apart),
        said(late),
        said(trained),
        said(a_part_is_clipped),
        said(lambda: trainer_of(tiny("llama"), folder, "optim", auto_find_batch_size=True)),
        said(lambda: trainer_of(tiny("llama"), folder, "optim", torch_compile=True)),
        said(lambda: trainer_of(tiny("llama"), folder, None, fsdp=True, plugin=ShardstackPlugin("optim"))),
        said(
            lambda: trainer_of(
                tiny("llama"),
                folder,
                "optim",
                accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            )
        ),
        said(
            lambda: trainer_of(
                tiny("llama"),
                folder,
                "optim_grads_params",
                plugin=ShardstackPlugin(transformer_cls_names_to_wrap="LlamaLayer"),
            ).train()
        ),
        said(lambda: use_shardstack(tiny("llama"))),
    ]


def test_what_has_no_counterpart_is_said_in_one_line(tmp_path):
    expected = [
        "wrap the plain model once",
        "Adafactor",
        "has parameters of no prepared model",
        "is in none of the groups",
        "has parameters of no prepared model",
        "call use_shardstack before prepare",
        "build a new Trainer",
        "give model.parameters()",
        "auto_find_batch_size",
        "compile_units=True",
        "give its settings to ShardstackPlugin",
        "reduce_every_micro_batch=True",
        "LlamaDecoderLayer",
        "it takes a Trainer or an Accelerator",
    ]
    for rank in run_distributed(_refused_trainers, 2, str(tmp_path)):
        for said, part in zip(rank, expected, strict=True):
            assert part in said and "\n" not in said, (part, said)


@on_ranks(1)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path) -> None:
    from core.base.errors import CheckpointError

    def trainer(strategy: str | None, where: str, optimizer: Any = torch.optim.AdamW) -> Any:
        model, saves = tiny("llama"), {"save_strategy": "steps", "save_steps": 2}
        return trainer_of(model, where, strategy, optimizers=(optimizer(model.parameters()), None), **saves)

    for saving, resuming, said in (
        ((None, "a"), ("optim", "a"), "saved without use_shardstack"),
        (("optim", "b"), ("no_shard", "b", torch.optim.Adafactor), "resume with the optimizer that saved it"),
    ):
        with fresh_accelerate():
            trainer(saving[0], f"{tmp_path}/{saving[1]}").train()
        with fresh_accelerate(), pytest.raises(CheckpointError, match=said):
            name, where, *optimizer = resuming
            trainer(name, f"{tmp_path}/{where}", *optimizer).train(resume_from_checkpoint=True)


@on_ranks(1)
def test_ranks_that_would_train_alone_are_named(tmp_path) -> None:
    from core.adapters.accelerate import use_shardstack

    with fresh_accelerate():
        trainer = trainer_of(tiny("llama"), tmp_path, None)
        with mock.patch.dict("os.environ", WORLD_SIZE="2"), pytest.raises(ConfigError, match="use_cpu=True"):
            use_shardstack(trainer)
