"""Loads and saves weights without a run's state: of a run's checkpoint, of Hugging Face, of Megatron-LM.

Each rank reads only its part of each tensor, under any wrapper.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..datasets.tokenizer import Tokenizer, load_tokenizer
from ..device import current_device
from ..dist_checkpointing import checkpoint_directory, load, load_metadata, model_state_dict, save
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.folders import existing_folder
from ..dist_checkpointing.format.reader import read_index
from ..dist_checkpointing.format.verification import another_offered
from ..distributed.data_parallel_base import unwrap_model
from ..errors import CheckpointError, DataError
from ..files import brief, write_durably
from ..models.gpt import GPTModel
from ..models.gpt.architecture import TRANSFORMER_FIELDS, Architecture, base_state_dict, gpt_of
from ..models.gpt.hf_config import Layout
from ..models.gpt.hugging_face import hf_architecture, load_hugging_face, read_hf_config, save_hugging_face
from ..models.gpt.megatron_layout import find_megatron, load_megatron
from ..tensor_parallel.vocab import pad_vocab_size
from ..transformer.lora import add_lora, is_adapter, merge_lora
from .checkpointing import TOKENIZER_FILE, find_checkpoint, load_weights, save_tokenizer
from .config import PretrainConfig
from .config.build import NEGATED, OTHER_NAMES, build_config
from .run_metadata import check_is_run
from .state import TrainingState

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


NO_HASHES = "{} has no hashes, so that the loaded tensors could not be compared with the saved ones"


def load_pretrained(state: TrainingState, folder: Path, *, verify: bool = True) -> str:
    """Starts a run from the weights in `folder`, in place. All ranks call it.

    The optimizer and LoRA adapters keep their new state.

    Args:
        folder: a run's folder, one of its checkpoints, a model of Hugging Face's, or a checkpoint of Megatron-LM's.
        verify: compare tensors of a run with the hashes that were saved.

    Returns:
        A line that names the tensors compared with hashes, and the time it took.

    Raises:
        CheckpointError: the folder is none of these, damaged, of another model, or has LoRA adapters.
    """
    optimizer = state.optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in optimizer.items() if name.startswith("master.")}
    model = unwrap_model(state.model)
    # Load fp32 masters instead of the parameters that are rounded from them, as in a checkpoint.
    targets = {name: masters.get(name, tensor) for name, tensor in base_state_dict(model).items()}
    line = NO_HASHES.format(folder)
    if is_hugging_face(folder):
        load_hugging_face(model, folder, targets=targets)
    elif find_megatron(folder) is not None:
        load_megatron(model, folder, targets=targets)
    else:
        lines: list[str] = []
        checkpoint = find_checkpoint(folder)
        load_run_weights(targets, gpt_of(model), checkpoint, verify=verify, report=lines.append)
        line = lines[0]
    state.optimizer.load_state_scalars(state.optimizer.state_scalars())  # writes the masters into the parameters
    return line


def load_run_weights(
    targets: Mapping[str, torch.Tensor],
    model: GPTModel,
    checkpoint: Path,
    *,
    verify: bool = True,
    report: Callable[[str], None] | None = None,
) -> None:
    """Fills `targets`, a model's tensors by name, from a checkpoint of a run of the same model.

    Args:
        verify, report: as in :func:`core.dist_checkpointing.load`.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    if any(map(is_adapter, metadata["model_tensors"])):
        raise CheckpointError(
            f"{checkpoint} holds LoRA adapters; continue their run with --load, or merge them with convert.py and "
            "start from what that writes"
        )
    theirs = metadata["config"]["model"]
    ours = {name: getattr(model.config, name) for name in TRANSFORMER_FIELDS}
    differing = [f"{name} {ours[name]!r} and {theirs[name]!r}" for name in ours if theirs.get(name) != ours[name]]
    tensors = {f"model.{name}": tensor for name, tensor in targets.items()}
    differing += sorted(tensors.keys() ^ set(metadata["model_tensors"]))
    if differing:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(differing[:20])} (here and there)")
    with another_offered(checkpoint, Ranks()):
        load(tensors, checkpoint, strict=False, verify=verify, cast=True, report=report)


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder is a model of Hugging Face's. A run's folder has a ``config.json`` too."""
    try:
        return "model_type" in read_hf_config(folder)
    except CheckpointError:
        return False


def load_run_model(
    checkpoint: Path, *, verify: bool = True, report: Callable[[str], None] | None = None
) -> tuple[PretrainConfig, GPTModel]:
    """Loads a checkpoint's model, whole in this process, and its run's settings.

    LoRA adapters are merged into the weights.

    Args:
        verify, report: as in :func:`core.dist_checkpointing.load`.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    config = PretrainConfig.from_json(metadata["config"])
    alone = replace(
        config.model,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        perform_initialization=False,  # the checkpoint fills every parameter
    )

    def build() -> GPTModel:
        model = GPTModel(
            alone,
            vocab_size=metadata["vocab_size"],
            max_sequence_length=config.max_sequence_length,
            share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
            position_embedding_type=config.gpt.position_embedding_type,
        )
        add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
        return model

    _check_description(checkpoint, config, build)
    model = build()
    load_weights(model, checkpoint, verify=verify, report=report)
    merge_lora(model)
    if (config.model.fp16 or config.model.bf16) and current_device().type == "cuda":
        model = model.to(torch.float16 if config.model.fp16 else torch.bfloat16)
    return config, model.to(current_device())


