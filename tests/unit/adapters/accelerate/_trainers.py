"""A stock Trainer on a tiny model and ragged data, with and without `use_shardstack`, and what it has computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.unit.distributed._hugging_face import VOCAB, hugging_face_model
from tests.unit.distributed._toys import recorded_collectives

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")


def some_and_others(name: str, some: Any, others: Any) -> pytest.MarkDecorator:
    """Parametrizes a test by what runs with every commit, and by the rest, in the long set."""
    return pytest.mark.parametrize(name, [some, pytest.param(others, marks=pytest.mark.long)], ids=["some", "others"])


@dataclass
class Trained:
    """What a training has left on a rank."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]
    reductions: list[int]
    """Gradient reductions of each step, on the model's buckets or units."""
    trainer: Any = None


@contextmanager
def fresh_accelerate(local: int | None = None) -> Iterator[None]:
    """Lets accelerate look at this process again, and leaves its variables as they were.

    Args:
        local: ranks of a machine; all by default.
    """
    from accelerate.state import AcceleratorState, GradientState

    world = os.environ.get("WORLD_SIZE", "1")
    of_launcher = {"LOCAL_RANK": os.environ.get("RANK", "0"), "LOCAL_WORLD_SIZE": str(local or world)}
    of_launcher = of_launcher | {"MASTER_ADDR": "localhost"} if world != "1" else {}
    with mock.patch.dict(os.environ, of_launcher):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def samples(count: int) -> list[dict[str, Tensor]]:
    """Makes sequences of 3 to 9 tokens; the first tokens of most have no labels."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(count):
        length = 3 + (5 * index) % 7
        tokens = torch.randint(2, VOCAB, (length,), generator=generator)
        labels = tokens.clone()
        labels[: (3 * index) % (length - 1)] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(int(lengths.max()))[None, :] < lengths[:, None]).long()
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def trainer_of(
    model: nn.Module,
    folder: str,
    strategy: str | None,
    *,
    count: int = 10,
    cls: Any = None,
    plugin: Any = None,
    callbacks: Any = None,
    optimizers: Any = (None, None),
    **arguments: Any,
) -> Any:
    """Builds a Trainer whose global batch is six sequences in one process and on two ranks."""
    import transformers

    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    given = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "num_train_epochs": 2, "per_device_train_batch_size": 1, "learning_rate": 0.05,
        "gradient_accumulation_steps": 6 // dist.get_world_size(), "optim": "sgd", "max_grad_norm": 0.3,
        "weight_decay": 0.1, "warmup_steps": 1, "seed": 11, "logging_nan_inf_filter": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**given, **arguments})
    trainer = (cls or transformers.Trainer)(
        model=model, args=args, train_dataset=samples(count), eval_dataset=samples(4), data_collator=pad,
        callbacks=callbacks, optimizers=optimizers,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    if strategy is not None or plugin is not None:
        use_shardstack(trainer, plugin or ShardstackPlugin(strategy))
    return trainer


def train(trainer: Any, **arguments: Any) -> Trained:
    """Trains, and returns what was logged, and the whole weights."""
    counts: list[int] = []
    with recorded_collectives("the gradients of") as begun:
        trainer.add_callback(_counts_by_step(begun, counts))
        trainer.train(**arguments)
    return result(trainer, counts)


def result(trainer: Any, reductions: list[int]) -> Trained:
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return Trained(
        [entry["loss"] for entry in logs],
        [entry["grad_norm"] for entry in logs],
        [entry["learning_rate"] for entry in logs],
        whole_weights(trainer),
        reductions,
    )


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    from core.adapters.bridge.checkpoints import whole_state_dict

    trained = getattr(trainer, "_trained", None)
    if trained is None:
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    state = whole_state_dict(trained.wrapper, keep=True)
    return {name: state[name] for name, _ in trainer.model.named_parameters()}


def _counts_by_step(begun: list[Any], counts: list[int]) -> Any:
    """Returns a callback that adds to `counts` how many a step has begun."""
    import transformers

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, *unused: Any, **kwargs: Any) -> None:
            begun.clear()

        def on_step_end(self, *unused: Any, **kwargs: Any) -> None:
            counts.append(len(begun))

    return Callback()


def tiny(kind: str, **fields: Any) -> nn.Module:
    return hugging_face_model(kind, **fields)
