"""What verl saves of one strategy continues under another, to the bit, and its contents are honoured or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError, ConfigError
from core.dist_checkpointing.format.reader import read_index
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w

pytestmark = needs("verl")

WARM = {"optim": {"lr_warmup_steps": 3, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}}


def _continued(path: str, folder: str) -> list[tuple[float, float]]:
    with w.verl_environment():
        worker = w.worker_of(path, "optim_grads_params", **WARM)
        w.train(worker, range(2))
        worker.save_checkpoint(folder, None, 2, None)
        drawn = torch.rand(3)
        steps, weights = w.train(worker, range(2, 4)), w.weights(worker)
        for strategy in ("no_shard", "optim_grads", "fsdp2"):
            other = w.worker_of(path, strategy, **WARM)
            torch.manual_seed(dist.get_rank())
            other.load_checkpoint(folder, None, True)
            assert torch.equal(torch.rand(3), drawn), "random streams do not continue"
            assert w.train(other, range(2, 4)) == steps
            assert all(torch.equal(tensor, weights[name]) for name, tensor in w.weights(other).items())
            rates = [each.engine.lr_scheduler.get_last_lr() for each in (worker, other)]
            assert rates[0] == rates[1] != [w.LR]
        return steps


def _on_one_rank(path: str, folder: str) -> Any:
    with w.verl_environment():
        worker = w.worker_of(path, "fsdp2", **WARM)
        worker.load_checkpoint(folder)
        return w.train(worker, range(2, 4))


def test_a_run_continues_under_other_strategies_and_ranks(tmp_path):
    path = w.save_model(tmp_path / "model")
    of_two, _ = run_distributed(_continued, 2, path, str(tmp_path / "global_step_2"))
    (of_one,) = run_distributed(_on_one_rank, 1, path, str(tmp_path / "global_step_2"))
    # Sums in another order, of some hundred terms.
    torch.testing.assert_close(torch.tensor(of_one), torch.tensor(of_two), rtol=256 * 2.0**-23, atol=0.0)
    assert {file.name for file in (tmp_path / "global_step_2" / "huggingface").iterdir()} >= {
        "config.json", "tokenizer.json"
    }  # fmt: skip


def _contents(path: str, root: str) -> None:
    import transformers

    folders = [f"{root}/global_step_{step}" for step in range(4)]
    with w.verl_environment():
        worker = w.worker_of(path, "fsdp2", checkpoint={"save_contents": ["model", "hf_model"]})
        w.train(worker, range(1))
        for step in (0, 1, 2):
            worker.save_checkpoint(folders[step], None, step, 2)
        assert [Path(folder).is_dir() for folder in folders] == [False, True, True, False]
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folders[2]}/huggingface", dtype=torch.float32)
        weights = w.weights(worker)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())

        with pytest.raises(
            CheckpointError, match=r"without extra, optimizer, which checkpoint.load_contents lists; drop it there"
        ):
            w.worker_of(path, "optim").load_checkpoint(folders[2])
        other = w.worker_of(path, "optim", checkpoint={"load_contents": ["model"]})
        other.load_checkpoint(folders[2])
        assert all(torch.equal(tensor, weights[name]) for name, tensor in w.weights(other).items())
        worker.save_checkpoint(None, None, 3, None)
        worker.load_checkpoint(None)
        with pytest.raises(ConfigError, match="hdfs_path is 'hdfs://there': checkpoints are folders"):
            worker.save_checkpoint(folders[3], "hdfs://there", 3, None)
        with pytest.raises(CheckpointError, match="global_step_3"):
            worker.load_checkpoint(folders[3])
        for checkpoint, message in (
            ({"save_contents": ["optimizer"]}, r"\['optimizer'\]; list 'model', and any of"),
            (
                {"load_contents": ["model", "hf_model"]},
                r"'hf_model'\]; list 'model', and any of \['model', 'optimizer', 'extra'\]",
            ),
            ({"async_save": True}, "checkpoints are complete when save_checkpoint returns; drop it"),
        ):
            with pytest.raises(ConfigError, match=message):
                w.worker_of(path, "optim", checkpoint=checkpoint)


def test_contents_and_number_of_checkpoints_are_honoured(tmp_path):
    run_distributed(_contents, 2, w.save_model(tmp_path / "model"), str(tmp_path))


def _adapters_alone(path: str, folder: str) -> None:
    model = {"lora_rank": 2, "target_modules": ["q_proj"]}
    with w.verl_environment():
        worker = w.worker_of(path, "optim_grads_params", model=model, checkpoint={"save_lora_only": True})
        w.train(worker, range(1))
        worker.save_checkpoint(folder, None, 1, None)
        steps = w.train(worker, range(1, 3))
        other = w.worker_of(path, "fsdp2", model=model)
        other.load_checkpoint(folder)
        assert w.train(other, range(1, 3)) == steps
        tensors = read_index(Path(folder, "shardstack")).tensors
        assert all(".lora_" in name for name in tensors if name.startswith("model."))


def test_adapters_are_saved_alone_and_found_so(tmp_path):
    path = w.save_model(tmp_path / "model")
    run_distributed(_adapters_alone, 2, path, str(tmp_path / "saved"))
