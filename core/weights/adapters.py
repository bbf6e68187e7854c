"""Writes LoRA adapters as PEFT's files, which PEFT, vLLM and SGLang load onto the base model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..base.errors import ConfigError
from ..base.files import write_durably
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.safetensors_io import SINGLE_FILE, save_folder
from ..transformer.lora import Adapter
from .stream import WeightStream

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none"}
_CONFIG |= {"use_rslora": False, "modules_to_save": None, "inference_mode": True}


def save_adapter(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Writes the LoRA adapters of a GPT into a new folder, under Hugging Face's names. Collective. The base model is
    not gathered.

    Args:
        model: a `GPTModel` with `add_lora`, or a wrapper of one, or all of this rank's pipeline stages.
        base_model: name or path of the model that the adapters belong to.
        process_group: the ranks that hold the model; the first one writes.

    Raises:
        ConfigError: the model has no adapters, or some of different rank or scale.
        CheckpointError: on all ranks: no model of Hugging Face's computes what this one does, or the folder is in use.
        MissingExtraError: `safetensors` is not installed.
    """
    ranks = Ranks(process_group)
    stages = [model] if isinstance(model, nn.Module) else model
    adapters = [module for stage in stages for module in stage.modules() if isinstance(module, Adapter)]
    kinds = set().union(
        *ranks.all_gather({(adapter.linear_in.weight.shape[0], adapter.scale) for adapter in adapters})
    )
    if len(kinds) != 1:
        raise ConfigError(
            f"the adapters of the model have {len(kinds)} different ranks and scales, and a file describes one; call "
            "add_lora once"
        )
    ((rank, scale),) = kinds
    stream = WeightStream(model, adapters="only", receivers=[0], process_group=process_group)
    plan = {meta.name: (meta.dtype, meta.shape) for meta in stream.metadata()}
    tensors = ((name, tensor.clone()) for name, tensor in stream)  # queries, keys and values share one matrix
    config = {"r": rank, "lora_alpha": scale * rank, "base_model_name_or_path": base_model, **_CONFIG}
    config["target_modules"] = sorted({name.split(".")[-3] for name in plan})

    def describe(into: Path) -> None:
        (into / SINGLE_FILE).rename(into / ADAPTER_FILE)
        write_durably(into / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2) + "\n")

    save_folder(Path(folder), plan, tensors, describe, ranks, max_shard_bytes=1 << 62)
