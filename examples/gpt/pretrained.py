"""Starts a run from weights alone: of a run's checkpoint, of Hugging Face, of Megatron-LM; continues the last one's.

Each rank reads only its part of each tensor, under any wrapper.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardstack.base.errors import CheckpointError, ConfigError
from shardstack.base.files import brief
from shardstack.base.module_protocol import unwrap_model
from shardstack.dist_checkpointing import load, load_metadata
from shardstack.dist_checkpointing.agreement import Ranks
from shardstack.dist_checkpointing.foreign_layout import Recipe, Run, load_foreign
from shardstack.dist_checkpointing.format.folders import existing_folder
from shardstack.dist_checkpointing.format.reader import read_index
from shardstack.dist_checkpointing.format.torch_archive import TorchArchive
from shardstack.dist_checkpointing.good_checkpoints import another_offered, find_checkpoint
from shardstack.models.gpt import GPTModel
from shardstack.models.gpt.architecture import (
    EXPERT_FIELDS,
    TRANSFORMER_FIELDS,
    architecture_of,
    base_state_dict,
    differing_fields,
    gpt_of,
    model_fields,
)
from shardstack.models.gpt.expert_weights import dense_architecture, group_routers, upcycle_recipes
from shardstack.models.gpt.hugging_face import load_hugging_face, read_hf_config
from shardstack.models.gpt.megatron_layout import find_megatron, load_megatron
from shardstack.models.gpt.megatron_legacy import LEGACY_FILES
from shardstack.training.config import PretrainConfig
from shardstack.training.state import TrainingState, check_is_run
from shardstack.transformer.lora import is_adapter
from shardstack.transformer.transformer_config import TransformerConfig

NO_HASHES = "{} has no hashes, so that the loaded tensors could not be compared with the saved ones"


def load_pretrained(state: TrainingState, folder: Path, *, verify: bool = True, upcycle: int = 0) -> str:
    """Starts a run from the weights in `folder`, in place. All ranks call it.

    The optimizer and LoRA adapters keep their new state.

    Args:
        folder: a run's folder, one of its checkpoints, a model of Hugging Face's, or a checkpoint of Megatron-LM's.
        verify: compare tensors of a run with the hashes that were saved.
        upcycle: the weights are of a dense model; copy its MLPs (1), or so many pieces of each, into the experts.
            Routers keep their new state.

    Returns:
        A line that names the tensors compared with hashes, and the time it took.

    Raises:
        CheckpointError: the folder is none of these, damaged, of another model, or has LoRA adapters.
    """
    models, targets = weights_of(state)
    model = models[0]
    line = NO_HASHES.format(folder)
    if is_hugging_face(folder):
        load_hugging_face(model, folder, targets=targets, upcycle=upcycle)
    elif find_megatron(folder) is not None:
        load_megatron(model, folder, targets=targets, upcycle=upcycle)
    elif upcycle:
        load_run_weights(targets, gpt_of(model), find_checkpoint(folder), upcycle=upcycle)
    else:
        lines: list[str] = []
        checkpoint = find_checkpoint(folder)
        load_run_weights(targets, gpt_of(model), checkpoint, verify=verify, report=lines.append)
        line = lines[0]
    state.optimizer.load_state_scalars(state.optimizer.state_scalars())  # writes the masters into the parameters
    return line


def weights_of(state: TrainingState) -> tuple[list[torch.nn.Module], dict[str, torch.Tensor]]:
    """Returns the stages of a run, and the tensors to load weights into: fp32 masters in the place of parameters that
    are rounded from them."""
    optimizer = state.optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in optimizer.items() if name.startswith("master.")}
    models = [unwrap_model(stage) for stage in state.chunks]
    return models, {name: masters.get(name, tensor) for name, tensor in base_state_dict(models).items()}


def continue_megatron(state: TrainingState, config: PretrainConfig, folder: Path) -> str:
    """Continues a run of Megatron-LM's in place, with its optimizer and schedule unless `config` says otherwise.

    All ranks call it. Samples go on at the same number in this program's order; random streams start anew.

    Args:
        folder: of the run, or one of its checkpoints of the format torch_dist. Of the format torch weights alone.

    Returns:
        A line that names where it goes on.

    Raises:
        CheckpointError: the checkpoint is of another model or schedule, damaged, or has its moments in another layout.
    """
    ranks, takes_all = Ranks(), config.checkpoint.load_optim
    models, targets = weights_of(state)
    moments = state.optimizer.state_tensors() if takes_all else None
    load_megatron(models[0], folder, targets=targets, optimizer=moments)
    saved = ranks.on_all(lambda: _progress(folder, takes_all))
    scalars = state.optimizer.state_scalars()
    if takes_all:
        scalars = {name: value for name, value in scalars.items() if name not in ("without_state", "numbers")}
        scalars |= {"step": saved["step"], "step_of": {}, "grad_scaler": saved["scale"]}
        unit = 1 if config.counts_samples else saved["batch"]
        schedule = saved["schedule"].items()
        state.scheduler.load_state_dict({k: v // unit if k.endswith("_steps") else v for k, v in schedule})
    state.optimizer.load_state_scalars(scalars, with_groups=False)
    state.iteration, state.consumed_samples = saved["iteration"], saved["samples"]
    return f"continuing Megatron-LM's {folder} from iteration {state.iteration}; {NO_HASHES.format('it')}"


def _progress(folder: Path, takes_all: bool) -> dict[str, Any]:
    """Returns how far a run of Megatron-LM's is, from its pickle, which is not run."""
    checkpoint = find_megatron(folder) or folder
    path, piece = next(checkpoint.glob(LEGACY_FILES), checkpoint / "common.pt"), None
    try:
        if not path.is_file():
            piece = read_index(checkpoint).others["common_state/shard_0_1"]
            path = checkpoint / piece.file
        with path.open("rb") as file:
            file.seek(piece.start if piece else 0)
            archive = TorchArchive(io.BytesIO(file.read(piece.num_bytes)) if piece else file)
            root = archive.root[0] if isinstance(archive.root, list) else archive.root
            arguments = getattr(root.get("args"), "state", {})
            found = {"iteration": int(root["iteration"]), "samples": int(arguments.get("consumed_train_samples", 0))}
            if takes_all and "optimizer" in root:
                states = root["optimizer"]
                first = states if {"optimizer", "param_groups"} & states.keys() else next(iter(states.values()))
                inner = first.get("optimizer", first)
                step = inner.get("state", {}).get("common_step", inner["param_groups"][0].get("step", 0))
                scale = {name: archive.number(value) for name, value in first.get("grad_scaler", {}).items()}
                found |= {"step": int(archive.number(step)), "scale": scale}
                found |= {"schedule": dict(root["opt_param_scheduler"]), "batch": int(arguments["global_batch_size"])}
            return found
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration, OSError) as error:
        raise CheckpointError(
            f"{checkpoint} does not say how far its run is ({type(error).__name__}: {brief(str(error))}); start from "
            "its weights by --pretrained-checkpoint"
        ) from None


