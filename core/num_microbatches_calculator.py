"""Computes the number of micro-batches of a step: Megatron-LM's global calculator, for a batch of constant size."""

from __future__ import annotations

from .base.errors import ConfigError, ParallelConfigError, check_positive
from .base.megatron_names import absent_names, checks_arguments
from .base.text import nearest_multiples

_num_microbatches: int | None = None
"""Micro-batches of a step of this process. None until `init_num_microbatches_calculator` sets it.
`unset_num_microbatches_calculator` clears it."""


def num_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Returns the number of micro-batches that each rank runs in a step.

    Raises:
        ParallelConfigError: the global batch does not divide; the message names sizes that do.
    """
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
    }
    check_positive(sizes, ParallelConfigError)
    unit = micro_batch_size * data_parallel_size
    if global_batch_size % unit:
        nearest = nearest_multiples(global_batch_size, unit)
        raise ParallelConfigError(
            f"global_batch_size {global_batch_size} is no multiple of micro_batch_size {micro_batch_size} x "
            f"data-parallel size {data_parallel_size} = {unit}; the nearest that is: {nearest}"
        )
    return global_batch_size // unit


@checks_arguments
def init_num_microbatches_calculator(
    rank: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Sets the sizes of this process's training.

    Args:
        rank: Megatron-LM's, for its log; not read.
        global_batch_size: samples of a step, over all ranks.
        micro_batch_size: samples of a micro-batch of one rank.
        data_parallel_size: ranks that see different samples.
        decrease_batch_size_if_needed: round the global batch down to whole micro-batches of all ranks.
        step_batch_size_schedule: Megatron-LM's; only None is allowed.
        seq_length: used only with a schedule.

    Raises:
        ConfigError: sizes are set already.
        ParallelConfigError: a size is below one, the global batch does not divide, or a schedule is given.
    """
    global _num_microbatches
    if _num_microbatches is not None:
        raise ConfigError("the number of micro-batches is set already; call unset_num_microbatches_calculator() first")
    if decrease_batch_size_if_needed and micro_batch_size * data_parallel_size > 0:
        global_batch_size -= global_batch_size % (micro_batch_size * data_parallel_size)
    _num_microbatches = num_microbatches(global_batch_size, micro_batch_size, data_parallel_size)


def unset_num_microbatches_calculator() -> None:
    """Clears the sizes."""
    global _num_microbatches
    _num_microbatches = None


def get_num_microbatches() -> int:
    """Returns the number of micro-batches of a step."""
    if _num_microbatches is None:
        raise ConfigError("the number of micro-batches is not set; call init_num_microbatches_calculator() first")
    return _num_microbatches


__getattr__ = absent_names(__name__)
