"""Computes the number of micro-batches of a step: Megatron-LM's global calculator, for a batch of constant size, and
the sizes of a batch that grows."""

from __future__ import annotations

from collections.abc import Sequence

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


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_schedule(
    global_batch_size: int | None,
    rampup_batch_size: Sequence[int] | None,
    step_schedule: Sequence[str] | None,
    seq_length: int,
) -> tuple[tuple[int, int], ...]:
    """Returns the global batches of a run that grow by Megatron-LM's rules: from which sample on, and how large.

    Args:
        global_batch_size: the last size. None: that of `step_schedule`.
        rampup_batch_size: first size, increment, and the number of samples until the last size is reached.
        step_schedule: sizes by the number of tokens so far, as "0:16", "2.4B:320". One text may hold several.

    Raises:
        ConfigError: the sizes do not lead to `global_batch_size`, or the schedule cannot be read.
    """
    if rampup_batch_size is not None:
        start, increment, samples = rampup_batch_size if len(rampup_batch_size) == 3 else (0, 0, 0)
        number, rest = divmod((global_batch_size or 0) - start, max(1, increment))
        if min(start, increment, samples, number) < 1 or rest:
            raise ConfigError(
                f"rampup_batch_size is {' '.join(map(str, rampup_batch_size))} and global_batch_size "
                f"{global_batch_size}; give START INCREMENT SAMPLES, where INCREMENT divides global_batch_size - START"
            )
        return tuple((-(-samples * step // number), start + step * increment) for step in range(number + 1))
    if step_schedule is None:
        return ((0, global_batch_size or 0),)
    text = " ".join(step_schedule)
    try:
        sizes = [(_number(tokens) // seq_length, _number(size)) for tokens, size in _pairs(text)]
        starts = [start for start, _ in sizes]
        if starts[0] or starts != sorted({*starts}) or global_batch_size not in (None, sizes[-1][1]):
            raise ValueError
    except (ValueError, IndexError):
        raise ConfigError(
            f"step_batch_size_schedule is {text!r} and global_batch_size {global_batch_size}; write TOKENS:SIZE with "
            "rising numbers of tokens, as 0:16 2.4B:320, of which the last size is the global batch's"
        ) from None
    return tuple(sizes)


def _pairs(text: str) -> list[list[str]]:
    return [entry.split(":") for entry in text.replace(",", " ").split()]


def _number(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    number = round(float(text[:-1] if factor > 1 else text) * factor, 3)  # 2.3 B may be a little less
    if not number.is_integer():
        raise ValueError
    return int(number)


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
