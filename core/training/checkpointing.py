"""All of a run's state on disk and back: model, optimizer, schedule, random streams and the place in the data.

A checkpoint is laid out for the whole model, so that any number of ranks and any wrapper can continue it: fp32 master
weights stand in the place of the low-precision parameters that were rounded from them, which is how FSDP2, whose
parameters are the masters, writes them anyway. Frozen parameters have no masters: they are written as the model has
them, and cast where the run that reads them has them in another precision. Random streams belong to ranks, and
continue only where the same number of ranks does.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .. import device, parallel_state
from ..bounds import brief
from ..datasets.tokenizer import Tokenizer
from ..dist_checkpointing import (
    AsyncSaver,
    checkpoint_directory,
    latest_checkpoint,
    load,
    load_metadata,
    model_state_dict,
    save,
)
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.folders import complete_checkpoints
from ..dist_checkpointing.format.reader import FINITE, SKIPPED
from ..dist_checkpointing.format.safe_metadata import INDEX_FILE
from ..dist_checkpointing.format.verification import advice, another_offered, newest_good
from ..dist_checkpointing.views.flat_range import held_boxes
from ..distributed.data_parallel_base import unwrap_model
from ..errors import CheckpointError
from ..models.gpt.architecture import TRANSFORMER_FIELDS
from ..tensor_parallel.random import get_rng_tracker
from .config import PretrainConfig
from .state import TrainingState

TOKENIZER_FILE = "tokenizer.json"
_METADATA: dict[str, type] = {
    "iteration": int,
    "consumed_samples": int,
    "vocab_size": int,
    "config": dict,
    "optimizer": dict,
    "scheduler": dict,
    "model_tensors": list,
    "rng_layout": list,
    "layout": dict,
}
_RNG_BYTES = 1 << 24
"""Most that the random streams of a rank take; they take some 20,000."""
_RNG_NAMES = "rng."
_MODEL_FIELDS = {  # what the model computes; a test holds this to all fields of the transformer
    "model": TRANSFORMER_FIELDS,
    "gpt": (
        *("position_embedding_type", "untie_embeddings_and_output_weights"),
        *("lora_rank", "lora_alpha", "lora_targets"),
    ),
}


def save_checkpoint(
    state: TrainingState, config: PretrainConfig, root: Path, *, saver: AsyncSaver | None = None
) -> Path:
    """Writes ``root/iter_<iteration>`` and points ``root/latest`` to it; collective.

    Args:
        saver: writes it beside what follows; its `wait` then tells whether it failed.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    rng, tensors = rng_state(), _tensors(state)
    folder = checkpoint_directory(root, state.iteration)
    metadata = {
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "vocab_size": state.vocab_size,
        "config": config.to_json(),
        "optimizer": state.optimizer.state_scalars(),
        "scheduler": state.scheduler.state_dict(),
        "model_tensors": sorted(name for name in tensors if name.startswith("model.")),
        "rng_layout": _rng_layout(rng),
        "layout": _rank_layout(),
        "sample_order": dict(state.sample_order),
        FINITE: _all_finite(tensors),
        SKIPPED: state.skipped_steps,
    }
    write = save if saver is None else saver.save
    tensors |= {f"{_RNG_NAMES}rank{dist.get_rank()}": _packed(rng)}
    write(tensors, folder, metadata=metadata, keep=config.checkpoint.retention)
    return folder


