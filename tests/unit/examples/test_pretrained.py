"""A run starts from weights of any origin, under any wrapper, with fp32 masters that no rounding has touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import model_state_dict
from core.distributed import wrap_model
from core.models.gpt import GPTModel
from core.models.gpt.architecture import architecture_of
from core.models.gpt.hugging_face import save_hugging_face
from core.optimizer import get_megatron_optimizer
from core.training.checkpointing import load_checkpoint
from core.training.config.build import build_config
from core.training.state import TrainingState, build_scheduler
from core.transformer.lora import add_lora, is_adapter
from core.transformer.module import Float16Module
from examples.gpt.convert import save_weights, settings_of
from examples.gpt.pretrained import load_pretrained
from tests.unit._gpt import gpt_of
from tests.unit._spawn import run_distributed
from tests.unit._whole import assembled
from tests.unit.models.gpt.test_hugging_face import build

WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data_parallel_sharding_strategy": "optim", "bucket_size": 500},
    "zero2": {"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 300},
    "fsdp2": {"use_torch_fsdp2": True},
}


LAYOUTS = [("ddp", 1, None), ("zero1", 2, None), ("zero2", 1, None), ("fsdp2", 2, None), ("fsdp2", 1, None)]
LAYOUTS += [("zero1", 1, 3), ("fsdp2", 2, 3)]
"""Wrapper, tensor-parallel size and rank of adapters."""


def _state(wrapper: str, **changes: Any) -> tuple[TrainingState, GPTModel]:
    """Returns a new run of the kind "qwen3", in bf16 as its wrapper takes it."""
    parallel_state.destroy_model_parallel()
    kind = build("qwen3", vocab_size=64, seed=9)
    settings = settings_of(architecture_of(kind)) | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = build_config(settings | WRAPPERS[wrapper] | {"bf16": True} | changes)
    parallel_state.initialize_model_parallel(config.model.tensor_model_parallel_size)
    torch.manual_seed(9)
    gpt = gpt_of(config.model, True, 64, config.max_sequence_length)
    add_lora(gpt, config.gpt.lora_rank)
    model = wrap_model(gpt if config.use_torch_fsdp2 else Float16Module(config.model, gpt), config.model, config.ddp)
    optimizer = get_megatron_optimizer(config.optimizer, [model])
    scheduler = build_scheduler(config, optimizer)
    return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, vocab_size=64), gpt


def _starts(folders: list[Path]) -> list[str]:
    """Returns what is wrong on this rank with the weights that runs start from."""
    expected = {name: tensor.detach() for name, tensor in build("qwen3", vocab_size=64).state_dict().items()}
    problems = []
    for wrapper, tp, lora_rank in LAYOUTS:
        state, gpt = _state(wrapper, tensor_model_parallel_size=tp, lora_rank=lora_rank)
        adapters = {name: tensor for name, tensor in assembled(model_state_dict(gpt)).items() if is_adapter(name)}
        for folder in folders:
            for name, tensor in gpt.named_parameters():
                if not is_adapter(name):
                    tensor.data.zero_()
            load_pretrained(state, folder)
            low = assembled(model_state_dict(gpt))
            masters = {
                name.removeprefix("master."): tensor
                for name, tensor in assembled(state.optimizer.state_tensors()).items()
                if name.startswith("master.")
            }
            where = f"{wrapper}, tp {tp}, rank {lora_rank}, {folder.name}: "
            frozen_in_bf16 = lora_rank is not None and wrapper != "fsdp2"  # without masters
            for name, tensor in expected.items():
                if not frozen_in_bf16 and not torch.equal(masters.get(name, low[name]), tensor):
                    problems.append(f"{where}{name}, the master")
                if not torch.equal(low[name], tensor.to(low[name].dtype)):
                    problems.append(f"{where}{name}, the parameter")
            if {*low} != expected.keys() | adapters.keys() or bool(adapters) is (lora_rank is None):
                problems.append(f"{where}other names")
            problems += [f"{where}{name}, an adapter" for name, t in adapters.items() if not torch.equal(low[name], t)]
    return problems


def test_every_wrapper_starts_from_either(tmp_path: Path):
    model = build("qwen3", vocab_size=64)
    save_hugging_face(model, tmp_path / "hf")
    save_weights(model, build_config(settings_of(architecture_of(model))), tmp_path / "ours")
    assert run_distributed(_starts, 2, [tmp_path / "hf", tmp_path / "ours"]) == [[], []]


def _upcycled_starts(folders: list[Path]) -> list[str]:
    """Returns what is wrong on this rank with a model with experts that starts from a dense one."""
    dense, problems = build("qwen3", vocab_size=64).state_dict(), []
    layouts = (("zero1", 1, 1), ("zero1", 2, 2), ("fsdp2", 1, 2), ("fsdp2", 2, 1))
    for (wrapper, tp, pieces), folder in [
        *zip(layouts, folders * 2, strict=True),
        *zip(layouts[::3], folders[::-1], strict=True),
    ]:
        changes = {"num_moe_experts": 4, "moe_layer_freq": "[0,1]", "tensor_model_parallel_size": tp}
        state, gpt = _state(wrapper, **changes, moe_ffn_hidden_size=20 // pieces)
        router = assembled(model_state_dict(gpt))["decoder.layers.1.mlp.router.weight"]
        fresh = router[: 4 // pieces].repeat_interleave(pieces, 0)
        load_pretrained(state, folder, upcycle=pieces)
        masters = {name.removeprefix("master."): t for name, t in assembled(state.optimizer.state_tensors()).items()}
        for name, tensor in assembled(model_state_dict(gpt)).items():
            source = dense.get(name.replace(".experts", ""), fresh)
            copies = source
            if ".experts" in name:
                of_piece = source.chunk(pieces, 0) if "fc1" in name else (pieces * source).chunk(pieces, 1)
                copies = torch.stack(of_piece * (4 // pieces))
            if not torch.equal(tensor, copies.to(tensor.dtype)) or not torch.equal(masters.get(name, copies), copies):
                problems.append(f"{wrapper}, tp {tp}, {pieces} piece(s), {folder.name}: {name}")
    return problems


def test_experts_start_as_copies_of_a_dense_run(tmp_path: Path):
    model = build("qwen3", vocab_size=64)
    save_hugging_face(model, tmp_path / "hf")
    save_weights(model, build_config(settings_of(architecture_of(model))), tmp_path / "ours")
    assert run_distributed(_upcycled_starts, 2, [tmp_path / "hf", tmp_path / "ours"]) == [[], []]


def _refused(folder: Path, how: str) -> str:
    state, gpt = _state("ddp", **{"other": {"rotary_base": 7.0}, "adapters": {"lora_rank": 3}}.get(how, {}))
    before = [parameter.clone() for parameter in gpt.parameters()]
    with pytest.raises(CheckpointError) as caught:
        if how == "load":
            load_checkpoint(state, build_config(settings_of(architecture_of(gpt))), folder)
        else:
            load_pretrained(state, folder)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), before, strict=True))
    return str(caught.value)


def test_what_cannot_be_started_from_is_refused(tmp_path: Path):
    model = build("qwen3", vocab_size=64)
    save_weights(model, build_config(settings_of(architecture_of(model))), tmp_path / "ours")
    message = run_distributed(_refused, 1, tmp_path / "ours", "load")[0]
    assert f"holds weights alone, and no run to continue; start one with --pretrained-checkpoint {tmp_path}" in message
    assert "rotary_base 7.0 and 5000.0 (here and there)" in run_distributed(_refused, 1, tmp_path / "ours", "other")[0]
    assert "no such folder" in run_distributed(_refused, 1, tmp_path / "nowhere", "missing")[0]
    add_lora(model, 3)
    with pytest.raises(CheckpointError, match="has LoRA adapters, which a qwen3 has no place for; merge them first"):
        save_hugging_face(model, tmp_path / "hf")
    save_weights(model, build_config(settings_of(architecture_of(model))), tmp_path / "adapted")
    message = run_distributed(_refused, 1, tmp_path / "adapted", "adapters")[0]
    assert "holds LoRA adapters; continue their run with --load, or merge them with shardstack convert" in message
