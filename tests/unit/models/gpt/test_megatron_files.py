"""Weights go into Megatron-LM's checkpoints and come back with their bits, through megatron-core's own code."""

from __future__ import annotations

import signal
from argparse import Namespace
from contextlib import nullcontext
from multiprocessing import current_process
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import model_state_dict
from core.distributed import wrap_model
from core.models.gpt import GPTModel
from core.models.gpt.architecture import architecture_of
from core.models.gpt.megatron_layout import load_megatron, save_megatron
from core.optimizer import get_megatron_optimizer
from core.training.config import PretrainConfig
from core.training.config.build import build_config
from core.training.state import TrainingState, build_scheduler
from core.transformer.module import Float16Module
from core.transformer.transformer_config import TransformerConfig
from examples.gpt.convert import settings_of
from examples.gpt.pretrained import continue_megatron
from tests.unit._quick import needs, quick
from tests.unit._spawn import on_ranks
from tests.unit._whole import assembled
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

GATED = {"gated_linear_unit": True, "add_bias_linear": False, "bias_activation_fusion": False}
EXPERTS = GATED | {"num_moe_experts": 4, "moe_router_topk": 2}
MIXED = EXPERTS | {"moe_layer_freq": [0, 1]}
_OF_BOTH = {"gated_linear_unit", "add_bias_linear", "num_moe_experts", "moe_router_topk", "moe_layer_freq"}


def own_model(tied: bool = False, seed: int = 5, vocab_size: int = _megatron.VOCAB, **fields: Any) -> GPTModel:
    """Returns a model of this library that computes what `_megatron.build` builds."""
    torch.manual_seed(seed)
    kept = {name: value for name, value in fields.items() if name in _OF_BOTH}
    return GPTModel(
        TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0, **kept
        ),
        vocab_size=vocab_size,
        max_sequence_length=_megatron.SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
        parallel_output=False,
    )


