"""All settings of a pretraining run: one dataclass with a section per concern, built once and never changed.

A section checks its own settings when it is built; :func:`validate` checks settings of several sections. Field names
are Megatron-LM's flags with underscores; `arguments` makes the flags from them.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from ...base.dtypes import DTYPES
from ...base.errors import ConfigError, ParallelConfigError, ShardstackError, raise_together
from ...base.files import brief
from ...base.micro_batch_tree import rank_counts
from ...base.text import nearest_multiples
from ...distributed import DistributedDataParallelConfig
from ...distributed.fully_sharded_data_parallel_config import FSDP2, config_class
from ...num_microbatches_calculator import num_microbatches
from ...optimizer import OptimizerConfig
from ...tensor_parallel.groups import pad_vocab_size
from ...transformer.attention_backend import takes_pieces
from ...transformer.pipeline_stages import check_rounds
from ...transformer.transformer_config import TransformerConfig
from .sections import CheckpointConfig, DataConfig, GPTConfig, RunConfig, SchedulerConfig

_STRATEGY = "data_parallel_sharding_strategy"
_DEGREES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """All settings of a pretraining run. Packages below `shardstack.training` take only their section."""

    model: TransformerConfig
    """The transformer and the parallel degrees."""
    gpt: GPTConfig = field(default_factory=GPTConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    """Settings of the data-parallel wrapper, which their type and sharding strategy choose."""
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    data: DataConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig

    @property
    def use_torch_fsdp2(self) -> bool:
        """Whether the model is wrapped in PyTorch's FSDP2."""
        return self.ddp.strategy == FSDP2

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence of the model, in tokens."""
        return self.gpt.max_position_embeddings or self.data.seq_length

    def data_parallel_size(self, world_size: int) -> int:
        """Returns the number of ranks that read different samples."""
        return world_size // _model_parallel_size(self.model)

    @property
    def batch_grows(self) -> bool:
        """Whether the global batch grows during the run."""
        return (self.data.rampup_batch_size or self.data.step_batch_size_schedule) is not None

    @property
    def counts_samples(self) -> bool:
        """Whether schedules count samples, not iterations."""
        return self.batch_grows or self.run.train_samples is not None

    def batch_schedule(self, world_size: int) -> tuple[tuple[int, int], ...]:
        """Returns the sample from which on each global batch size holds, and that size."""
        default = self.data.micro_batch_size * self.data_parallel_size(world_size)
        return self.data.batch_schedule(self.data.global_batch_size or default)

    def global_batch_size(self, world_size: int, consumed_samples: int | None = None) -> int:
        """Returns the samples of a step over all ranks, after `consumed_samples`. None: of the last step."""
        sizes = self.batch_schedule(world_size)
        return max((s for s in sizes if consumed_samples is None or s[0] <= consumed_samples), default=sizes[0])[1]

    def num_microbatches(self, world_size: int, consumed_samples: int | None = None) -> int:
        """Returns the number of micro-batches of each rank in a step, as `global_batch_size`."""
        size = self.global_batch_size(world_size, consumed_samples)
        return num_microbatches(size, self.data.micro_batch_size, self.data_parallel_size(world_size))

    def train_samples(self, world_size: int) -> int:
        """Returns the samples of the whole run, at most."""
        return self.run.train_samples or (self.run.train_iters or 0) * self.global_batch_size(world_size)

    def train_iters(self, world_size: int) -> int:
        """Returns the iterations of the whole run."""
        return self._length(world_size)[0]

    def data_samples(self, world_size: int) -> int:
        """Returns the samples that the dataset needs: with a batch that grows a run may read more than
        `train_samples`."""
        return max(self.train_samples(world_size), self._length(world_size)[1])

    def _length(self, world_size: int) -> tuple[int, int]:
        """Returns the iterations of the run and their samples, at most, by Megatron-LM's ``update_train_iters``.

        Of 0.16 for a ramp: a step begins up to, and with, the ramp's last sample and the run's. Of 0.19 and newer for
        a schedule in steps: the last step reaches `train_samples`.
        """
        iterations, consumed, total = 0, 0, self.train_samples(world_size)
        if self.run.train_iters is not None:
            return self.run.train_iters, total
        ramp, sizes = self.data.rampup_batch_size, self.batch_schedule(world_size)
        grows_until = min(ramp[2], total) + 1 if ramp else total if self.batch_grows else 0
        for (_, size), (end, _) in pairwise([*sizes, (grows_until, 0)]):
            steps = max(0, -((consumed - min(end, grows_until)) // size))
            iterations, consumed = iterations + steps, consumed + steps * size
        steps, size = max(0, total - consumed) // sizes[-1][1], sizes[-1][1]
        return iterations + steps, consumed + steps * size

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values, for the log and for checkpoints. :meth:`from_json` reverses it."""
        values: dict[str, Any] = {"use_torch_fsdp2": self.use_torch_fsdp2}
        for name in (entry.name for entry in fields(self)):
            section = getattr(self, name)
            own = (entry.name for entry in fields(section) if not entry.metadata.get("is_code"))
            values[name] = {field_name: _json_value(getattr(section, field_name)) for field_name in own}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PretrainConfig:
        """Builds settings from the result of :meth:`to_json`.

        Raises:
            ConfigError: a section or field is missing or unknown: it is from another version of this library.
        """
        try:
            types = section_types(FSDP2 if values["use_torch_fsdp2"] else values["ddp"][_STRATEGY])
            sections = {}
            for name, kind in types.items():
                hints = get_type_hints(kind)
                sections[name] = kind(**{key: from_json_value(hints[key], v) for key, v in values[name].items()})
            return cls(**sections)
        except ShardstackError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ConfigError(
                f"these are no settings of this version of the library ({type(error).__name__}: {brief(str(error))})"
            ) from error


