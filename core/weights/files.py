"""Models of transformers from and to their files, under any wrapper, and LoRA adapters as PEFT's files."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..base.errors import ConfigError
from ..base.files import write_durably
from ..base.module_protocol import unwrap_model
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.foreign_layout import load_foreign
from ..dist_checkpointing.model_state import model_state_dict
from ..dist_checkpointing.safetensors_io import SINGLE_FILE, read_safetensors_index, save_folder
from ..transformer.lora import Adapter
from .names import recipes_of
from .stream import WeightStream

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none"}
_CONFIG |= {"use_rslora": False, "modules_to_save": None, "inference_mode": True}


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, process_group: ProcessGroup | None = None
) -> None:
    """Fills a model of transformers in place from its files. Collective.

    Each rank reads its part of each tensor, of experts that `cut_experts` has cut those that it has, so that a model
    from the meta device is never whole anywhere. Experts are one 3-D tensor in the model and one tensor each in files.
    Leaves adapters of PEFT alone. An optimizer built before has fp32 masters of low-precision weights: call its
    `reload_model_params`.

    Args:
        model: a wrapped model, or a plain one.
        folder: a folder of safetensors files, as `save_pretrained` of transformers writes it.
        process_group: the ranks that call together; None means all.

    Raises:
        CheckpointError: on all ranks, before anything is written: the files are of another model, or damaged; or the
            model is on the meta device.
        ConfigError: how files of such a model name its experts is not known.
        MissingExtraError: `safetensors` is not installed.
    """
    folder, ranks, module = Path(folder), Ranks(process_group), unwrap_model(model)
    views = model_state_dict(module)
    recipes = list(recipes_of(module, views, "hugging_face"))
    index = ranks.on_all(lambda: read_safetensors_index(folder))
    # Second names of tied weights, and what transformers itself leaves in its files, such as further layers.
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    left = {name for name in index.tensors if any(re.search(pattern, name) for pattern in patterns)}
    left |= module.state_dict(keep_vars=True).keys() - views.keys()
    filled = {recipe.name: views[recipe.name] for recipe in recipes}
    load_foreign(filled, recipes, index, folder, ignored_names=left, process_group=process_group)


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, process_group: ProcessGroup | None = None
) -> None:
    """Writes a model of transformers to a new folder, with the tensors that its own `save_pretrained` writes.

    Collective. The first rank writes; no rank has more than a bucket of whole tensors. Experts are one tensor each, as
    transformers 4 and 5 and vLLM read them.

    Args:
        model: a wrapped model, or a plain one. LoRA adapters are merged.
        folder: a new or empty folder.
        process_group: the ranks that hold the model; None means all.

    Raises:
        CheckpointError: on all ranks: the folder is in use, or cannot be written.
        ConfigError: it is no model of transformers, how its files name experts is not known, or it has adapters of
            PEFT that cannot be merged here.
        MissingExtraError: `safetensors` is not installed; with several ranks, a CheckpointError that says so.
    """
    base: Any = unwrap_model(model)
    base = base.get_base_model() if hasattr(base, "get_base_model") else base  # of PEFT's
    if not hasattr(getattr(base, "config", None), "save_pretrained"):
        raise ConfigError(f"{type(base).__name__} is no model of transformers; write a GPTModel by save_hugging_face")
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]  # which servers read
    stream = WeightStream(model, receivers=[0], process_group=process_group)
    plan = {meta.name: (meta.dtype, meta.shape) for meta in stream.metadata()}
    config.dtype = next((dtype for dtype, _ in plan.values() if dtype.is_floating_point), config.dtype)

    def describe(temporary: Path) -> None:
        for described in filter(None, (config, getattr(base, "generation_config", None))):
            described.save_pretrained(temporary)

    save_folder(Path(folder), plan, iter(stream), describe, Ranks(process_group))


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
    own_kinds = {(adapter.linear_in.weight.shape[0], adapter.scale) for adapter in adapters}
    kinds = set().union(*ranks.all_gather(own_kinds))
    if len(kinds) != 1:
        raise ConfigError(
            f"the adapters of the model have {len(kinds)} different ranks and scales; call add_lora once"
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
