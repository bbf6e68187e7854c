"""The settings of wrappers that shard parameters, beyond those of every wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ParallelConfigError
from ..foreign_arguments import ForeignFields, takes_foreign_fields
from .distributed_data_parallel_config import DistributedDataParallelConfig

Reshard = bool | int
"""False: parameters stay gathered. True: back to this rank's shard. A number: to shards over that many ranks."""


@takes_foreign_fields(ForeignFields())
@dataclass(kw_only=True)
class FullyShardedDataParallelConfig(DistributedDataParallelConfig):
    """Settings of :class:`FullyShardedDataParallel`, and those that it has in common with FSDP2.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    data_parallel_sharding_strategy: str = "optim_grads_params"
    """Parameters, gradients and optimizer state are sharded; there is no other value."""

    # ---- when parameters are gathered

    reshard_after_forward: Reshard = True
    """Free a unit's gathered parameters after its forward and gather them again for its backward.

    FSDP2 keeps the last unit and the root gathered in between, because backward begins with them; on flat buffers
    units stay gathered until another needs the memory. A number, a divisor of the ranks that share a parameter, keeps
    each parameter whole among that many neighbouring ranks instead, so that backward gathers from these alone (FSDP2).
    """

    reshard_overrides: tuple[str, ...] = ()
    """Other values for some units, as ``"decoder.layers.0=False"``: a shell pattern of module names, then the value.

    The last that matches counts. Under FSDP2 the last unit and the root are overridden too when a pattern names them
    (the root is ``""``).
    """

    forward_prefetch: int = 1
    """How many units ahead parameters are gathered during forward; 0 gathers each when it is reached."""

    backward_prefetch: int = 1
    """The same for backward."""

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
        for field in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, field) < 0:
                raise ParallelConfigError(f"{field} is {getattr(self, field)}; it takes 0 (off) or a positive number")
        parse_overrides(self.reshard_overrides)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Reshard]]:
    """Pairs of a shell pattern for module names and a value, from ``"PATTERN=VALUE"``.

    Raises:
        ParallelConfigError: an entry that is not of this form.
    """
    return [_parse_override(entry) for entry in overrides]


def _parse_override(entry: str) -> tuple[str, Reshard]:
    pattern, separator, value = entry.rpartition("=")
    if separator and value.lower() in ("true", "false"):
        return pattern, value.lower() == "true"
    if separator and value.isdecimal():
        return pattern, int(value)
    raise ParallelConfigError(
        f"reshard_overrides holds {entry!r}; an entry is a pattern of module names, '=', and True, False or a number, "
        "as decoder.layers.0=False"
    )
