"""Counts what is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from core.distributed.model import unit_transforms


@contextmanager
def counted_graphs(compiler: str) -> Iterator[list[int]]:
    """Counts the operations of each graph that is compiled."""
    found: list[int] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        found.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    torch._dynamo.reset()  # the processes of ranks are reused, and with them what is compiled
    counters.clear()
    with mock.patch.object(unit_transforms, "COMPILER", compile_graph):
        yield found
