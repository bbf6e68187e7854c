"""The settings of a data-parallel wrapper, apart from the model's own config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, get_args

from ..base.errors import GradSyncError, ParallelConfigError, check_choices, check_range, warn_once
from ..base.megatron_names import takes_megatron_fields

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Replicated, ZeRO-1, ZeRO-2 and ZeRO-3 (Rajbhandari et al., 2020), with Megatron's names."""

ActivationCheckpointing = Literal["none", "full", "selective"]
"""What backward computes again of a unit: nothing, all but its inputs, or all but its inputs and long operations."""


class EngineKind(Enum):
    """The engine that holds the parameters and gradients of a wrapped model."""

    FLAT_BUFFERS = auto()
    """Whole parameters on every rank, gradients in flat buffers: ``no_shard``, ``optim`` and ``optim_grads``."""
    FULLY_SHARDED = auto()
    """Parameters in flat buffers that ranks share, gathered a unit at a time: ``optim_grads_params``."""
    FSDP2 = auto()
    """PyTorch's ``fully_shard``."""


def shards_parameters(strategy: str) -> bool:
    """Returns whether a sharding strategy cuts parameters too, so that they are gathered for their use."""
    return strategy == "optim_grads_params"


@takes_megatron_fields
@dataclass(kw_only=True)
class DistributedDataParallelConfig:
    """Settings of a data-parallel wrapper. Field names are Megatron-LM's.

    Megatron-LM's other fields are refused by name if they would change a number and do not have their defaults; the
    rest is ignored with a warning. A wrapper that does not support a field raises, or warns once if ignoring it
    changes no number.

    Raises:
        ParallelConfigError: settings contradict each other; the message names both.
        GradSyncError: patterns for local accumulation in fp32 are given, and all gradients accumulate in fp32.
    """

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients of parameters in lower precision in fp32."""

    overlap_grad_reduce: bool | None = None
    """Reduce a bucket of gradients while the backward of earlier layers still runs. None: where the model is on a
    GPU, and not on CPU, where computation would have to share its cores."""

    overlap_param_gather: bool | None = None
    """Gather parameters while the forward of earlier layers still runs. None: where the model is on a GPU.
    Ignored if they are replicated."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state. By itself it means the strategy ``optim``."""

    num_distributed_optimizer_instances: int = 1
    """Shard within ``dp / instances`` ranks and replicate across instances (hybrid sharding) when above one."""

    check_for_nan_in_grad: bool = False
    """Raise, naming rank, step and parameter, when a gradient is not finite."""

    bucket_size: int | None = None
    """Elements, not bytes, at which a bucket is full. One collective reduces one bucket.

    None means ``max(40_000_000, 1_000_000 * dp)`` if buckets are reduced during backward (``overlap_grad_reduce``, or
    the strategy ``optim_grads``) or gathered during forward (``overlap_param_gather``), and else one bucket for each
    dtype.
    """

    grad_comm_dtype: Literal["bf16", "int8"] | None = None
    """Send gradients in fewer bits, and add them in fp32: ``bf16``, or ``int8`` in blocks of 256 elements of a tensor.

    ``int8`` is for matrices whose rows are whole blocks; the rest travels as it is. None: in the dtype of their
    reduction, in which the backend adds. Over replicas of hybrid sharding sums travel so in any case. Every rank's
    addend is rounded, this rank's too: `shardstack.comm.message_formats` says by how much.
    """

    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Parameters, by patterns of `fnmatch` or ``all``, whose gradients accumulate over micro-batches in fp32, while
    all are reduced in their low precision: costs fp32 memory for these parameters, and no traffic."""

    reduce_every_micro_batch: bool = False
    """Reduce each micro-batch, inside ``no_sync`` too, so that whole gradients are never accumulated.

    For ``optim_grads`` and ``optim_grads_params``. Needs least memory, and one reduction per micro-batch. Sums of
    gradients of more than two ranks or micro-batches are then rounded in another order.
    """

    reproducible_across_ranks: bool = False
    """Compute the same bits on any number of data-parallel ranks, a power of two that divides the number of
    micro-batches of a global batch: gradients are added up in one tree over these.

    A rank keeps up to log2 of its micro-batches whole gradients more; with ``reduce_every_micro_batch`` shards. Size
    and number of micro-batches stay, and sizes of tensor and context parallelism (docs/reproducible.md).
    """

    broadcast_buffers: bool | None = None
    """Send rank 0's persistent buffers to all ranks whenever gradients are reduced, so that replicas evaluate and are
    saved with the same. None: if a module has running statistics, as BatchNorm has."""

    data_parallel_sharding_strategy: str = "no_shard"
    """What is sharded: ``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""

    replicated: tuple[str, ...] = ()
    """Shell patterns of names, as ``"vision.*"``. Parameters that match stay whole on every rank: they are never
    gathered, every rank updates them, and their gradients are reduced once a step. For parts that are small, or that
    some ranks skip."""

    ignored: tuple[str, ...] = ()
    """Shell patterns of names. Parameters that match are left alone: not sharded, cast, broadcast, reduced or zeroed,
    nor updated by an optimizer of `shardstack.optimizer`. Their gradients are the caller's. Checkpoints have them."""

    # ---- what is done to each unit, a layer of the model

    activation_checkpointing: ActivationCheckpointing = "none"
    """Compute activations again in backward: all of a unit from its inputs (``full``), or all but the results of
    matrix products, every second one of linear layers, and of attention (``selective``)."""

    offload_activations: bool = False
    """Keep what a unit saves for backward in the host's memory, and bring it back while backward is in the unit after
    it. The last unit's stay: backward begins with them. With activation_checkpointing a unit saves its inputs."""

    compile_units: bool | None = None
    """Compile each unit's forward with `torch.compile`. None: the pretraining program compiles on GPUs, where torch
    finds Triton, and else nothing is compiled."""

    def __post_init__(self) -> None:
        check_choices(self, error=ParallelConfigError, data_parallel_sharding_strategy=SHARDING_STRATEGIES)
        check_choices(self, error=ParallelConfigError, activation_checkpointing=get_args(ActivationCheckpointing))
        check_choices(self, True, error=ParallelConfigError, grad_comm_dtype=("bf16", "int8"))
        divisor = "a positive number that divides the data-parallel size"
        check_range(self, "num_distributed_optimizer_instances", least=1, takes=divisor, error=ParallelConfigError)
        check_range(self, "bucket_size", least=1, error=ParallelConfigError)
        self._reject_contradictions()

    def _reject_contradictions(self) -> None:
        strategy = self.sharding_strategy
        if self.overlap_param_gather and strategy == "no_shard":
            warn_once(
                "overlap_param_gather is ignored without use_distributed_optimizer, or a "
                "data_parallel_sharding_strategy that shards: replicated parameters are never gathered. "
                "No number changes",
                stacklevel=6,
            )
        if self.grad_reduce_in_fp32 and self.param_name_patterns_for_fp32_local_accumulation:
            raise GradSyncError(
                "param_name_patterns_for_fp32_local_accumulation is "
                f"{self.param_name_patterns_for_fp32_local_accumulation!r} and grad_reduce_in_fp32 is set, with which "
                "all gradients accumulate in fp32; drop one"
            )
        if self.num_distributed_optimizer_instances > 1 and strategy == "no_shard":
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances} without "
                "use_distributed_optimizer (or a data_parallel_sharding_strategy that shards); drop one, or shard"
            )
        if self.reduce_every_micro_batch and strategy not in ("optim_grads", "optim_grads_params"):
            raise ParallelConfigError(
                f"reduce_every_micro_batch is set with the sharding strategy {strategy!r}, which reduces the sum of "
                "all micro-batches; drop it, or set data_parallel_sharding_strategy='optim_grads' or beyond"
            )

    @property
    def sharding_strategy(self) -> str:
        """The strategy, after ``use_distributed_optimizer`` is applied, which by itself means ``optim``."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy

    @property
    def shards_updates(self) -> bool:
        """Whether ranks share the update of a parameter."""
        return self.sharding_strategy != "no_shard"

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are cut too, so that they are gathered for their use."""
        return shards_parameters(self.sharding_strategy)

    @property
    def sends_blocks(self) -> bool:
        """Whether parameters or gradients travel in blocks of 8-bit codes, so that cuts between ranks spare these."""
        return self.grad_comm_dtype == "int8" or bool(getattr(self, "param_comm_dtype", None))

    @property
    def transforms_units(self) -> bool:
        """Whether units are recomputed, compiled or offloaded."""
        return self.activation_checkpointing != "none" or bool(self.compile_units) or self.offload_activations

    @property
    def strategy(self) -> str:
        """Which of `STRATEGIES` the settings mean: FSDP2 by their type, the others by the sharding strategy."""
        return self.sharding_strategy

    @property
    def engine(self) -> EngineKind:
        """What holds the model: FSDP2 by the type of the settings, the others by the sharding strategy."""
        return EngineKind.FULLY_SHARDED if self.shards_parameters else EngineKind.FLAT_BUFFERS
