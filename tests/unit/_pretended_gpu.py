"""Makes torch say that there is a GPU, while everything runs on the CPU: the `sitecustomize` of a bare Python.

`PRETENDED_GPU` is the GPU's name. `FEW` has names of tests, separated by commas: of a collection no other is run, if
pytest loads this as a plugin.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

if os.environ.get("SHARDSTACK_DEVICE") == "cuda":
    os.environ["SHARDSTACK_DEVICE"] = "cpu"
os.environ.setdefault("SHARDSTACK_DEVICE", "cpu")
if not any(part.startswith("benchmarks/") for part in sys.orig_argv):  # whose compiler would use the GPU
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda device=None: os.environ["PRETENDED_GPU"]
    torch.cuda.current_stream = lambda device=None: "the stream"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda._sleep = lambda cycles: None  # type: ignore[attr-defined]
    torch.cuda.nccl.version = lambda: (2, 28, 9)  # type: ignore[attr-defined]
    torch.backends.cudnn.version = lambda: None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keeps tests of the names in `FEW`."""
    names = os.environ.get("FEW", "").split(",")
    items[:] = [item for item in items if any(name in item.name for name in names)]