def section_types(strategy: str) -> dict[str, type]:
    """Returns the dataclass of each section, in the order of `PretrainConfig`, of a run with a wrapper of
    `STRATEGIES`."""
    return get_type_hints(PretrainConfig) | {"ddp": config_class(strategy, _STRATEGY)}


def validate(config: PretrainConfig, world_size: int) -> None:
    """Checks settings that depend on several sections or on the number of ranks.

    Raises:
        ConfigError: all errors, a line each; a `ParallelConfigError` if all are about sizes that do not divide.
    """
    raise_together([*_size_violations(config, world_size), *_setting_violations(config)])


def _size_violations(config: PretrainConfig, world_size: int) -> Iterator[ConfigError]:
    model, data = config.model, config.data
    model_parallel = _model_parallel_size(model)
    if world_size % model_parallel:
        product = " x ".join(f"{name} {getattr(model, name)}" for name in _DEGREES)
        yield ParallelConfigError(
            f"{world_size} ranks do not divide into {product} = {model_parallel}; start a multiple of that"
        )
    else:
        yield from _replica_violations(config, world_size)
    yield from division_violations({**vars(model), **vars(data), **vars(config.gpt)})


def _replica_violations(config: PretrainConfig, world_size: int) -> Iterator[ConfigError]:
    try:
        for start, _ in config.batch_schedule(world_size):
            check_rounds(config.model, config.num_microbatches(world_size, start))
        if config.train_iters(world_size) < 1:
            yield ConfigError(
                f"train_samples {config.run.train_samples} is below one global batch of "
                f"{config.global_batch_size(world_size, 0)}; raise it"
            )
    except ParallelConfigError as error:
        yield error if not config.ddp.reproducible_across_ranks else _ranks_without_a_tree(config, world_size)
    else:
        if config.ddp.reproducible_across_ranks and config.data.global_batch_size is not None:
            batches = config.data.global_batch_size // config.data.micro_batch_size
            if config.data_parallel_size(world_size) not in rank_counts(batches):
                yield _ranks_without_a_tree(config, world_size)
    instances, replicas = config.ddp.num_distributed_optimizer_instances, config.data_parallel_size(world_size)
    if replicas % instances:  # context-parallel ranks do not count: an instance has whole groups of them
        yield ParallelConfigError(
            f"num_distributed_optimizer_instances {instances} does not divide the {replicas} data-parallel ranks"
        )