def _check_description(checkpoint: Path, config: PretrainConfig, build: Callable[[], GPTModel]) -> None:
    """Refuses a checkpoint whose settings describe another model than its tensors, before allocating that model."""
    stored = read_index(existing_folder(checkpoint)).tensors
    try:
        fits = config.model.num_layers <= len(stored)
        with torch.device("meta"):
            shapes = {f"model.{name}": tuple(t.shape) for name, t in build().state_dict().items()} if fits else {}
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{checkpoint}: no model can be made of its settings ({brief(str(error))})") from None
    differing = [name for name, shape in shapes.items() if name in stored and stored[name].shape != shape]
    if not fits or differing or not shapes.keys() & stored.keys():
        which = f": {brief(differing[0])}, for one," if differing else ""
        raise CheckpointError(
            f"{checkpoint}: its settings are those of another model than it holds{which}; load another"
        )


def load_run_tokenizer(checkpoint: Path) -> Tokenizer:
    """Loads the tokenizer that the run saved next to its checkpoints."""
    path = checkpoint.parent / TOKENIZER_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist: the run had no tokenizer; put the corpus's tokenizer.json there")
    return load_tokenizer(path)


def run_to_hugging_face(
    root: Path,
    folder: Path,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    verify: bool = True,
    report: Callable[[str], None] | None = None,
    **details: Any,
) -> Path:
    """Writes the latest checkpoint of a run as a model that `transformers` loads, with its tokenizer if it has one.

    Weights are fp32 unless `dtype` says otherwise; `verify` and `report` are those of
    :func:`core.dist_checkpointing.load`, other arguments as `save_hugging_face` takes.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or the layout cannot express its model.
    """
    checkpoint = find_checkpoint(root)
    _, model = load_run_model(checkpoint, verify=verify, report=report)
    tokenizer = load_run_tokenizer(checkpoint) if (checkpoint.parent / TOKENIZER_FILE).exists() else None
    ids = {"eos_token_id": tokenizer.eod} if tokenizer is not None else {}
    save_hugging_face(model, folder, layout=layout, dtype=dtype, vocab_size=vocab_size, config=ids, **details)
    if tokenizer is not None:
        with _unwritable_as_error(folder):
            tokenizer.save(folder / TOKENIZER_FILE)
            path = folder / TOKENIZER_CONFIG_FILE  # the class would be guessed from the model's kind
            described = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            write_durably(path, json.dumps(described, indent=1))
    return checkpoint


def run_from_hugging_face(folder: Path, root: Path) -> tuple[Path, Architecture]:
    """Writes a model of Hugging Face's as a checkpoint with weights only, in fp32, and its tokenizer if it has one.

    Returns:
        The checkpoint, and the model's architecture.

    Raises:
        CheckpointError: the model is of an unknown kind, or the folder is in use.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise CheckpointError(f"{root} exists and is not empty; choose another folder, or move it away")
    architecture = hf_architecture(folder)
    config = build_config(_settings_of(architecture))
    rows = pad_vocab_size(architecture.vocab_size, config.gpt.make_vocab_size_divisible_by)
    model = architecture.build(vocab_size=rows, perform_initialization=False)
    load_hugging_face(model, folder)
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else None
    save_weights(model, config, root)
    if tokenizer is not None:
        with _unwritable_as_error(root):
            save_tokenizer(tokenizer, root)
    return checkpoint_directory(root, 0), architecture


@contextmanager
def _unwritable_as_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be written ({error.strerror}); make room") from None


def save_weights(model: GPTModel, config: PretrainConfig, root: Path) -> None:
    """Writes ``root/iter_0000000`` with only the weights of a model that is whole in this process."""
    tensors = {f"model.{name}": tensor for name, tensor in model_state_dict(model).items()}
    metadata = {
        "iteration": 0,
        "consumed_samples": 0,
        "optimizer": {},
        "scheduler": {},
        "vocab_size": model.vocab_size,
        "config": config.to_json(),
        "model_tensors": sorted(tensors),
        "rng_layout": [],
        "layout": {"ranks": 1, "tensor": 1, "context": 1},
    }
    save(tensors, checkpoint_directory(root, 0), metadata=metadata)


def flags_of(architecture: Architecture) -> list[str]:
    """Returns the flags of `pretrain_gpt.py` for a run of this model."""
    settings = _settings_of(architecture)
    flags: list[str] = []
    for name in (*TRANSFORMER_FIELDS, "position_embedding_type", "max_position_embeddings"):
        value, dashed = settings[name], name.replace("_", "-")
        flag = OTHER_NAMES.get(name, (f"--{dashed}",))[0]
        if isinstance(value, bool):
            flags.append(flag if value else NEGATED.get(name, f"--no-{dashed}"))
        else:
            flags += [flag, str(value)]
    return flags + ([] if architecture.tied else ["--untie-embeddings-and-output-weights"])


def _settings_of(architecture: Architecture) -> dict[str, Any]:
    """Returns settings of a run that could have made the model. Those about training only are arbitrary."""
    length = architecture.max_sequence_length
    return {
        **architecture.transformer,
        "position_embedding_type": architecture.position_embedding_type,
        "max_position_embeddings": length,
        "untie_embeddings_and_output_weights": not architecture.tied,
        "seq_length": length,
        "micro_batch_size": 1,
        "train_iters": 1,
        "lr": 0.0,
    }