def load_checkpoint(state: TrainingState, config: PretrainConfig, root: Path, *, fall_back: bool = False) -> str:
    """Continues `state` in place from the latest checkpoint in `root`, or from `root` if it is one; collective.

    Warns where samples come in another order than the checkpoint's run had them.

    Args:
        fall_back: where the latest is damaged, or its weights are not finite, continue from the newest that is good:
            for a run that is started again with no person there to choose.

    Returns:
        A line that says what was compared with the hashes that were saved, and how long that took.

    Raises:
        CheckpointError: there is none, it is damaged, its weights are not finite, or it is of another model. Of one
            that is no good the newest older one that is good is named.
    """
    ranks = Ranks()
    folder = ranks.from_first(lambda: find_checkpoint(root, fall_back=fall_back))
    if fall_back and not is_checkpoint(root):
        good = newest_good(root, ranks)
        if good is not None and good != folder:
            warnings.warn(f"{folder} is no good; continuing from {good}", stacklevel=2)
            folder = good
    with another_offered(folder, ranks):
        metadata = ranks.from_first(lambda: load_metadata(folder))
    check_is_run(metadata, folder)
    if not metadata["optimizer"]:
        raise CheckpointError(
            f"{folder} holds weights alone, and no run to continue; start one with --pretrained-checkpoint {root}"
        )
    _check_same_model(metadata, state, config, folder)
    if metadata.get(FINITE) is False:
        raise CheckpointError(f"{folder} holds weights that are infinite or NaN; {advice(folder, ranks)}")
    same_ranks = metadata["layout"] == _rank_layout() and metadata["rng_layout"] == _rng_layout(rng_state())
    name = f"{_RNG_NAMES}rank{dist.get_rank()}"
    num_bytes = sum(size for _, size in metadata["rng_layout"])
    streams = {name: torch.empty(num_bytes, dtype=torch.uint8)} if same_ranks else {}
    lines: list[str] = []
    verify = config.checkpoint.verify_checkpoint
    with another_offered(folder, ranks):
        wanted = _tensors(state) | streams
        load(wanted, folder, verify=verify, cast=True, report=lines.append, optional=_RNG_NAMES)
    try:
        state.optimizer.load_state_scalars(metadata["optimizer"])
        state.scheduler.load_state_dict(metadata["scheduler"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder}: the metadata of optimizer and schedule is none that a run writes ({type(error).__name__}: "
            f"{brief(str(error))}); load another one"
        ) from None
    state.iteration, state.consumed_samples = metadata["iteration"], metadata["consumed_samples"]
    _warn_of_another_order(metadata.get("sample_order", {}), state)
    if same_ranks:
        set_rng_state(_unpacked(streams[name], metadata["rng_layout"]))
    return lines[0]


def load_weights(
    model: nn.Module, folder: Path, *, verify: bool = True, report: Callable[[str], None] | None = None
) -> None:
    """Fills a model's parameters alone from a checkpoint of any layout.

    Args:
        verify, report: as those of :func:`core.dist_checkpointing.load`.

    Raises:
        CheckpointError: it is damaged, where the newest older one that is good is named, or of another model.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_state_dict(model).items()}
    stored = load_metadata(folder)["model_tensors"]
    if sorted(tensors) != stored:
        differing = sorted(set(stored) ^ tensors.keys())
        raise CheckpointError(f"{folder} is a checkpoint of another model; only one side has {', '.join(differing)}")
    with another_offered(folder, Ranks()):
        load(tensors, folder, strict=False, verify=verify, cast=True, report=report)


def find_checkpoint(root: Path, *, fall_back: bool = False) -> Path:
    """The latest checkpoint of a run's folder; the folder itself if it is a checkpoint.

    Args:
        fall_back: where ``latest`` names none, take the one of the highest iteration.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(root):
        return root
    try:
        found = latest_checkpoint(root) if root.is_dir() else None
    except CheckpointError:
        found = next(iter(complete_checkpoints(root)), None) if fall_back else None
        if found is None:
            raise
    if found is None:
        raise CheckpointError(
            f"{root}: {'holds no checkpoint' if root.is_dir() else 'no such folder'}; give --load the folder that a "
            "run saved to"
        )
    return found


def is_checkpoint(folder: Path) -> bool:
    """Whether this is one checkpoint, and not the folder of a run."""
    return (folder / INDEX_FILE).is_file()


def check_is_run(metadata: Mapping[str, Any], folder: Path) -> None:
    """Refuses a checkpoint that :func:`save_checkpoint` did not write, or in which it would not have written this."""
    missing = _METADATA.keys() - metadata.keys()
    if missing:
        raise CheckpointError(
            f"{folder}: not the checkpoint of a pretraining run, its metadata has no {', '.join(sorted(missing))}"
        )
    odd = sorted(name for name, kind in _METADATA.items() if not isinstance(metadata[name], kind))
    odd += [name for name in ("iteration", "consumed_samples") if name not in odd and metadata[name] < 0]
    if "config" not in odd:
        sections = ("model", "gpt", "ddp", "optimizer")
        odd += [f"config.{name}" for name in sections if not isinstance(metadata["config"].get(name), dict)]
    if "model_tensors" not in odd and not all(isinstance(name, str) for name in metadata["model_tensors"]):
        odd.append("model_tensors")
    if "layout" not in odd and not _is_small(metadata["layout"].get("ranks")):
        odd.append("layout")
    if "rng_layout" not in odd and not all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _is_small(entry[1])
        for entry in metadata["rng_layout"]
    ):
        odd.append("rng_layout")
    if "rng_layout" not in odd and sum(size for _, size in metadata["rng_layout"]) > _RNG_BYTES:
        odd.append("rng_layout")
    if odd:
        raise CheckpointError(
            f"{folder}: the metadata holds what no pretraining run writes, under {', '.join(odd)}; load another one"
        )