def _ranks_without_a_tree(config: PretrainConfig, world_size: int) -> ParallelConfigError:
    size, micro = config.global_batch_size(world_size), config.data.micro_batch_size
    counts = rank_counts(size // micro) if size % micro == 0 else []
    remedy = f"use {', '.join(map(str, counts))} of them" if counts else "make the first a multiple of the second"
    return ParallelConfigError(
        f"reproducible_across_ranks adds up global_batch_size {size} by micro_batch_size {micro} in one tree, which "
        f"{config.data_parallel_size(world_size)} data-parallel ranks cannot share; {remedy}"
    )


def division_violations(settings: Mapping[str, Any]) -> Iterator[ParallelConfigError]:
    """Yields errors for sizes outside of the layers that a model's ranks do not divide: sequences, the vocabulary.

    Args:
        settings: the fields of the model's, the data's and GPT's sections, by name.
    """
    tp, cp, multiple = (settings[name] for name in (*_DEGREES[:2], "make_vocab_size_divisible_by"))
    seq_length, vocab_size = settings["seq_length"], settings["vocab_size"]
    if min(tp, cp, multiple, seq_length) < 1:
        return  # the sections refuse them
    cuts = sequence_multiple(tp, cp, settings["sequence_parallel"])
    if seq_length % cuts:
        yield ParallelConfigError(
            f"seq_length {seq_length} is split into {cuts} parts by context_parallel_size {cp} and sequence_parallel "
            f"{settings['sequence_parallel']}; take {nearest_multiples(seq_length, cuts)}"
        )
    padded_size = multiple if vocab_size is None else pad_vocab_size(vocab_size, multiple)
    if padded_size % tp:
        what = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
        yield ParallelConfigError(
            f"make_vocab_size_divisible_by {multiple} pads {what} to a size that tensor_model_parallel_size {tp} does "
            f"not divide; take {nearest_multiples(multiple, tp)}"
        )


def _setting_violations(config: PretrainConfig) -> Iterator[ConfigError]:
    try:
        config.model.check_sizes_given()
    except ConfigError as error:
        yield error
    limit = config.gpt.max_position_embeddings
    if limit is not None and config.data.seq_length > limit:
        yield ConfigError(f"seq_length {config.data.seq_length} exceeds max_position_embeddings {limit}; raise it")
    for name in ("fp16", "bf16"):
        model, optimizer = getattr(config.model, name), getattr(config.optimizer, name)
        if model != optimizer:
            yield ConfigError(f"{name} is {model} for the model and {optimizer} for the optimizer; set them equal")
    if config.optimizer.loss_scale is not None and not config.model.fp16:
        yield ConfigError(f"loss_scale {config.optimizer.loss_scale} is given without fp16, where nothing reads it")
    if config.model.fp16 and config.optimizer.loss_scale is None and config.ddp.check_for_nan_in_grad:
        yield ConfigError(
            "check_for_nan_in_grad ends a run at the first overflow, and under fp16 with a dynamic loss scale "
            "overflows are normal; drop it, or set a constant loss_scale"
        )
    backend = config.model.attention_backend
    if config.data.reset_attention_mask and not takes_pieces(backend):
        yield ConfigError(
            f"attention_backend is {backend!r} and reset_attention_mask is set: only 'auto' and 'flash' attend within "
            "packed documents; write one of these, or drop reset_attention_mask"
        )
    if config.ddp.reproducible_across_ranks:
        if config.data.global_batch_size is None:
            yield ConfigError(
                "reproducible_across_ranks is set and global_batch_size is not, which is then one micro-batch a rank; "
                "set global_batch_size"
            )
        if config.batch_grows:
            yield ConfigError("reproducible_across_ranks needs batches of one size, and this one grows; drop one")
        if config.run.data_parallel_random_init:
            yield ConfigError(
                "reproducible_across_ranks seeds dropout by micro-batch and data_parallel_random_init by rank; drop "
                "the latter"
            )
    if config.model.pipeline_schedule == "ZBVZeroBubble" and not config.gpt.untie_embeddings_and_output_weights:
        yield ConfigError(
            "pipeline_parallel_schedule 'ZBVZeroBubble' puts the first and the last stage on one rank, where they "
            "cannot share the embedding; set untie_embeddings_and_output_weights, or take another schedule"
        )
    unit, other = ("iters", "samples") if config.run.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(config.scheduler, f"{name}_{other}"):
            yield ConfigError(f"{name}_{other} is set in a run with train_{unit}; write {name}_{unit} instead")
    if config.optimizer.lr is None:
        yield ConfigError("lr is not set; give the peak learning rate")


def sequence_multiple(tensor_model_parallel_size: int, context_parallel_size: int, sequence_parallel: bool) -> int:
    """Returns the number that the length of a sequence has to be a multiple of.

    A sequence is split into two chunks per context-parallel rank, and a rank's part once more by sequence parallelism.
    """
    chunks = 1 if context_parallel_size == 1 else 2 * context_parallel_size
    parts = context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1)
    return math.lcm(chunks, parts)


def _model_parallel_size(model: TransformerConfig) -> int:
    return math.prod(getattr(model, name) for name in _DEGREES)


def _json_value(value: Any) -> Any:
    if isinstance(value, (Path, torch.dtype)):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def from_json_value(hint: Any, value: Any) -> Any:
    """Returns a value of JSON, YAML or TOML as a setting of a type. Takes one value for a list of one, rounds nothing.

    Raises:
        ValueError: it is of another type. The message says which it takes.
    """
    origin, kinds, text = get_origin(hint), get_args(hint), value if isinstance(value, str) else ""
    with suppress(ValueError, OverflowError):
        if origin in (tuple, list):
            return origin(
                from_json_value(kinds[0], entry) for entry in (value if isinstance(value, list) else [value])
            )
        if hint is torch.dtype and (name := text.removeprefix("torch.")) in DTYPES:
            return DTYPES[name]
        if hint is Path and text:
            return Path(text)
        if hint is float:  # YAML's 1e-3 is a text
            if (text or type(value) in (int, float)) and fits_fp32(float(value)):
                return float(value)
        elif type(value) is hint or (origin is Literal and value in kinds):
            return value
    for kind in kinds if origin in (Union, UnionType) else ():
        with suppress(ValueError):
            return from_json_value(kind, value)
    raise ValueError(f"it takes {type_text(hint).replace('float', 'a number that fp32 holds')}")


def fits_fp32(value: float) -> bool:
    """Returns whether fp32 takes a number for neither 0 nor infinity, unless it is 0."""
    return value == 0 or 0 < abs(ctypes.c_float(value).value) < math.inf


def type_text(hint: Any) -> str:
    """Returns how messages and help write a setting's type: ``int``, or its choices. None is not among them."""
    kinds = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(type_text(kind) for kind in kinds if kind is not NoneType and get_origin(kind) != Callable)
    if get_origin(hint) is Literal:
        return " | ".join(map(str, kinds))
    return re.sub(r"(\w+\.)+(?=\w)", "", str(hint)) if kinds else hint.__name__
