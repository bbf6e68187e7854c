"""One folder knows FSDP2's private state."""

from __future__ import annotations

import re
from pathlib import Path

import core

PRIVATE = re.compile(
    r"_fully_shard\.(?!_fsdp_api\b)|_get_fsdp_state|_fsdp_param_group|\b_unsharded_param\b|\.fsdp_params\b"
    r"|_set_unshard_async_op"
)
"""`_fsdp_api` has the interfaces of `set_custom_all_gather` and `set_custom_reduce_scatter`, which are public."""

ALLOWED = {"_torch_compat.py", "adapters/optimus/transforms.py", "distributed/fsdp2/shard_model.py"}
"""Differences between versions; what a model's own ``fully_shard`` has asked for, on a copy without values; and
asynchronous gathers on the CPU, a setting that is public in all but its name."""


def test_only_one_folder_reads_torchs_private_state():
    root = Path(core.__file__).parent
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    found = {name for name, text in files.items() if PRIVATE.search(text)}
    inside = {name for name in found if name.startswith("distributed/fsdp2/torch_private/")}
    assert len(inside) >= 5 and found - inside == ALLOWED