def load_run_weights(
    targets: Mapping[str, torch.Tensor],
    model: GPTModel,
    checkpoint: Path,
    *,
    verify: bool = True,
    report: Callable[[str], None] | None = None,
    upcycle: int = 0,
) -> None:
    """Fills `targets`, a model's tensors by name, from a checkpoint of a run of the same model.

    Args:
        verify, report: as in :func:`shardstack.dist_checkpointing.load`.
        upcycle: of its dense model, whose tensors are not compared with hashes.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    if any(map(is_adapter, metadata["model_tensors"])):
        raise CheckpointError(
            f"{checkpoint} holds LoRA adapters; continue their run with --load, or merge them with shardstack convert "
            "and start from what that writes"
        )
    ours = model_fields(model.config)
    if upcycle:
        ours = dict(dense_architecture(architecture_of(model), upcycle).transformer)
    differing = differing_fields(ours, _fields_of_run(metadata, checkpoint))
    stored = {name.removeprefix("model."): name for name in metadata["model_tensors"]}
    if not upcycle:
        differing += sorted(targets.keys() ^ stored.keys())
    if differing:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(differing[:20])} (here and there)")
    with another_offered(checkpoint, Ranks()):
        if not upcycle:
            tensors = {f"model.{name}": tensor for name, tensor in targets.items()}
            load(tensors, checkpoint, strict=False, verify=verify, cast=True, report=report)
            return
        index = Ranks().on_all(lambda: read_index(existing_folder(checkpoint)))
        rows = {name: index.tensors[name].shape[0] for name in stored.values() if name in index.tensors}
        dense = [Recipe(name, (Run(source, rows.get(source, 0)),)) for name, source in stored.items()]
        recipes, copies = upcycle_recipes(architecture_of(model), dense, targets, upcycle)
        load_foreign(copies, recipes, index, checkpoint, ignored_names=index.tensors.keys() - rows.keys())
        group_routers(targets, upcycle)


def _fields_of_run(metadata: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Returns `model_fields` of the model in a checkpoint."""
    stored = metadata["config"]["model"]
    names = [name for name in (*TRANSFORMER_FIELDS, *EXPERT_FIELDS) if name in stored]
    try:
        if stored["num_layers"] > len(metadata["model_tensors"]):
            raise ValueError("more layers than tensors")
        return model_fields(TransformerConfig(**{name: stored[name] for name in names}))
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{checkpoint}: no model can have its settings ({brief(str(error))})") from None


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder is a model of Hugging Face's. A run's folder has a ``config.json`` too."""
    try:
        return "model_type" in read_hf_config(folder)
    except CheckpointError:
        return False
