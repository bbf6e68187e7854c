"""Explains what goes wrong with a wrapped model: what was done, what was found, and what to do.

| failure | where it is found | file |
| --- | --- | --- |
| a parameter used outside its unit | forward, `failures_explained` | `misplaced_parameters` |
| too little memory | forward, `failures_explained` | `out_of_memory` |
| ranks that fell out of step | a collective, forward, `failures_explained` | `shardstack.comm.out_of_step` |
| ranks that wait for each other | the listener's thread | `shardstack.comm.out_of_step` |

What can be refused before it fails is a guard (`shardstack.distributed.guards`). A wrapper imports this package after
a failure alone, and knows no more of it; what is explained is read of the wrapper and the optimizers.

The first three can be raised in any code that runs the model. A wrapper's forward explains them. For backward,
`finalize_model_grads`, the optimizer's step and calls that bypass the wrapper, enter `failures_explained(model)`, as
`shardstack.training.train_step` does::

    with failures_explained(model):
        model(batch).backward()
        finalize_model_grads([model])
        optimizer.step()

Each error is one of `shardstack.base.errors`, raised from the one that it explains. Ranks out of step are compared by
their records of collectives (`shardstack.comm.record`), which ``SHARDSTACK_RECORD_COLLECTIVES=0`` switches off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..base.errors import ShardstackError
from ..base.module_protocol import unwrap_model
from ..comm.out_of_step import raise_out_of_step
from .misplaced_parameters import raise_misplaced
from .out_of_memory import raise_out_of_memory


@contextmanager
def failures_explained(wrapper: nn.Module) -> Iterator[None]:
    """Explains errors that are raised inside it, in any part of a step of the wrapped model.

    Raises:
        UnitError: a sharded parameter was used outside its unit.
        OutOfStepError: other ranks did not join a collective.
        MemoryLimitError: an allocation failed.
    """
    try:
        yield
    except Exception as error:
        raise_explained(error, wrapper)
        raise


def raise_explained(error: Exception, wrapper: nn.Module) -> None:
    """Raises an error that explains `error`, from it. Returns if there is nothing to explain."""
    if isinstance(error, ShardstackError):
        return
    raise_out_of_memory(error, wrapper)
    raise_misplaced(error, unwrap_model(wrapper))  # users know its parameters by their names in the model
    raise_out_of_step(error)


__all__ = ["failures_explained", "raise_explained"]
