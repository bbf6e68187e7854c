"""Streams have one seam: nothing else in `core` asks torch for them, so that simulated ones take their place."""

from __future__ import annotations

import ast
from pathlib import Path

import core

CORE = Path(core.__file__).parent
STREAM_NAMES = {
    *("Stream", "Event", "ExternalStream", "StreamContext", "stream", "set_stream", "current_stream"),
    *("default_stream", "synchronize", "is_current_stream_capturing", "CUDAGraph", "graph", "graphs"),
}
"""What `torch.cuda`, `torch.accelerator` and `torch.cpu` have of streams."""
MODULES = {"torch.cuda", "torch.accelerator", "torch.cpu", "torch"}


def _asks_torch(source: str) -> list[str]:
    """Returns the lines that ask torch for streams, events, or memory for them."""
    actual = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            if of in MODULES and node.attr in STREAM_NAMES:
                actual.append(f"{node.lineno}: {of}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("record_stream", "pin_memory"):
                actual.append(f"{node.lineno}: {ast.unparse(node.func)}")
            elif ast.unparse(node.func.value) == "torch" and any(k.arg == "pin_memory" for k in node.keywords):
                actual.append(f"{node.lineno}: {ast.unparse(node.func)}(pin_memory)")
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            actual += [f"{node.lineno}: {name.name}" for name in node.names if name.name in STREAM_NAMES]
    return actual


def test_only_streams_module_uses_torch_streams() -> None:
    asking = {file.relative_to(CORE).as_posix(): _asks_torch(file.read_text()) for file in CORE.rglob("*.py")}
    assert len(asking) > 150 and asking.pop("comm/streams.py")
    assert {file: lines for file, lines in asking.items() if lines} == {}


def test_stream_use_elsewhere_is_detected() -> None:
    for line in (
        "torch.cuda.Stream()",
        "torch.cuda.current_stream().wait_event(e)",
        "from torch.cuda import Event",
        "torch.accelerator.synchronize()",
        "tensor.record_stream(stream)",
        "tensor.pin_memory()",
        "torch.zeros(3, pin_memory=True)",
        "torch.Event()",
    ):
        assert _asks_torch(line), line
    assert not _asks_torch("streams.current_stream(); x.synchronize(); torch.cuda.get_rng_state()")
