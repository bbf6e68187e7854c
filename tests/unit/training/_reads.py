"""Fails on what would make the host wait for a GPU, on a machine without one.

All tensors are on the CPU. Those that would be in the host's memory next to a GPU are known: what is made without a
device, or on the literal device "cpu", and what is computed from such tensors alone. All others are the GPU's. Nothing
may read these on the host, copy between the two in a way that waits, or use both in one operation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from core.base import device
from core.comm import gloo, lane
from core.optimizer import clip_grads, exact_sums
from core.tensor_parallel import cross_entropy, layers
from core.transformer import piecewise_attention, sequences
from core.transformer.document_attention import NAMESPACE

READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "bincount",
    "histc",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
)
"""Operations of `torch.ops.aten` whose results, or their sizes, the host waits for on CUDA."""

INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
"""Operations that look for what is true in indices of booleans."""

READING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
COPIES = ("copy_", "_to_copy", "to", "_copy_from")

WRITTEN_IN_PYTHON = {
    "attend_in_pieces": piecewise_attention._operation,
    "attend_in_pieces_backward": piecewise_attention._backward_operation,
}
"""Our own operations on a CPU, which are watched from inside; their arguments may be in both memories."""


class HostTensors:
    """The tensors that would be in the host's memory."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        # Made while watched, by the words `torch.device("cpu")`; kept, so that another is never at their address.
        self._literals: list[torch.device] = []

    def add(self, found: Any) -> None:
        for tensor in _tensors(found):
            self._known[tensor] = True

    def discard(self, tensor: Tensor) -> None:
        self._known.pop(tensor, None)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._known

    def add_literal(self, made: torch.device) -> None:
        if made.type == "cpu":
            self._literals.append(made)

    def is_named_by(self, where: Any) -> bool:
        """Returns whether a device is the host's, rather than the one that a tensor or `current_device` names."""
        return where == "cpu" or any(where is literal for literal in self._literals)


class _NoReadsBelow(TorchDispatchMode):
    """Watches operations; those of autograd and of Python's operators end in some of them."""

    def __init__(self, host: HostTensors, above: _NoReadsAbove) -> None:
        super().__init__()
        self._host, self._above = host, above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            with self, self._above:
                return WRITTEN_IN_PYTHON[func.__name__.split(".")[0]](*args, **kwargs)
        given = _tensors((args, kwargs))
        on_device = [tensor for tensor in given if tensor not in self._host]
        if on_device:
            self._check(func, args, kwargs, given, on_device)
        found = func(*args, **kwargs)
        if given and not on_device:
            self._host.add(found)
        return found

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], on_device: list[Tensor]) -> None:
        name = func.__name__.split(".")[0]
        assert name not in READS, f"{func} waits for the device"
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise AssertionError(f"{func} waits for the device: give output_size")
        if name in INDEXED:
            kinds = [index.dtype for index in args[1] if index is not None]
            assert torch.bool not in kinds and torch.uint8 not in kinds, f"{func} by booleans waits for the device"
        if func.namespace == "aten" and name not in COPIES:
            mixed = [tensor for tensor in given if tensor in self._host and tensor.dim() > 0]
            assert not mixed, f"{func} of the device's tensors and one of the host, {mixed[0].shape}"
        if name in ("copy_", "_copy_from") and len(on_device) < len(given):
            assert _arguments(func, args, kwargs)["non_blocking"], f"{func} between host and device waits"


class _NoReadsAbove(TorchFunctionMode):
    """Watches what is called in Python: methods that no operation shows, and devices as they are named."""

    def __init__(self, host: HostTensors) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            made = func(*args, **kwargs)
            if sys._getframe(1).f_code is not device.current_device.__code__:
                self._host.add_literal(made)
            return made
        name = getattr(func, "__name__", "")
        given = _tensors((args, kwargs))
        if given and given[0] not in self._host:
            assert name not in READING_METHODS, f"Tensor.{name} waits for the device"
            assert name != "new_tensor", "Tensor.new_tensor of numbers waits for the device: use new_full"
            if name == "to":
                goes_to_host = any(self._host.is_named_by(one) for one in (*args[1:], *kwargs.values()))
                assert not goes_to_host, "Tensor.to() the host waits for the device"
        found = func(*args, **kwargs)
        if name == "to" and given[0] in self._host:
            return self._moved(found, args, kwargs)
        if not given or name in ("tensor", "as_tensor"):
            self._note_made(name, found, kwargs.get("device"))
        return found

    def _moved(self, found: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Returns what `Tensor.to` makes of a tensor of the host: another, if it names the GPU."""
        named = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, (torch.device, str))]
        if not named or self._host.is_named_by(named[0]):
            return found
        assert kwargs.get("non_blocking"), "Tensor.to() the device waits: pin the memory, and let non_blocking be True"
        return self.on_device(found)

    def _note_made(self, name: str, found: Any, where: Any) -> None:
        if where is None or self._host.is_named_by(where):
            self._host.add(found)
        elif not isinstance(where, str) and where.type == "cpu":
            assert name not in ("tensor", "as_tensor"), f"torch.{name} of numbers waits for the device: use torch.full"

    def on_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy that counts as the GPU's."""
        copied = _unwatched(Tensor.clone)(tensor)
        self._host.discard(copied)
        return copied


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    schema = func._schema.arguments
    return {
        **{one.name: one.default_value for one in schema},
        **dict(zip((one.name for one in schema), args, strict=False)),
        **kwargs,
    }


class Reads:
    """What the one function that may read has read: how often, and how many micro-batches had begun by then."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.forwards = 0

    def note_forward(self, *unused: Any) -> None:
        self.forwards += 1

    def __call__(self, numbers: Tensor) -> list[Any]:
        self.at.append(self.forwards)
        found: list[Any] = _unwatched(Tensor.tolist)(numbers)
        return found


@contextmanager
def watched(host_tensors: list[Tensor] | None = None) -> Iterator[Reads]:
    """Fails on every read but those through `core.comm.lane`, which it counts; nothing is known in advance.

    Args:
        host_tensors: made before, and in the host's memory.
    """
    reads, host = Reads(), HostTensors()
    host.add(host_tensors)
    above = _NoReadsAbove(host)
    with ExitStack() as stack:
        for module, name, replaced in (
            (lane, "_to_list", reads),
            (clip_grads, "known_on_host", lambda value: None),
            (sequences, "_on_device", above.on_device),
            # What looks at ids on the CPU alone, and at which rows of a table are in use.
            *((module, "check_ids", mock.Mock()) for module in (layers, cross_entropy)),
            (layers, "embedding", lambda ids, weight, adds_rows: F.embedding(ids, weight)),
            # Of gradients in its memory, as those of offloaded shards.
            *((one, "_sum_on_host", _unwatched(one._sum_on_host)) for one in (clip_grads, exact_sums)),
            # What NCCL has in its place is one collective.
            *((gloo, name, _unwatched(getattr(gloo, name))) for name in ("exchange_and_add", "start_all_gather")),
        ):
            stack.enter_context(mock.patch.object(module, name, replaced))
        stack.enter_context(_NoReadsBelow(host, above))
        stack.enter_context(above)
        yield reads
