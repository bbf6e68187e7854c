"""FSDP2's private state is known in one folder, a few places apart, and every name of it that is used is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import core
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, loss_of, toy

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


FOLDER = Path(core.__file__).parent / "distributed" / "fsdp2" / "torch_private"
OF_TORCH_ITSELF = {"_C", "_foreach_mul_", "_functorch", "_version", "_local_tensor"}
"""Private names of torch outside of FSDP2."""


def _private_names() -> set[str]:
    """Returns the names that begin with an underscore and that the folder reads or sets on objects of others."""
    used, own = set(), set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                (own if is_own else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                own.add(node.name)
    return {name for name in used - own if re.match("_[a-z]", name)} - OF_TORCH_ITSELF


def _names_of_torchs_objects() -> set[str]:
    """Returns the names on every object that FSDP2 makes for a model, in two micro-batches of a step."""
    model = toy(tied=False)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=dist.get_world_size() // 2)
    fully_shard(model)
    found = set(dir(model))
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        loss = loss_of(model, batches(0)[0])
        found.update(*map(dir, _objects_of(model)))
        loss.backward()
        found.update(*map(dir, _objects_of(model)))
    return found


def _objects_of(model: object) -> Iterator[object]:
    for module in model.modules():  # type: ignore[attr-defined]
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        groups = core._torch_compat.fsdp_param_groups(state)
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        yield from (state, state._state_ctx, state._comm_ctx, *groups, *parameters)


def test_every_private_name_that_is_used_is_there():
    there = run_distributed(_names_of_torchs_objects, 4)[0]
    assert len(_private_names()) > 15 and _private_names() <= there
