"""The settings that only wrappers with sharded parameters have."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..base.dtypes import Dtype, as_dtype
from ..base.errors import ConfigError, ParallelConfigError, check_choices, check_range
from ..base.megatron_names import takes_megatron_fields
from ..base.text import choices
from ..comm.message_formats import BLOCK
from .distributed_data_parallel_config import (
    SHARDING_STRATEGIES,
    DistributedDataParallelConfig,
    EngineKind,
    shards_parameters,
)

FSDP2 = "fsdp2"
STRATEGIES = (*SHARDING_STRATEGIES, FSDP2)
"""Names of all ways to hold a model: Megatron-LM's strategies, on flat buffers, and FSDP2."""


@dataclass(frozen=True)
class ShardCut:
    """Where the parameters of a unit may be cut between ranks."""

    kind: Literal["auto", "flat", "rows", "tensor", "block"]
    block: int = 1
    """Elements."""


Reshard = bool | int
"""False: parameters stay gathered. True: back to this rank's shard. A number: to shards over that many ranks."""


@takes_megatron_fields
@dataclass(kw_only=True)
class FullyShardedDataParallelConfig(DistributedDataParallelConfig):
    """Settings of :class:`FullyShardedDataParallel`, which FSDP2 has too.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    data_parallel_sharding_strategy: str = "optim_grads_params"
    """Parameters, gradients and optimizer state are sharded. Other values are refused."""

    # ---- when parameters are gathered

    reshard_after_forward: Reshard = True
    """Free a unit's gathered parameters after its forward and gather them again for its backward.

    FSDP2 keeps the last unit and the root gathered in between, because backward begins with them; on flat buffers
    units stay gathered until another needs the memory. A number, a divisor of the ranks that share a parameter, keeps
    each parameter whole among that many neighbouring ranks instead, so that backward gathers from these alone.
    """

    reshard_overrides: tuple[str, ...] = ()
    """Other values for some units, as ``"decoder.layers.0=False"``: a shell pattern of module names, then the value.

    The last that matches counts. Under FSDP2 the last unit and the root are overridden too when a pattern names them
    (the root is ``""``).
    """

    forward_prefetch: int = 1
    """How many units ahead parameters are gathered during forward. 0 gathers each when it is reached."""

    backward_prefetch: int = 1
    """How many units ahead parameters are gathered during backward. 0 gathers each when it is reached."""

    gather_skipped_units: bool = False
    """Ranks may skip units that others run: those that skip one take part in its gathers and its reduction.

    Every forward then gathers all units, also those that every rank skips. The model has to run them in the order in
    which it holds them, each at most once, and none inside another.
    """

    keep_gathered_between_micro_batches: Literal["none", "ends", "all"] = "ends"
    """Units that stay gathered from one micro-batch of a step to the next, while gradients accumulate whole.

    ``ends``: what a micro-batch begins and ends with, that is the root, the first and the last unit, and units that
    are gathered for their forward alone, as an embedding. ``all``: every unit, after its forward too, so that each
    parameter is gathered once a step, for memory of the whole model's parameters. ``none``: nothing. With
    `reduce_every_micro_batch`, which is there to save memory, ``ends`` is ``none``.
    """

    # ---- how a unit is cut

    shard_cut: str = "auto"
    """Where parameters may be cut between ranks, on flat buffers. No number changes.

    ``flat``: anywhere, with the least padding. ``rows``: a shard is a whole number of rows of each parameter.
    ``tensor``: each parameter whole on one rank, balanced by size, for an optimizer that needs whole matrices.
    ``block:N``: at multiples of N elements of each parameter, for state that is quantised in blocks. ``auto``:
    ``rows`` where that costs less than 1 % of padding, else ``flat``. FSDP2 always cuts by rows. Other cuts for some
    units follow, separated by commas, each with a pattern of module names: ``"auto,decoder.layers.*=tensor"``. The
    last that matches counts.
    """

    # ---- precision

    param_dtype: Dtype | None = None
    """Dtype of computation and of all-gathers. None: the dtype of the model's config (``bf16``, ``fp16``) where
    all parameters arrive in fp32. Else each parameter keeps its own, as fp32 norms in a bf16 model do."""

    reduce_dtype: Dtype | None = None
    """Dtype of gradient reduction. None: fp32 with `grad_reduce_in_fp32`, else `param_dtype`."""

    param_comm_dtype: Literal["int8", "fp8"] | None = None
    """Gather parameters in codes of 8 bits, in blocks of 256 elements of a tensor, and compute with their values.

    A quarter of the bytes of fp32. Shards, which the optimizer updates, stay exact, so that errors of steps do not add
    up. For matrices whose rows are whole blocks; the rest travels as it is. ``fp8`` is e4m3. Gathered values are the
    same on any number of ranks: `shardstack.comm.message_formats` has a bound for their error.
    """

    # ---- memory

    cpu_offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in the host's memory."""

    nccl_ub: bool = False
    """Allocate the memory of collectives from the backend, which registers it with NCCL (user buffers): they then
    copy nothing inside and take fewer of the GPU's processors. By Megatron-LM's name."""

    # ---- construction and use

    sync_module_states: bool = True
    """Broadcast parameters and buffers from data-parallel rank 0 before sharding.

    FSDP2 cuts each rank's own copy, so that replicas that differed would become a mixture; this makes that
    impossible, at the cost of one broadcast of the model at construction.
    """

    forward_methods: tuple[str, ...] = ()
    """Methods other than ``forward`` that are called on the model or its units and need gathered parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, other in (
            ("data_parallel_sharding_strategy", "optim_grads_params"),
            ("use_distributed_optimizer", False),
        ):
            if getattr(self, field) != other:
                raise ParallelConfigError(
                    f"{field} is {getattr(self, field)!r} in a {type(self).__name__}, which shards parameters, "
                    "gradients and optimizer state; drop it, or use a DistributedDataParallelConfig"
                )
        names, takes = ("forward_prefetch", "backward_prefetch"), "0 (off) or a positive number"
        check_range(self, *names, least=0, takes=takes, error=ParallelConfigError)
        self.reshard_of("", True)
        self.cut_of("")
        for field in ("param_dtype", "reduce_dtype"):
            as_dtype(getattr(self, field), field)
        if self.grad_reduce_in_fp32 and as_dtype(self.reduce_dtype) not in (None, as_dtype("fp32")):
            raise ParallelConfigError(
                f"grad_reduce_in_fp32 is set and reduce_dtype is {self.reduce_dtype}; drop one of the two"
            )
        check_choices(self, error=ParallelConfigError, keep_gathered_between_micro_batches=("none", "ends", "all"))
        check_choices(self, True, error=ParallelConfigError, param_comm_dtype=("int8", "fp8"))
        if self.keep_gathered_between_micro_batches == "all" and (
            self.reshard_overrides or not isinstance(self.reshard_after_forward, bool)
        ):
            raise ParallelConfigError(
                "keep_gathered_between_micro_batches='all' keeps every unit gathered for a whole step, and "
                f"reshard_after_forward is {self.reshard_after_forward} with reshard_overrides "
                f"{list(self.reshard_overrides)}; drop one of the two"
            )

    def reshard_of(self, name: str, default: Reshard) -> Reshard:
        """Returns the value of `reshard_overrides` for the module `name`, else `default`.

        Raises:
            ParallelConfigError: an entry that is not of the form ``"PATTERN=VALUE"``.
        """
        for entry in self.reshard_overrides:
            pattern, separator, text = entry.rpartition("=")
            value = int(text) if text.isdecimal() else {"true": True, "false": False}.get(text.lower())
            if value is None or not separator:
                raise ParallelConfigError(
                    f"reshard_overrides holds {entry!r}; an entry is a pattern of module names, '=', and True, False "
                    "or a number, as decoder.layers.0=False"
                )
            if fnmatchcase(name, pattern):
                default = value
        return default

    def cut_of(self, name: str) -> ShardCut:
        """Returns the cut of the module `name`: the last entry of `shard_cut` whose pattern matches.

        Raises:
            ParallelConfigError: a cut that there is not.
        """
        found = ShardCut("auto")
        for entry in self.shard_cut.split(","):
            pattern, _, kind = entry.strip().rpartition("=")
            cut = parse_cut(kind)
            if cut is None:
                raise ParallelConfigError(
                    f"shard_cut holds {entry!r}; a cut is {_CUTS}; for some units alone it follows a pattern of "
                    "module names, as decoder.layers.*=tensor"
                )
            if self.sends_blocks and cut.kind in ("flat", "block") and cut.block % BLOCK:
                raise ParallelConfigError(
                    f"shard_cut {entry!r} cuts inside of the blocks of {BLOCK} elements that param_comm_dtype and "
                    f"grad_comm_dtype send; set auto, rows, tensor, or block:{BLOCK}"
                )
            if not pattern or fnmatchcase(name, pattern):
                found = cut
        return found


@takes_megatron_fields
@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardedDataParallelConfig):
    """Settings of :class:`TorchFullyShardedDataParallel`. Giving one to `wrap_model` chooses that wrapper.

    Dtypes are torch's, or their names, as ``"bf16"`` or ``"float32"``.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    collectives: Literal["auto", "torch"] = "auto"
    """``auto``: as the backend does them best. Under gloo ranks exchange pieces directly. ``torch``: FSDP2's own."""

    @property
    def engine(self) -> EngineKind:
        return EngineKind.FSDP2

    @property
    def strategy(self) -> str:
        return FSDP2


