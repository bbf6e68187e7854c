"""A model that transformers sharded at load trains under the Trainer, and resumes from this library's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.errors import CheckpointError, ConfigError
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.accelerate._trainers import fresh_accelerate, tiny, trainer_of

pytestmark = needs("transformers", "accelerate")

ARGUMENTS = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "num_train_epochs": 2}


def _trainer(folder: Path, source: Path, **arguments: Any) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    from core.adapters.accelerate import use_shardstack

    config = DistributedConfig(fsdp_size=torch.distributed.get_world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, distributed_config=config)
    return use_shardstack(trainer_of(model, str(folder), None, **{**ARGUMENTS, **arguments}))


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in trainer.model.named_parameters()}


def _resumed(folder: Path, optimizer: str) -> tuple[bool, bool, list[str]]:
    """Returns whether a resumed run has the weights and losses of the uninterrupted one, and what a damaged checkpoint
    and one of another optimizer say."""
    from core.dist_checkpointing import verify

    with fresh_accelerate():
        whole = _trainer(folder / "run", folder / "model", optim=optimizer, learning_rate=0.01)
        whole.train()
        expected = _weights(whole)
    middle = folder / "run" / "checkpoint-2"
    verify(middle / "shardstack")
    with fresh_accelerate():
        trainer = _trainer(folder / "run", folder / "model", optim=optimizer, learning_rate=0.01)
        trainer.train(resume_from_checkpoint=str(middle))
        equal = all(torch.equal(value, expected[name]) for name, value in _weights(trainer).items())
        losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (whole, trainer)]
    messages = []
    with fresh_accelerate():
        other = _trainer(folder / "run", folder / "model", optim="sgd" if optimizer != "sgd" else "adamw_torch")
        for broken in (middle, folder / "model"):
            with pytest.raises(CheckpointError) as raised:
                other.train(resume_from_checkpoint=str(broken))
            messages.append(str(raised.value))
    return equal, losses[0] == losses[1] and len(losses[0]) == 4, messages


@pytest.mark.parametrize("optimizer", ["adamw_torch", pytest.param("sgd", marks=pytest.mark.long)])
def test_an_interrupted_run_resumes_to_the_bit(optimizer, tmp_path):
    tiny("llama", tied=False).save_pretrained(tmp_path / "model")
    for equal, same_losses, messages in run_distributed(_resumed, 2, tmp_path, optimizer):
        assert equal and same_losses
        assert "of another model or optimizer; only one side has optimizer.state." in messages[0]
        assert "was saved without use_shardstack; load its weights with from_pretrained" in messages[1]


def _continued(folder: Path, resumed: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains with six sequences a step on any number of ranks, from the start or from the second step."""
    world = torch.distributed.get_world_size()
    sizes = {"per_device_train_batch_size": 6 // world, "gradient_accumulation_steps": 1}
    if world == 4:  # which divide no six: two more of padding, without labels
        sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    with fresh_accelerate():
        trainer = _trainer(
            folder / f"run{world}", folder / "model", optim="adamw_torch", learning_rate=0.01, **sizes
        )
        trainer.train(resume_from_checkpoint=resumed)
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses, _weights(trainer)


def _best(folder: Path) -> tuple[bool, str]:
    with fresh_accelerate():
        trainer = _trainer(
            folder / "run", folder / "model", save_steps=1, eval_strategy="steps", eval_steps=1, num_train_epochs=1,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
        )  # fmt: skip
        trainer.train()
        found, best = _weights(trainer), Path(trainer.state.best_model_checkpoint)
    import transformers

    saved = dict(transformers.AutoModelForCausalLM.from_pretrained(best).named_parameters())
    return all(torch.equal(value, saved[name]) for name, value in found.items()), best.name


def test_the_best_model_is_loaded(tmp_path):
    tiny("llama", tied=False).save_pretrained(tmp_path / "model")
    for is_best, name in run_distributed(_best, 2, tmp_path):
        assert is_best and name == "checkpoint-1"


def _refusals(folder: Path) -> list[str]:
    import transformers
    from transformers.distributed import DistributedConfig

    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    messages = []
    for tensor_ranks, tied, plugin in ((1, False, ShardstackPlugin("fsdp2")), (2, False, None), (1, True, None)):
        with fresh_accelerate():
            config = DistributedConfig(fsdp_size=2)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
            trainer = trainer_of(model, str(folder), None, **ARGUMENTS)
            model.config.tie_word_embeddings = tied
            config.tp_size = tensor_ranks  # accelerate builds no Trainer for such a model on a CPU
            with pytest.raises(ConfigError) as raised:
                use_shardstack(trainer, plugin)
            messages.append(str(raised.value))
    return messages


def test_what_it_cannot_take_is_refused(tmp_path):
    tiny("llama", tied=False).save_pretrained(tmp_path / "model")
    for with_plugin, tensor_parallel, tied in run_distributed(_refusals, 2, tmp_path):
        assert "give no ShardstackPlugin, or load it whole" in with_plugin
        assert (
            "was loaded with DistributedConfig(tp_size=2); load it with fsdp_size alone, or whole" in tensor_parallel
        )
        assert "has tied embeddings and was sharded at load" in tied
