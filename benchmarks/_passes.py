"""Counts the bytes that an optimizer's update reads and writes, operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from _llama_training import Training
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_TOUCH_NOTHING = ("empty", "new_empty", "resize_", "set_", "record_stream")
"""Beginnings of names of operators that allocate memory, or give a tensor other memory."""

_READ_NOTHING = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "rand")
"""Beginnings of names of operators that take the shape of their input, and no values."""

_OVERWRITE = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_")
"""Names of operators in place that do not read the tensor that they write."""


class CountedBytes(TorchDispatchMode):
    """Adds up the bytes that each operator reads and writes, from its schema, while it is entered.

    An operator reads its inputs and writes its outputs, each whole, also where it uses a part, as `index_select`. A
    view reads and writes nothing. An argument of an operator in place is read and written; one of `_OVERWRITE`, and of
    ``out=``, is only written. A tensor that is given twice is read once, an expanded one counts what is in memory.

    A compiled graph counts as one operator, ``compiled``: the mode cannot see inside. It reads its inputs once, those
    that it writes among them, even where it only overwrites these, and writes them and its outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        """Bytes, by the operator's name."""
        self.written: Counter[str] = Counter()
        # Whether a compiled graph runs, whose operators are inside what it counts as. `_run_graph` sets and clears it.
        self._is_in_graph = False
        # Replaces how torch calls a compiled graph while the mode is entered.
        self._graphs: Any = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled functions stay compiled. Under other modes torch runs them without their compiler."""
        return True

    @property
    def total(self) -> int:
        return self.read.total() + self.written.total()

    def by_operator(self) -> dict[str, int]:
        """Returns bytes read and written, the largest first."""
        return dict((self.read + self.written).most_common())

    def __enter__(self) -> CountedBytes:
        from torch._inductor.output_code import CompiledFxGraph  # imports the compiler, which takes seconds

        run, count = CompiledFxGraph.__call__, self._run_graph
        self._graphs = patch.object(CompiledFxGraph, "__call__", lambda graph, inputs: count(run, graph, inputs))
        self._graphs.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._graphs.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # which comes back with the operators on its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_in_graph and not types:  # no fake tensors, on which DTensor tries a new operator first
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name.startswith(_TOUCH_NOTHING):
            return
        inputs: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors = list(_tensors(value))
            if _is_written(argument, name, kwargs):
                written += tensors
                inputs += tensors if not (argument.is_out or name in _OVERWRITE) else []
            elif not name.startswith(_READ_NOTHING):
                inputs += tensors
        storages = {_storage(tensor) for tensor in (*inputs, *written)}
        outputs = list(_tensors(result))
        created = [tensor for tensor in outputs if _storage(tensor) not in storages]
        if outputs and not created and not written:
            return  # a view
        self.read[name] += _bytes(inputs)
        self.written[name] += _bytes(written + created)

    def _run_graph(self, run: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        mutated = [inputs[index] for index in graph.mutated_input_idxs]  # now: the graph empties the list
        self._is_in_graph = True
        try:
            outputs = run(graph, inputs)
        finally:
            self._is_in_graph = False
        storages = {_storage(tensor) for tensor in tensors}
        created = [tensor for tensor in _tensors(outputs) if _storage(tensor) not in storages]
        self.read["compiled"] += _bytes(tensors)
        self.written["compiled"] += _bytes(mutated + created)
        return outputs


def _is_written(argument: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if argument.alias_info is None or not argument.alias_info.is_write:
        return False
    # The schema of fused optimizers says that they write gradients: they do where these are still scaled.
    return not (name.startswith("_fused_") and argument.name == "grads" and kwargs.get("grad_scale") is None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Returns the bytes in memory of tensors, of equal ones once."""
    distinct = {(_storage(one), one.storage_offset(), one.shape, one.stride(), one.dtype): one for one in tensors}
    return sum(map(_bytes_in_memory, distinct.values()))


def _bytes_in_memory(tensor: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return elements * tensor.element_size()


@dataclass(frozen=True)
class Update:
    """What the update of a step reads and writes."""

    bytes_per_parameter: float
    gigabytes: float
    """Of a step."""
    milliseconds_at_copy_rate: float
    """How long a copy of as many bytes takes, read and written, at the rate before the first row."""
    by_operator: dict[str, int]
    """Bytes a step."""

    @staticmethod
    def of(training: Training, copy_rate: float) -> Update:
        """Counts an update of a model that has been trained: the first one creates the optimizer's state.

        Args:
            copy_rate: GB/s.
        """
        counted = count_update(training)
        gigabytes = counted.total / 1e9
        return Update(
            bytes_per_parameter=counted.total / training.parameters,
            gigabytes=gigabytes,
            milliseconds_at_copy_rate=1e3 * gigabytes / copy_rate,
            by_operator=counted.by_operator(),
        )

    def __str__(self) -> str:
        return (
            f"update: {self.bytes_per_parameter:.1f} bytes a parameter, {self.gigabytes:.3g} GB, which take "
            f"{self.milliseconds_at_copy_rate:.3g} ms at the rate of the copy"
        )


def count_update(training: Training, counted: CountedBytes | None = None) -> CountedBytes:
    """Counts everything between the last backward of a step and the first forward of the next, and runs both.

    That is the cast of gradients, their norm, clipping, the update and the refresh of weights, and clearing
    gradients, but not what a sharding wrapper does around a forward or inside a backward: casts of gathered weights,
    copies of gradients.

    Args:
        counted: what counts. None makes one.
    """
    counted = CountedBytes() if counted is None else counted
    with _between_backward_and_forward(training, counted):
        training.step()
        training.step()
    return counted


@contextmanager
def _between_backward_and_forward(training: Training, mode: TorchDispatchMode) -> Iterator[None]:
    """Enters the mode after the last backward of the first step, and leaves it before the next forward."""
    backward, backwards_left, is_entered = torch.Tensor.backward, training.preset.micro_batches, False

    def then_enter(*args: Any, **kwargs: Any) -> None:
        nonlocal backwards_left, is_entered
        backward(*args, **kwargs)
        backwards_left -= 1
        if backwards_left == 0:
            is_entered = True
            mode.__enter__()

    def leave(*unused: Any) -> None:
        nonlocal is_entered
        if is_entered:
            is_entered = False
            mode.__exit__(None, None, None)

    hook = training.model.register_forward_pre_hook(leave, prepend=True)
    try:
        with patch.object(torch.Tensor, "backward", then_enter):
            yield
    finally:
        leave()
        hook.remove()
