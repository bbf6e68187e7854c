"""FSDP2's private state is known in one file, a few places apart, and every name of it that is used is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import core
from core.base.errors import WrapError
from core.distributed.fsdp2 import torch_private
from core.distributed.fsdp2.torch_private import TorchState, groups_of
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import batches, loss_of, toy

PRIVATE = re.compile(
    r"_fully_shard\.|_get_fsdp_state|_fsdp_param_group|\b_unsharded_param\b|\.fsdp_params\b"
    r"|_set_unshard_async_op"
)
ALLOWED = {"base/_torch_compat.py", "adapters/optimus.py"}
"""Differences between versions, and what a model's own ``fully_shard`` has asked for, on a copy without values."""


FILE = Path(core.__file__).parent / "distributed" / "fsdp2" / "torch_private.py"


def test_only_one_file_reads_torchs_private_state():
    root = Path(core.__file__).parent
    files = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    found = {
        path.relative_to(root).as_posix() for path, text in files.items() if PRIVATE.search(text) and path != FILE
    }
    assert PRIVATE.search(files[FILE]) and found == ALLOWED


PACKAGE = "torch.distributed.fsdp._fully_shard"
OWNERS = {
    **dict.fromkeys(("module", "root", "m"), "FSDPModule"),
    **dict.fromkeys(("_get_fsdp_state", "_state", "each"), "FSDPState"),
    "state": "FSDPState ReduceScatterState",
    **dict.fromkeys(("_state_ctx", "context"), "FSDPStateContext"),
    **dict.fromkeys(("comm_ctx", "_comm_ctx"), "FSDPCommContext"),
    "group": "FSDPParamGroup",
    **dict.fromkeys(("parameter", "p", "FSDPParam"), "FSDPParam"),
    **dict.fromkeys(("info", "_module_info"), "ParamModuleInfo"),
    "mesh_info": "FSDPMeshInfo",
    "last": "AllGatherState",
    "result": "AllGatherResult",
    "TrainingState": "TrainingState",
}
"""Classes of torch, by the last name of the expression that is an object of one in the source code."""
PUBLIC = {name for kind in (torch.Tensor, nn.Module(), dist.Work, list, dict, set, str, type) for name in dir(kind)}
"""Names that say nothing about whose attribute they are."""
OF_SOME_VERSIONS = {
    ("FSDPState", "_reset_iter_state"),
    ("FSDPStateContext", "manual_backward_finalization_active"),
    ("FSDPParamGroup", "_fsdp_params_with_wider_grad_dtype"),
    ("FSDPParam", "unsharded_grad_dtype"),
    ("FSDPCommContext", "reduce_scatter_state"),
    ("FSDPCommContext", "reduce_scatter_states"),
}
"""Of which the code asks whether they are there."""


Names = dict[str, set[str]]
"""Of attributes, by class."""


class Use(NamedTuple):
    """An attribute in the source code, of an object of one of these classes; of none if its owner is unknown."""

    kinds: tuple[str, ...]
    name: str
    line: int


def _names_of_classes() -> Names:
    """Returns what torch's private classes declare, also of attributes that are None for most of a step."""
    names = {"FSDPModule": set(vars(FSDPModule))}
    for found in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__):
        module = importlib.import_module(f"{PACKAGE}.{found.name}")
        for kind, of_kind in inspect.getmembers(module, inspect.isclass):
            if of_kind.__module__ == module.__name__:
                tree = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(of_kind))))
                targets = [node.target for node in tree if isinstance(node, ast.AnnAssign)]
                names[kind] = {*dir(of_kind), *(getattr(t, "attr", getattr(t, "id", "")) for t in targets)}
    return names


