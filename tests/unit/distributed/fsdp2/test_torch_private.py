"""FSDP2's private state is known in one file, a few places apart, and every name of it that is used is there."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import core
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, loss_of, toy
from tests.unit.distributed.fsdp2._attribute_uses import Catalog, Origins, Uses

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


ORIGINS = Origins(
    parameters={"parameter": "FSDPParam", "comm_ctx": "FSDPCommContext"},
    functions={
        "_get_fsdp_state": "FSDPState",
        "fsdp_param_groups": "[FSDPParamGroup]",
        "groups_of": "[FSDPParamGroup]",
        "_running_reductions": "[ReduceScatterState]",
        "gathered_versions": "",
        "names_of_parameters": "",
    },
)

OF_SOME_VERSIONS = {
    ("FSDPState", "_reset_iter_state"),
    ("FSDPCommContext", "reduce_scatter_state"),
    ("FSDPCommContext", "reduce_scatter_states"),
}
"""Of which the code asks whether they are there."""


def _torchs_objects() -> Catalog:
    """Returns what every object has that FSDP2 makes for a model, in two micro-batches of a step."""
    model = toy(tied=False)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=dist.get_world_size() // 2)
    fully_shard(model)
    catalog = Catalog()
    catalog.add_classes()
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        loss = loss_of(model, batches(0)[0])
        catalog.add_objects(model)
        loss.backward()
        catalog.add_objects(model)
    return catalog


def _uses(catalog: Catalog) -> Uses:
    uses = Uses(catalog, ORIGINS)
    uses.read(FILE.name, FILE.read_text(encoding="utf-8"))
    return uses


def _missing(catalog: Catalog, uses: Uses) -> set[str]:
    return {
        f"{use.where}: {use.kind}.{use.name}"
        for use in uses.found
        if use.name not in catalog.names[use.kind] and (use.kind, use.name) not in OF_SOME_VERSIONS
    }


def test_every_private_name_that_is_used_is_there():
    catalog = run_distributed(_torchs_objects, 4)[0]
    uses = _uses(catalog)
    names = {(use.kind, use.name) for use in uses.found}
    assert len(names) > 40 and names > {("FSDPModule", "_get_fsdp_state"), ("FSDPParamGroup", "fsdp_params")}
    assert uses.unknown == set()
    assert _missing(catalog, uses) == set()
    assert names >= OF_SOME_VERSIONS
    assert {"reduce_scatter_state", "reduce_scatter_states"} & catalog.names["FSDPCommContext"]
    for kind, name in names - OF_SOME_VERSIONS:
        without = Catalog({**catalog.names, kind: catalog.names[kind] - {name}}, catalog.kinds)
        missing = _missing(without, uses)
        assert missing and all(found.endswith(f": {kind}.{name}") for found in missing)


CODE = """
def reads(other: Any) -> None:
    for group in groups_of(root):
        for parameter in group.fsdp_params:
            parameter.renamed = None
    of_others().fsdp_params
"""


def test_a_name_that_is_missing_or_of_unknown_origin_is_found():
    catalog = Catalog()
    catalog.add_classes()
    catalog.names["FSDPParamGroup"].add("fsdp_params")
    catalog.kinds["FSDPParamGroup", "fsdp_params"] = "[FSDPParam]"
    uses = Uses(catalog, ORIGINS)
    uses.read("file.py", CODE)
    assert _missing(catalog, uses) == {"file.py:5: FSDPParam.renamed"}
    assert uses.unknown == {
        "file.py: the parameter other of reads",
        "file.py:6: whose fsdp_params is it in of_others().fsdp_params?",
    }