def config_class(strategy: str, setting: str = "sharding") -> type[DistributedDataParallelConfig]:
    """Returns the class of the settings of a strategy, which chooses the wrapper too (`wrap_model`).

    Args:
        setting: what the caller named the strategy by, for the message.

    Raises:
        ConfigError: none of `STRATEGIES`.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"{setting} is {strategy!r}; {choices(str(strategy), STRATEGIES)}")
    if strategy == FSDP2:
        return TorchFullyShardedDataParallelConfig
    return FullyShardedDataParallelConfig if shards_parameters(strategy) else DistributedDataParallelConfig


def config_of(strategy: str, **fields: Any) -> DistributedDataParallelConfig:
    """Returns the settings of a strategy, and of its wrapper.

    Args:
        fields: settings of the class that `config_class` returns.

    Raises:
        ConfigError: none of `STRATEGIES`, or a setting that this class refuses.
    """
    kind = config_class(strategy)
    return kind(**fields) if strategy == FSDP2 else kind(data_parallel_sharding_strategy=strategy, **fields)


_CUTS = "auto, flat, rows, tensor, or block:N with N elements, as block:32"


def parse_cut(value: str) -> ShardCut | None:
    """Returns the cut that a setting names. None if there is none of this name."""
    kind, _, block = value.partition(":")
    if value in ("auto", "flat", "rows", "tensor"):
        return ShardCut(value)  # type: ignore[arg-type]
    return ShardCut("block", int(block)) if kind == "block" and block.isdecimal() and int(block) > 0 else None
