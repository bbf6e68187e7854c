"""Sets up a run (process group, parallel groups, seeds), and its state: all that changes with an iteration.

Checks what a checkpoint says about the run that it shall continue.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base import device
from ..base._torch_compat import compiles_for_gpus
from ..base.errors import CheckpointError, check_range
from ..distributed import DistributedDataParallelConfig, _BaseDataParallel
from ..models.gpt import GPTModel
from ..models.gpt.architecture import TRANSFORMER_FIELDS
from ..optimizer import MegatronOptimizer
from ..optimizer_param_scheduler import OptimizerParamScheduler
from ..rendezvous import default_group
from ..rendezvous.launchers import set_launcher_variables
from ..tensor_parallel.random import seed_everything
from ..transformer.moe_config import OPTIONS_OF_FUNCTION
from ..transformer.pipeline_stages import pipeline_stage
from .config import PretrainConfig, validate
from .launch.entry import environment_rank, environment_threads, environment_world_size

WORKERS_PER_CORE = 16
"""Most processes that read samples, on each rank and for each core of the machine: so many wait for slow storage."""

_SEEDS_OF_A_REPLICA = 10
"""Difference of the seeds of data-parallel replicas under ``data_parallel_random_init``, as in Megatron-LM."""


def initialize(config: PretrainConfig) -> None:
    """Joins the process group, builds the parallel groups, and seeds every generator.

    A rank computes with one thread unless ``OMP_NUM_THREADS`` is set, or the optimizer runs on the host for a GPU.
    Only the first rank shows warnings, which are the same on all ranks, each as one line.

    Raises:
        ConfigError: settings contradict each other, the number of ranks, or the environment; raised before anything is
            created.
    """
    set_launcher_variables()
    validate(config, dist.get_world_size() if dist.is_initialized() else environment_world_size())
    most = WORKERS_PER_CORE * (os.cpu_count() or 1)
    check_range(config.data, "num_workers", most=most, takes=f"0 to {most} here: {WORKERS_PER_CORE} processes a core")
    if environment_rank() != 0:
        warnings.filterwarnings("ignore")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    offloads = getattr(config.ddp, "cpu_offload", False)
    torch.set_num_threads(environment_threads(updates_on_host=offloads and device.device_type() == "cuda"))
    torch.set_float32_matmul_precision(config.run.fp32_matmul_precision)
    if config.run.deterministic or config.ddp.reproducible_across_ranks:
        device.compute_deterministically()
    default_group.init_process_group(config.run.distributed_timeout_minutes, carries_host_tensors=offloads)
    make_groups(config)
    replica = parallel_state.get_data_parallel_rank() if config.run.data_parallel_random_init else 0
    seed_everything(config.run.seed + _SEEDS_OF_A_REPLICA * replica)


def wrapper_config(config: PretrainConfig) -> DistributedDataParallelConfig:
    """Returns the settings of the wrapper on this machine: on GPUs layers are compiled, unless the config says not."""
    compiles = config.ddp.compile_units
    if compiles is None:
        compiles = device.device_type() == "cuda" and compiles_for_gpus()
    return replace(config.ddp, compile_units=compiles)


def make_groups(config: PretrainConfig) -> None:
    """Makes the groups of `shardstack.parallel_state` in the world that exists."""
    parallel_state.initialize_model_parallel(
        config.model.tensor_model_parallel_size,
        config.model.pipeline_model_parallel_size,
        config.model.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.model.context_parallel_size,
        expert_model_parallel_size=config.model.expert_model_parallel_size,
        expert_tensor_parallel_size=config.model.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.run.distributed_timeout_minutes,
    )


@dataclass(kw_only=True)
class TrainingState:
    """The state of a run after an iteration."""

    model: _BaseDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    vocab_size: int
    """Rows of the model's embedding, padding included."""
    later_stages: Sequence[_BaseDataParallel] = ()
    """The rank's virtual pipeline stages after the first, which is `model`. None but with
    `virtual_pipeline_model_parallel_size`."""
    iteration: int = 0
    """Number of steps so far, skipped ones included. `loop` counts, and a checkpoint sets it when a run resumes."""
    consumed_samples: int = 0
    """Samples of the training split in these steps, over all ranks. Set as `iteration`."""
    skipped_steps: int = 0
    """Steps in a row, up to this one, that were skipped because a gradient was infinite or NaN, without a dynamic loss
    scale. `loop` sets it. A resumed run starts at 0."""
    sample_order: Mapping[str, Any] = field(default_factory=dict)
    """Inputs and fingerprint of the order of samples (`RunData.sample_order`). A checkpoint stores it to compare."""

    @property
    def chunks(self) -> list[_BaseDataParallel]:
        """All of the rank's pipeline stages."""
        return [self.model, *self.later_stages]


def build_gpt(config: PretrainConfig, vocab_size: int, vp_stage: int | None = None) -> GPTModel:
    """Builds the model of a run, without adapters. Of pipeline stages it is this rank's.

    Args:
        vocab_size: rows of the embedding, padding included.
        vp_stage: which of the rank's virtual stages; None where it has one stage.
    """
    stage = pipeline_stage(config.model, vp_stage)
    return GPTModel(
        config.model,
        vocab_size=vocab_size,
        max_sequence_length=config.max_sequence_length,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        vp_stage=vp_stage,
    )


