"""All exceptions of this library, warnings that are given once, and checks of settings.

    ShardstackError
    ├── ConfigError (ValueError)               a setting that cannot be honoured
    │   ├── ParallelConfigError                degrees or sharding settings that contradict or do not divide
    │   └── GradSyncError (AssertionError)     settings or calls of gradient synchronisation that contradict
    ├── ParallelStateError (RuntimeError, AssertionError)  process groups used before they exist, or made twice
    ├── WrapError (ValueError)                 a module that a data-parallel wrapper cannot take
    ├── DataError (ValueError)                 a corpus, an index or a token that cannot be used
    ├── OptimizerError (RuntimeError)          parameters or gradients that an optimizer cannot work with
    ├── UnitError (RuntimeError)               a parameter used where its unit is not gathered
    ├── OutOfStepError (RuntimeError)          ranks that did not meet in a collective
    ├── MemoryLimitError (RuntimeError)        an allocation that failed
    ├── CheckpointError (RuntimeError)         a checkpoint that is missing, damaged, or of another model
    ├── WeightsError (RuntimeError)            weights that could not be sent to or taken from another process
    └── MissingExtraError (ImportError)        an optional dependency that is not installed

Each message says what was asked, what was found, and what to do. The command line prints it as one line and exits with
status 2, or 3 if it ended a run that had begun. Other exceptions are bugs and keep their traceback, as do
OutOfStepError and MemoryLimitError, which occur only in a run.
"""

import functools
import importlib
import math
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence

from .text import choices


class ShardstackError(Exception):
    """Base of every exception that a user's input or environment can cause."""

    ended_run = False
    """Whether the error came after a run's first step: flags were valid, and the run can continue from its last
    checkpoint. `shardstack.training.loop` sets it on the instance that ends a run. It is False on all others."""


class ConfigError(ShardstackError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class ParallelConfigError(ConfigError):
    """Parallel degrees or sharding settings that contradict each other or do not divide."""


class GradSyncError(ConfigError, AssertionError):
    """Settings or calls of gradient synchronisation that contradict each other.

    An AssertionError, as `ParallelStateError`: Megatron-LM asserts in these places, and scripts and tests that catch
    its AssertionError still work.
    """


def raise_together(errors: Sequence[ConfigError], separator: str = "\n") -> None:
    """Raises several errors as one, which is a ParallelConfigError if all are. Returns without any."""
    if errors:
        is_parallel = all(isinstance(error, ParallelConfigError) for error in errors)
        raise (ParallelConfigError if is_parallel else ConfigError)(separator.join(map(str, errors)))


class ParallelStateError(ShardstackError, RuntimeError, AssertionError):
    """Process groups were asked for before they were built, or built twice."""


class WrapError(ShardstackError, ValueError):
    """A module that a data-parallel wrapper cannot take as it is."""


class DataError(ShardstackError, ValueError):
    """A corpus, an index file, a tokenizer or a token id that cannot be used."""


class OptimizerError(ShardstackError, RuntimeError):
    """Parameters, gradients or state that an optimizer cannot work with."""


class UnitError(ShardstackError, RuntimeError):
    """A sharded parameter was used outside of its unit's forward, where a rank has only a shard."""


class OutOfStepError(ShardstackError, RuntimeError):
    """A rank was left waiting in a collective that other ranks did not join."""


class MemoryLimitError(ShardstackError, RuntimeError):
    """An allocation failed. The message says where the memory is.

    The error is also a `torch.OutOfMemoryError` or `MemoryError`, as torch or Python raised it, so that code that
    catches those still works.
    """


class CheckpointError(ShardstackError, RuntimeError):
    """A checkpoint that is missing, damaged, unsafe to read, or of another model."""


class WeightsError(ShardstackError, RuntimeError):
    """Weights that could not be sent to another process, or taken from one. What was there before stays."""


class MissingExtraError(ShardstackError, ImportError):
    """An optional dependency is not installed. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'shardstack[{extra}]'")


def import_extra(module: str, extra: str, purpose: str) -> typing.Any:
    """Imports a module of an optional dependency. `purpose` says in the error what needs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(module.partition(".")[0], extra, purpose) from None


# Remembers every message as long as the process lives; tests call `warn_once.cache_clear()`.
@functools.cache
def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Warns at the first call with this message. `stacklevel` is that of `warnings.warn`."""
    warnings.warn(message, stacklevel=stacklevel)


def out_of_range(
    settings: object,
    *names: str,
    least: float = -math.inf,
    over: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    takes: str = "",
) -> Iterator[str]:
    """Yields a message for each attribute of `settings` that is not in a range. None is in every range, NaN in none.

    Args:
        least, most: inclusive bounds.
        over, below: exclusive bounds.
        takes: the message's description of the range; by default "zero or a positive number" from 0 on, else "a
            positive number".
    """
    takes = takes or ("zero or a positive number" if least == 0 else "a positive number")
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (least <= value <= most and over < value < below):
            yield f"{name} is {value}; it takes {takes}"


def check_range(
    settings: object, *names: str, error: type[ShardstackError] = ConfigError, takes: str = "", **bounds: float
) -> None:
    """Raises `error` for the first attribute of `settings` that is out of range: see :func:`out_of_range`."""
    for problem in out_of_range(settings, *names, takes=takes, **bounds):
        raise error(problem)


def out_of_choices(settings: object, optional: bool = False, /, **lists: Sequence[str]) -> Iterator[str]:
    """Yields a message for each named attribute of `settings` that is none of its choices. `optional` adds None."""
    for name, names in lists.items():
        value = getattr(settings, name)
        if value not in names and not (optional and value is None):
            yield f"{name} is {value!r}; {choices(str(value), names, optional)}"


def check_choices(
    settings: object, optional: bool = False, /, *, error: type[ShardstackError] = ConfigError, **lists: Sequence[str]
) -> None:
    """Raises `error` for the first named attribute of `settings` that is none of its choices. `optional` adds None."""
    for problem in out_of_choices(settings, optional, **lists):
        raise error(problem)


def check_positive(sizes: Mapping[str, int], error: type[ShardstackError] = ConfigError) -> None:
    """Raises `error` for the first of named sizes that is below one."""
    for name, size in sizes.items():
        if size < 1:
            raise error(f"{name} is {size}; it takes a positive number")
