"""TRL's `SFTTrainer` under `use_shardstack` computes what it does without it in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.accelerate._trainers import Trained, fresh_accelerate, samples, tiny, train
from tests.unit.adapters.accelerate.test_trainer import assert_as_one_process, assert_same_bits
from tests.unit.distributed._hugging_face import VOCAB

pytestmark = needs("trl", "transformers", "accelerate")


def _trained(folder: str, strategies: list[str | None], hybrid: bool = False) -> list[Trained]:
    return [_train(folder, strategy, hybrid) for strategy in strategies]


def _train(folder: str, strategy: str | None, hybrid: bool) -> Trained:
    import datasets
    import torch.distributed as dist
    import transformers
    import trl
    from tokenizers import Tokenizer, models

    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    tokens = {f"t{number}": number for number in range(VOCAB)}
    with fresh_accelerate(local=2 if hybrid else None):
        arguments: dict[str, Any] = {
            "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            "logging_steps": 1, "num_train_epochs": 2, "per_device_train_batch_size": 1, "learning_rate": 0.05,
            "gradient_accumulation_steps": 4 // dist.get_world_size(), "optim": "sgd", "max_grad_norm": 0.3,
            "warmup_steps": 1, "seed": 11, "bf16": False, "gradient_checkpointing": False,
        }  # fmt: skip
        trainer = trl.SFTTrainer(
            model=tiny("llama"),
            args=trl.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list([{"input_ids": s["input_ids"].tolist()} for s in samples(8)]),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="t0")), pad_token="t0", eos_token="t1"
            ),
        )
        if strategy is not None:
            use_shardstack(trainer, ShardstackPlugin(strategy, hybrid=hybrid))
        return train(trainer)


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ["optim_grads_params", "fsdp2"]),
        pytest.param(2, ["no_shard", "optim", "optim_grads"], marks=pytest.mark.long),
        pytest.param(4, ["optim", "optim_grads_params", "fsdp2"], marks=pytest.mark.long),
    ],
    ids=["some", "others", "hybrid"],
)
def test_an_sft_trainer_computes_as_in_one_process(ranks, strategies, tmp_path):
    (expected,) = run_distributed(_trained, 1, str(tmp_path), [None])[0]
    assert len(expected.losses) == 4 and min(expected.losses) < expected.losses[0]
    of_ranks = run_distributed(_trained, ranks, str(tmp_path), strategies, ranks == 4)
    for found, *others in zip(*of_ranks, strict=True):
        assert_as_one_process(found, expected)
        for other in others:
            assert_same_bits(other, found)
