"""Lightning's Trainer with this library's strategies does what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from core.adapters.lightning import ShardstackFabricStrategy, ShardstackStrategy
from core.base.errors import CheckpointError, ConfigError, OptimizerError, WrapError
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.adapters.lightning._module import (
    CLIP,
    MICRO_BATCHES,
    SHARDINGS,
    STEPS,
    Module,
    bounds,
    loader,
    ranks_of_lightning,
    serial,
    trainer,
    whole,
)
from tests.unit.distributed._toys import CountedTraffic


def _fitted(sharding: Any, folder: str, module: L.LightningModule | None = None, **settings: Any) -> Any:
    module = module or Module()
    made = trainer(ShardstackStrategy(sharding), folder, **settings)
    made.fit(module, loader(dist.get_rank()))
    return module


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_training_is_that_of_one_process(sharding, tmp_path) -> None:
    with ranks_of_lightning():
        module = _fitted(sharding, tmp_path)
    losses, norms, weights = serial(2)
    assert max(norms) > CLIP
    assert module.seen == losses[dist.get_rank()]
    assert module.norms == norms[: len(module.norms)] and len(module.norms) == STEPS - 1
    found = whole(module)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("sharding", quick(SHARDINGS, lambda sharding: sharding in ("optim", "fsdp2")))
@on_ranks(2)
def test_adamw_trains_as_in_one_process(sharding, tmp_path) -> None:
    _, _, weights = serial(2, "adamw")
    with ranks_of_lightning():
        found = whole(_fitted(sharding, tmp_path, Module("adamw")))
    torch.testing.assert_close(found, weights, **bounds(STEPS))


@pytest.mark.parametrize("sharding", quick(SHARDINGS, lambda sharding: sharding in ("optim_grads_params", "fsdp2")))
@on_ranks(2)
def test_gradients_are_reduced_once_a_step(sharding, tmp_path):
    counts = []
    for micro_batches in (1, MICRO_BATCHES, 1):  # the first also makes groups, on which ranks agree
        settings = {"accumulate_grad_batches": micro_batches, "gradient_clip_val": None}
        made = trainer(ShardstackStrategy(sharding), tmp_path, **settings)
        with ranks_of_lightning(), CountedTraffic() as traffic:
            made.fit(Module(), loader(dist.get_rank(), micro_batches=micro_batches))
        counts.append(traffic.reductions)
    with_accumulation, without = counts[1:]
    assert with_accumulation == without and without % STEPS == 0 and without > 0


@pytest.mark.parametrize("sharding", quick(SHARDINGS, lambda sharding: sharding in ("optim_grads_params", "fsdp2")))
@on_ranks(2)
def test_a_run_continues_bitwise_with_callbacks_and_loggers(sharding, tmp_path) -> None:
    """Trains two epochs, and the second again from the checkpoint of the first, with callbacks, loggers,
    validation."""

    def parts(version: str) -> dict[str, Any]:
        saver = ModelCheckpoint(f"{tmp_path}/{version}", monitor="val_loss", save_top_k=1, save_last=True)
        callbacks = [saver, EarlyStopping("val_loss", patience=5), LearningRateMonitor()]
        logger = CSVLogger(tmp_path, version=version)
        return {"callbacks": callbacks, "logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}

    def fit(version: str, epochs: int, checkpoint: str | None = None) -> tuple[Module, L.Trainer]:
        module = Dropped("adamw")
        made = trainer(ShardstackStrategy(sharding), tmp_path, max_epochs=epochs, **parts(version))
        rank = dist.get_rank()
        made.fit(module, loader(rank), loader(rank, 1, 1, first=100), ckpt_path=checkpoint)
        return module, made

    with ranks_of_lightning():
        straight, whole_run = fit("whole", 2)
        first, _ = fit("first", 1)
        torch.manual_seed(999)
        second, resumed = fit("second", 2, f"{tmp_path}/first/last.ckpt")
    assert first.seen + second.seen == straight.seen
    expected, found = whole(straight), whole(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert resumed.global_step == whole_run.global_step == 2 * STEPS
    assert resumed.callback_metrics["val_loss"] == whole_run.callback_metrics["val_loss"]
    if dist.get_rank() == 0:
        saved = sorted(path.name for path in Path(tmp_path, "whole").iterdir() if path.suffix == ".ckpt")
        assert len(saved) == 2 and "last.ckpt" in saved, "one best, the older removed, and the last"
        index = json.loads(Path(tmp_path, "whole", "last.ckpt", "checkpoint.json").read_text())
        assert all(entry["hash"] for entry in index["tensors"].values())
        rows = Path(tmp_path, "lightning_logs", "whole", "metrics.csv").read_text()
        assert "lr-AdamW" in rows and "val_loss" in rows


class Dropped(Module):
    """With dropout, whose masks have to go on where they were, and a schedule."""

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(tokens, index) * nn.functional.dropout(torch.ones(8), 0.5).mean()
        self.seen[-1] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@on_ranks(2)
def test_a_checkpoint_goes_from_one_sharding_to_another(tmp_path) -> None:
    """Saves under one sharding and optimizer class, and continues under another."""
    with ranks_of_lightning():
        module = Module("adamw")
        made = trainer(ShardstackStrategy("fsdp2"), tmp_path)
        made.fit(module, loader(dist.get_rank()))
        made.save_checkpoint(f"{tmp_path}/a.ckpt")
        made.save_checkpoint(f"{tmp_path}/weights.ckpt", weights_only=True)
        expected = whole(module)
        for sharding in ("optim", "optim_grads_params", "no_shard"):
            other = Module("adamw")
            again = trainer(ShardstackStrategy(sharding), tmp_path, max_epochs=1)
            again.fit(other, loader(dist.get_rank()), ckpt_path=f"{tmp_path}/a.ckpt")  # trained to its end already
            found = whole(other)
            assert not other.seen and all(torch.equal(found[name], value) for name, value in expected.items())
            moments = again.strategy._trained.updates.state_tensors()
            assert len(moments) == 2 * len(expected)
        evaluated = Module()
        made = trainer(ShardstackStrategy("optim_grads_params"), tmp_path)
        metrics = made.validate(
            evaluated, loader(dist.get_rank(), 1, 1), ckpt_path=f"{tmp_path}/weights.ckpt", verbose=False
        )
        assert metrics[0]["val_loss"] > 0
        assert all(torch.equal(whole(evaluated)[name], value) for name, value in expected.items())
        with pytest.raises(CheckpointError, match="holds weights alone"):
            trainer(ShardstackStrategy(), tmp_path).fit(
                Module(), loader(dist.get_rank()), ckpt_path=f"{tmp_path}/weights.ckpt"
            )


@pytest.mark.long
@on_ranks(2)
def test_each_precision_trains_or_is_refused(tmp_path) -> None:
    with ranks_of_lightning():
        exact = _fitted("no_shard", tmp_path)
        for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
            runs = {}
            for sharding in SHARDINGS:
                module = _fitted(sharding, tmp_path, precision=precision)
                assert {p.dtype for p in module.parameters()} == {dtype}
                runs[sharding] = module.seen
            # Two ranks add in one order. In bf16 torch's SGD, which updates whole parameters, rounds as ours does not.
            updated_by_torch = ("no_shard", "fsdp2") if precision == "bf16-true" else SHARDINGS
            for name, losses in runs.items():
                assert losses == runs["no_shard" if name in updated_by_torch else "optim"], runs
            assert runs["no_shard"] != exact.seen
        for precision in ("16-true", "64-true", "16-mixed"):
            if precision == "16-mixed":  # which Lightning makes bf16-mixed on CPU, and says so
                continue
            with pytest.raises(ConfigError, match=r"this strategy takes 32-true, bf16-mixed, bf16-true"):
                trainer(ShardstackStrategy(), tmp_path, precision=precision)


class _Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _BuiltBefore(Module):
    def __init__(self) -> None:
        super().__init__()
        self.configure_model()
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class _BuiltThere(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class _OfAnother(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)


class _Foreign(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 0.1)


@pytest.mark.parametrize("sharding", ["optim", "fsdp2"])
@on_ranks(2)
def test_an_optimizer_from_before_wrapping_trains(sharding: str, tmp_path: Path) -> None:
    with ranks_of_lightning():
        found, expected = (whole(_fitted(sharding, tmp_path, kind())) for kind in (_BuiltBefore, _BuiltThere))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class _WithBackbone(Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(2, 2)


@on_ranks(2)
def test_unsupported_uses_are_refused(tmp_path) -> None:
    rank = dist.get_rank()
    one = {"gradient_clip_val": None, "accumulate_grad_batches": 1}  # Lightning itself refuses others by hand

    def refused(kind: type[Exception], message: str, module: Any, sharding: Any = "fsdp2", **settings: Any) -> None:
        with pytest.raises(kind, match=message):
            trainer(ShardstackStrategy(sharding), tmp_path, **settings).fit(module, loader(rank))

    with ranks_of_lightning():
        refused(ConfigError, "automatic_optimization=False", _Manual(), **one)
        refused(OptimizerError, "SGD holds parameters that the wrapped model has not", _OfAnother())
        refused(OptimizerError, "Adafactor cannot update a part of a parameter", _Foreign(), "optim")
        thawed = "BackboneFinetuning looks the optimizer's parameters up among the module's"
        averaged = "averages whole parameters, and a rank has parts of them here"
        for sharding in ("no_shard", "optim_grads", "fsdp2"):
            refused(ConfigError, thawed, _WithBackbone(), sharding, callbacks=[BackboneFinetuning()])
        for sharding in ("optim_grads_params", "fsdp2"):
            refused(ConfigError, f"EMA.* {averaged}", Module(), sharding, callbacks=[EMAWeightAveraging()])
            refused(ConfigError, f"Sto.* {averaged}", Module(), sharding, callbacks=[StochasticWeightAveraging(0.1)])
        wrapped = _fitted("optim", tmp_path)
        refused(WrapError, "wrapped already, with another sharding", wrapped, "no_shard")
        Path(tmp_path, f"file{rank}.ckpt").write_bytes(b"")
        with pytest.raises(CheckpointError, match="is one file, and this strategy's checkpoints are folders"):
            trainer(ShardstackStrategy(), tmp_path).fit(Module(), loader(rank), ckpt_path=f"{tmp_path}/file0.ckpt")
    for sharding, message in (
        ("zero9", "sharding is 'zero9'; it takes one of no_shard"),
        (None, "sharding is None; it takes a config of shardstack.distributed, or one of no_shard"),
        ({"optim": 1}, "sharding is {'optim': 1}; it takes a config"),
        (TorchFullyShardedDataParallelConfig(reproducible_across_ranks=True), "reproducible_across_ranks is set"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardstackStrategy(sharding)
    for strategy, name in (
        (ShardstackStrategy, "find_unused_parameters"),
        (ShardstackStrategy, "ddp_comm_hook"),
        (ShardstackFabricStrategy, "find_unused_parameters"),
    ):  # Lightning would give it to torch's DDP
        with pytest.raises(ConfigError, match=f"has no argument {name}; settings of the wrapper"):
            strategy("optim", **{name: True})


@on_ranks(2)
def test_settings_and_names(tmp_path) -> None:
    with ranks_of_lightning():
        hybrid = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2)
        module = _fitted(hybrid, tmp_path)
        assert tuple(module.net.head.weight.device_mesh.shape) == (2, 1)
        module = Module()
        strategy = ShardstackStrategy(DistributedDataParallelConfig(use_distributed_optimizer=True), units=["Block"])
        trainer(strategy, tmp_path).fit(module, loader(dist.get_rank()))
        assert strategy.wrapper.plan.strategy == "optim"
        named = trainer("shardstack_optim_grads", tmp_path)
        assert named.strategy.settings.sharding_strategy == "optim_grads"