def _add_objects(names: Names, root: nn.Module) -> None:
    """Adds the attributes of all private objects that modules refer to now."""
    waiting: list[Any] = [m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule)]
    done: set[int] = set()
    while waiting:
        owner = waiting.pop()
        if type(owner).__module__.startswith(PACKAGE) and not isinstance(owner, type) and id(owner) not in done:
            done.add(id(owner))
            names.setdefault(type(owner).__name__, set()).update(dir(owner))
            for value in getattr(owner, "__dict__", {}).values():
                waiting += value if isinstance(value, list) else [value]


def _uses(source: str, names: Names) -> set[Use]:
    """Returns the uses of torch's private attributes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and _last_name(node) in ("getattr", "hasattr"):
            owner, name = node.args[0], ast.literal_eval(node.args[1])
        else:
            continue
        kinds = tuple(OWNERS.get(_last_name(owner), "").split())
        is_private = name not in PUBLIC and any(name in of_kind for of_kind in names.values())
        if name not in PUBLIC if kinds else is_private and _last_name(owner) != "self":
            found.add(Use(kinds, name, node.lineno))
    return found


def _last_name(node: Any) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def _problems(uses: set[Use], names: Names) -> set[str]:
    """Returns names that no class of their owner has, or whose owner is unknown."""
    return {
        f"{use.line}: {' '.join(use.kinds) or 'unknown'}.{use.name}"
        for use in uses
        if not any(use.name in names[kind] or (kind, use.name) in OF_SOME_VERSIONS for kind in use.kinds)
    }


@on_ranks(4)
def test_every_private_name_that_is_used_is_there():
    model = toy(tied=False)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=dist.get_world_size() // 2)
    fully_shard(model)
    names = _names_of_classes()
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        loss = loss_of(model, batches(0)[0])
        _add_objects(names, model)
        loss.backward()
        _add_objects(names, model)
    uses = _uses(FILE.read_text(encoding="utf-8"), names)
    used = {(kind, use.name) for use in uses for kind in use.kinds}
    assert len(used) > 40 and used > {("FSDPModule", "_get_fsdp_state"), ("FSDPParamGroup", "fsdp_params")}
    assert _problems(uses, names) == set()
    assert used >= OF_SOME_VERSIONS
    assert {"reduce_scatter_state", "reduce_scatter_states"} & names["FSDPCommContext"]
    for use in uses:
        if not any((kind, use.name) in OF_SOME_VERSIONS for kind in use.kinds):
            without = {kind: of_kind - {use.name} if kind in use.kinds else of_kind for kind, of_kind in names.items()}
            missing = _problems(uses, without)
            assert missing and all(problem.endswith(f".{use.name}") for problem in missing)


CODE = """
for group in groups_of(root):
    for parameter in group.fsdp_params:
        parameter.renamed = None
of_others().fsdp_params
"""


def test_a_name_that_is_missing_or_of_unknown_origin_is_found():
    names = _names_of_classes()
    names["FSDPParamGroup"].add("fsdp_params")
    assert _problems(_uses(CODE, names), names) == {"4: FSDPParam.renamed", "5: unknown.fsdp_params"}


@on_ranks(2)
def test_wrapping_names_what_an_unknown_torch_lacks():
    model = fully_shard(toy(tied=False))
    group = groups_of(model)[0]
    assert set(torch_private._NAMES) == {"FSDPState", "FSDPStateContext", "FSDPParamGroup", "FSDPParam"}
    owners = [model._get_fsdp_state()._state_ctx, group, group.fsdp_params[0]]
    for owner, name in zip(owners, ("iter_forward_root", "_post_forward_indices", "_param_fqn"), strict=True):
        value = getattr(owner, name)
        delattr(owner, name)
        with pytest.raises(WrapError, match=rf"torch {re.escape(torch.__version__)} has no \w+\.{name}, "):
            TorchState(model)
        setattr(owner, name, value)
    TorchState(model)
    declared = {kind: set(names.split()) for kind, names in torch_private._NAMES.items()}
    used = {(kind, use.name) for use in _uses(FILE.read_text("utf-8"), _names_of_classes()) for kind in use.kinds}
    assert {(kind, name) for kind, names in declared.items() for name in names} <= used