def sharded_state(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": group})}


def _through_megatron(folder: Path, tied: bool, tensor: int, pipeline: int, fields: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    own = own_model(tied, **fields)
    own.embedding.position_embeddings.weight.data.normal_()
    save_megatron(own, folder / "ours", max_shard_bytes=4096)
    with _megatron.groups(pipeline, tensor):
        if pipeline > 1:
            model = _megatron.build_stage(tied)
        else:
            model = _megatron.build(tied, tensor_model_parallel_size=tensor, **fields)
        state = dist_checkpointing.load(sharded_state(model), str(folder / "ours" / "release"))
        model.load_state_dict(state["model"], strict=True)
        assert state["checkpoint_version"] == 3.0
        if pipeline == 1:
            text = _megatron.tokens(0, 0, 0)
            with torch.no_grad():
                found = model.eval()(text, torch.arange(text.shape[1]).expand_as(text), None, labels=text.roll(-1, 1))
                expected = F.cross_entropy(own.eval()(text).transpose(1, 2), text.roll(-1, 1), reduction="none")
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if dist.get_rank() == 0:
            (folder / "theirs").mkdir()
        dist.barrier()
        with mock.patch.dict(current_process()._config, daemon=False):  # it starts a process
            dist_checkpointing.save(sharded_state(model), str(folder / "theirs"))
    load_megatron(back := own_model(tied, seed=6, **fields), folder / "theirs")
    load_megatron(again := own_model(tied, seed=7, **fields), folder / "ours")
    expected = own.state_dict()
    for found in (back.state_dict(), again.state_dict()):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


CASES = [
    (False, 2, 1, {}),
    (True, 2, 1, GATED),
    (True, 1, 2, {}),
    (False, 1, 2, {}),
    (False, 1, 1, EXPERTS),
    (True, 1, 1, MIXED),
]


@pytest.mark.parametrize(
    ("tied", "tensor", "pipeline", "fields"), quick(CASES, lambda case: case in (CASES[1], CASES[2], CASES[4]))
)
@on_ranks(2)
def test_weights_go_there_and_back(
    tmp_path: Path, tied: bool, tensor: int, pipeline: int, fields: dict[str, Any]
) -> None:
    _through_megatron(tmp_path, tied, tensor, pipeline, fields)


ITERATIONS, BATCH = 5, _megatron.SAMPLES * _megatron.MICRO_BATCHES * 2
SCHEDULE = {
    "max_lr": _megatron.LR,
    "min_lr": _megatron.LR,
    "start_wd": 0.0,
    "end_wd": 0.0,
    "num_steps": 2 * BATCH,
    "lr_warmup_steps": 0,
    "lr_decay_steps": ITERATIONS * BATCH,
    "wd_incr_steps": ITERATIONS * BATCH,
    "lr_decay_style": "constant",
    "wd_incr_style": "constant",
}


def _megatron_run(folder: Path, fields: dict[str, Any], zero1: str | None, steps: int = 2) -> tuple[Any, Any]:
    """Trains under Megatron-LM's replicas, and saves as its loop does. Returns the wrapper and the optimizer."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(use_distributed_optimizer=zero1 is not None)
    model = _megatron.wrap(_megatron.stock("DistributedDataParallel"), _megatron.build(**fields), settings)
    precision = {name: fields[name] for name in ("bf16", "fp16") if name in fields}
    precision |= {"initial_loss_scale": 256.0} if "fp16" in fields else {}
    optimizer = _megatron.build_optimizer(model, use_distributed_optimizer=zero1 is not None, **precision)
    _megatron.train(model, steps, continued=optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    metadata |= {} if zero1 is None else {"distrib_optim_sharding_type": zero1}
    inner = model.module.module if hasattr(model.module, "module") else model.module
    state = {"args": Namespace(consumed_train_samples=steps * BATCH, global_batch_size=BATCH, kind=signal.SIGTERM)}
    state |= {
        "iteration": steps,
        "opt_param_scheduler": SCHEDULE,
        "model": inner.sharded_state_dict(metadata=metadata),
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    if dist.get_rank() == 0:
        (folder / "iter_0000002").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    with mock.patch.dict(current_process()._config, daemon=False):  # it starts a process
        dist_checkpointing.save(state, str(folder / "iter_0000002"))
    return model, optimizer


def _own_run(tied: bool, fields: dict[str, Any], **settings: Any) -> tuple[TrainingState, PretrainConfig, GPTModel]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    gpt = own_model(tied, **fields)
    described = settings_of(architecture_of(gpt)) | {"lr": _megatron.LR, "min_lr": _megatron.LR, "weight_decay": 0.0}
    described |= {"clip_grad": _megatron.CLIP, "train_iters": ITERATIONS, "global_batch_size": BATCH}
    described |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "lr_decay_style": "constant", "micro_batch_size": 2}
    config = build_config(described | {name: fields[name] for name in ("bf16", "fp16") if name in fields} | settings)
    wrapped = Float16Module(config.model, gpt) if config.model.bf16 or config.model.fp16 else gpt
    model = wrap_model(gpt if config.use_torch_fsdp2 else wrapped, config.model, config.ddp)
    optimizer = get_megatron_optimizer(config.optimizer, [model])
    scheduler = build_scheduler(config, optimizer)
    run = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, vocab_size=_megatron.VOCAB)
    return run, config, gpt


def _one_step(run: TrainingState, step: int) -> list[float]:
    losses = []
    for micro in range(_megatron.MICRO_BATCHES):
        is_last = micro == _megatron.MICRO_BATCHES - 1
        text = _megatron.tokens(step, micro, dist.get_rank())
        with nullcontext() if is_last else run.model.no_sync():
            logits = run.model(text).float().transpose(1, 2)
            loss = F.cross_entropy(logits, text.roll(-1, 1))
            (run.optimizer.scale_loss(loss) / _megatron.MICRO_BATCHES).backward()
        losses.append(loss.item())
    run.model.finish_grad_sync()
    run.optimizer.step()
    return losses


CONTINUED = [
    (None, GATED, {}),
    ("fully_reshardable", {}, {"data_parallel_sharding_strategy": "optim"}),
    ("fully_reshardable", GATED, {"use_torch_fsdp2": True}),
    (None, {"bf16": True}, {"data_parallel_sharding_strategy": "optim_grads"}),
    (None, {"fp16": True}, {}),
    (None, EXPERTS, {}),
]


@pytest.mark.parametrize(
    ("zero1", "fields", "settings"), quick(CONTINUED, lambda case: case in (CONTINUED[0], CONTINUED[3]))
)
@on_ranks(2)
def test_a_run_of_megatrons_goes_on(
    tmp_path: Path, zero1: str | None, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    with _megatron.groups():
        model, optimizer = _megatron_run(tmp_path / "run", fields, zero1)
        moments = optimizer.chained_optimizers[0].optimizer.state
        expected = sorted(of["exp_avg"].double().abs().sum().item() for of in moments.values())
        losses = _megatron.train(model, 1, first=2, continued=optimizer)[0]
        weights = _megatron.weights(model)
    run, config, gpt = _own_run(False, fields, **settings)
    line = continue_megatron(run, config, tmp_path / "run")
    assert line.startswith(f"continuing Megatron-LM's {tmp_path / 'run'} from iteration 2")
    assert (run.iteration, run.consumed_samples, run.scheduler.num_steps) == (2, 2 * BATCH, 2)
    assert run.optimizer.state_scalars()["step"] == 2
    if fields.get("fp16"):
        assert run.optimizer.state_scalars()["grad_scaler"]["scale"] == 256.0
    state = assembled(run.optimizer.state_tensors())
    found = sorted(t.double().abs().sum().item() for name, t in state.items() if name.startswith("exp_avg."))
    if zero1 is None and "num_moe_experts" not in fields:  # else of a part, or stacked here
        assert found == pytest.approx(expected, rel=1e-12)
    low = bool(fields.get("bf16") or fields.get("fp16"))
    assert _one_step(run, 2) == pytest.approx(losses, rel=2e-2 if low else 1e-5)
    ours = assembled(model_state_dict(gpt))
    for name in ("decoder.layers.1.self_attention.linear_proj.weight", "embedding.word_embeddings.weight"):
        # Adam divides by the root of a moment: rounding in bf16 shifts what it makes of a small gradient.
        bounds = {"rtol": 2e-2, "atol": _megatron.LR / 2} if low else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours[name].float(), weights[name].float(), **bounds)


@on_ranks(2)
def test_moments_by_bucket_are_refused_in_one_line(tmp_path: Path) -> None:
    with _megatron.groups():
        _megatron_run(tmp_path / "run", {}, "dp_reshardable")
    run, config, gpt = _own_run(False, {})
    match = "no optimizer.state.exp_avg by parameter.*--dist-ckpt-optim-fully-reshardable"
    _megatron.raises_one_line(CheckpointError, match, continue_megatron, run, config, tmp_path / "run")
    run, config, gpt = _own_run(False, {}, load_optim=False)
    continue_megatron(run, config, tmp_path / "run")
    assert (run.iteration, run.consumed_samples, run.optimizer.state_scalars()["step"]) == (2, 2 * BATCH, 0)
    load_megatron(expected := own_model(seed=9), tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), expected.parameters(), strict=True))