def build_scheduler(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds the schedule of a run, counted in iterations, or in samples (`PretrainConfig.counts_samples`).

    Raises:
        ConfigError: its lengths contradict each other.
    """
    settings, weight_decay = config.scheduler, config.optimizer.weight_decay
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    in_samples = config.run.train_samples is not None
    # What an iteration counts in the schedule's unit: in a batch that grows that of the last size, as in Megatron-LM.
    unit = config.global_batch_size(world_size) if config.batch_grows and not in_samples else 1

    def length(iterations: int | None, samples: int | None) -> int | None:
        return samples if in_samples else iterations and iterations * unit

    whole = config.train_samples(world_size) if config.counts_samples else config.train_iters(world_size)
    decay = length(settings.lr_decay_iters, settings.lr_decay_samples) or whole
    warmup: float = length(settings.lr_warmup_iters, settings.lr_warmup_samples) or 0
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * decay  # need not be whole, as in Megatron-LM
    is_constant = settings.start_weight_decay is None or settings.end_weight_decay is None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=config.optimizer.lr or 0.0,  # the optimizer requires it
        min_lr=config.optimizer.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=weight_decay if is_constant else settings.start_weight_decay or 0.0,
        end_wd=weight_decay if is_constant else settings.end_weight_decay or 0.0,
        wd_incr_steps=whole,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=length(settings.lr_wsd_decay_iters, settings.lr_wsd_decay_samples),
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


_SECTIONS = ("model", "gpt", "ddp", "optimizer")


def _is_small(value: Any) -> bool:
    """Returns whether a value is a plausible number of ranks, or of bytes of a rank's random streams."""
    return type(value) is int and 0 < value < 1 << 20


_METADATA: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("iteration", "consumed_samples"), lambda value: isinstance(value, int) and value >= 0),
    "vocab_size": lambda value: isinstance(value, int),
    **dict.fromkeys(("config", "optimizer", "scheduler"), lambda value: isinstance(value, dict)),
    "model_tensors": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "rng_bytes": lambda value: value == 0 or _is_small(value),  # 0 in a converted run, which has no random streams
    "layout": lambda value: isinstance(value, dict) and _is_small(value.get("ranks")),
}
"""Entries of a run's metadata, each with a check of its value."""

MODEL_FIELDS = {  # what the model computes; a test holds this to all fields of the transformer
    "model": (*TRANSFORMER_FIELDS, "num_moe_experts", *OPTIONS_OF_FUNCTION),
    "gpt": (
        *("position_embedding_type", "untie_embeddings_and_output_weights"),
        *("lora_rank", "lora_alpha", "lora_targets"),
    ),
}


def check_is_run(metadata: Mapping[str, Any], folder: Path) -> None:
    """Refuses a checkpoint that :func:`save_checkpoint` did not write, or whose metadata it could not have written."""
    if missing := _METADATA.keys() - metadata.keys():
        raise CheckpointError(
            f"{folder}: not the checkpoint of a pretraining run, its metadata has no {', '.join(sorted(missing))}"
        )
    odd = [name for name, is_sound in _METADATA.items() if not is_sound(metadata[name])]
    if "config" not in odd:
        odd += [f"config.{name}" for name in _SECTIONS if not isinstance(metadata["config"].get(name), dict)]
    if odd:
        raise CheckpointError(
            f"{folder}: the metadata holds what no pretraining run writes, under {', '.join(odd)}; load another one"
        )


def check_same_model(metadata: Mapping[str, Any], state: TrainingState, config: PretrainConfig, folder: Path) -> None:
    """Raises CheckpointError, with all differences, if a checkpoint is of another model than `state`."""
    theirs, ours = metadata["config"], config.to_json()
    without = OPTIONS_OF_FUNCTION if ours["model"]["num_moe_experts"] is None else ()
    differing = [
        f"{name} {theirs[section].get(name)!r} there and {ours[section][name]!r} here"
        for section, names in MODEL_FIELDS.items()
        for name in names
        if name not in without and theirs[section].get(name) != ours[section][name]
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


def warn_of_another_order(theirs: Mapping[str, Any], state: TrainingState) -> None:
    """Warns if samples come in another order than in the checkpoint's run.

    A run may continue with other data, or for longer, on purpose; but samples then repeat.
    """
    ours = state.sample_order
    same = all(theirs.get(name) == ours.get(name) for name in ("order", "corpus", "seq_length"))
    names = [name for name in ours if name != "order" and theirs.get(name) != ours[name]]
    if theirs and not same and names:
        changes = ", ".join(f"{name} {theirs.get(name)} -> {ours[name]}" for name in names)
        warnings.warn(
            f"the order of samples differs from the checkpoint's ({changes}): training goes on at sample "
            f"{state.consumed_samples} of the new order, so that some samples repeat and others are skipped",
            stacklevel=3,
        )