def _is_small(value: Any) -> bool:
    """Whether this is a number of ranks, or of bytes of a generator's state."""
    return type(value) is int and 0 < value < 1 << 20


def save_tokenizer(tokenizer: Tokenizer, root: Path) -> None:
    """Keeps the run's tokenizer beside its checkpoints, for whoever generates text; by one rank."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(root / TOKENIZER_FILE)


def _tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Every tensor of the whole model and its optimizer by name, sharing this rank's storage."""
    optimizer = state.optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in optimizer.items() if name.startswith("master.")}
    model = model_state_dict(unwrap_model(state.model))
    tensors = {f"model.{name}": masters.get(name, tensor) for name, tensor in model.items()}
    return tensors | {f"optimizer.{name}": t for name, t in optimizer.items() if not name.startswith("master.")}


def _all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every floating value that any rank holds is finite; collective."""
    found = True
    for tensor in tensors.values():
        for _, values in held_boxes(tensor):
            if values.is_floating_point() and values.element_size() > 1 and values.numel():
                low, high = torch.aminmax(values.detach())  # NaN shows in both
                found = found and bool(low.isfinite() & high.isfinite())
    everywhere = torch.tensor(int(found), device=device.current_device())
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def _check_same_model(metadata: Mapping[str, Any], state: TrainingState, config: PretrainConfig, folder: Path) -> None:
    theirs = metadata["config"]
    ours = config.to_json()
    differing = [
        f"{name} {theirs[section].get(name)!r} there and {ours[section][name]!r} here"
        for section, names in _MODEL_FIELDS.items()
        for name in names
        if theirs[section].get(name) != ours[section][name]
    ]
    if metadata["vocab_size"] != state.vocab_size:
        differing.append(f"vocab_size {metadata['vocab_size']} there and {state.vocab_size} here")
    if theirs["optimizer"].get("optimizer") != ours["optimizer"]["optimizer"]:
        differing.append(
            f"optimizer {theirs['optimizer'].get('optimizer')} there and {config.optimizer.optimizer} here"
        )
    if differing:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {', '.join(differing)}; give the flags of that run, or load "
            "a checkpoint of this model"
        )


def _warn_of_another_order(theirs: Mapping[str, Any], state: TrainingState) -> None:
    """A run may go on with other data or for longer on purpose; that samples come twice should not be a surprise."""
    ours = state.sample_order
    same = all(theirs.get(name) == ours.get(name) for name in ("order", "corpus", "seq_length"))
    named = [name for name in ours if name != "order" and theirs.get(name) != ours[name]]
    if theirs and not same and named:
        changes = ", ".join(f"{name} {theirs.get(name)} -> {ours[name]}" for name in named)
        warnings.warn(
            f"the order of samples is not that of the checkpoint ({changes}): training goes on at sample "
            f"{state.consumed_samples} of the new order, so that some samples repeat and others are skipped",
            stacklevel=3,
        )


def rng_state() -> dict[str, torch.Tensor]:
    """The state of every random stream of this rank, as byte tensors on the CPU."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    streams = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers], dtype=torch.int64).view(torch.uint8),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64).view(torch.uint8),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64).view(torch.uint8),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64).view(torch.uint8),
    }
    if device.device_type() == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams | {f"tracked.{name}": value for name, value in sorted(get_rng_tracker().get_states().items())}


def set_rng_state(streams: Mapping[str, torch.Tensor]) -> None:
    """Continues every stream from :func:`rng_state`."""
    torch.set_rng_state(streams["torch"])
    version, *numbers = streams["python"].view(torch.int64).tolist()
    has_gauss, gauss = streams["python_gauss"].view(torch.float64).tolist()
    random.setstate((version, tuple(numbers), gauss if has_gauss else None))
    *keys, position, has_cached = streams["numpy"].view(torch.int64).tolist()
    cached = streams["numpy_gauss"].view(torch.float64).item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_cached, cached))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
    tracked = {name.removeprefix("tracked."): v for name, v in streams.items() if name.startswith("tracked.")}
    get_rng_tracker().set_states(tracked)


def _rng_layout(streams: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, value.numel()] for name, value in streams.items()]


def _rank_layout() -> dict[str, int]:
    return {
        "ranks": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
    }


def _packed(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in streams.values()])


def _unpacked(packed: torch.Tensor, layout: list[list[Any]]) -> dict[str, torch.Tensor]:
    pieces = packed.split([size for _, size in layout])
    return {name: piece.clone() for (name, _), piece in zip(layout, pieces, strict=True)}
