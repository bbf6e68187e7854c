"""Rejects models that a wrapper cannot train correctly, before it changes anything.

Also rejects models that are wrapped twice, whose children were sharded by hand before, or that were changed after;
experts, which Megatron-LM marks by ``allreduce = False``, where they have ranks of their own; and ranks that wrap
different models, or one model with different settings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ...base import device
from ...base.dtypes import dtype_name
from ...base.errors import ParallelConfigError, WrapError
from ...base.text import join_parts, texts_by_rank
from ...comm.collectives import all_reduce_by_backend
from ...dist_checkpointing.agreement import Ranks
from ..groups import DataParallelGroups, is_expert_parameter, kind_of, managed_parameters
from ..plan import Plan


def reject_unfit(module: nn.Module) -> None:
    """Raises for models that no wrapper can train as the plain module would.

    Raises:
        WrapError: a parameter is complex, a parameter or buffer is sparse, parameters are trained on several devices,
            or two share memory without being one.
    """
    for name, parameter in managed_parameters(module):
        if parameter.is_complex() and parameter.requires_grad:
            raise WrapError(
                f"parameter {name} is complex, which gradient norms and updates do not know; hold its real and "
                "imaginary parts in a real parameter, and view that with torch.view_as_complex"
            )
    for name, tensor in itertools.chain(managed_parameters(module), module.named_buffers()):
        if tensor.layout != torch.strided:
            raise WrapError(
                f"{name} has the layout {tensor.layout}, which ranks cannot send each other; register a dense tensor, "
                "or keep a constant in an attribute that is no buffer"
            )
    devices = {p.device: name for name, p in managed_parameters(module) if p.requires_grad and not p.is_meta}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise WrapError(
            f"parameters are trained on several devices ({places}), whose backwards run at the same time; move the "
            "model to one device, or freeze those of the others"
        )
    _reject_shared_memory(module)


def reject_unfit_for_fsdp2(module: nn.Module) -> None:
    """Raises also for models that FSDP2 cannot shard, gather or reduce.

    Raises:
        WrapError: a parameter is a scalar, empty, not contiguous, on a mesh of several axes or has a gradient, or a
            module has sparse gradients.
    """
    for name, parameter in managed_parameters(module):
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise WrapError(f"parameter {name} is on a mesh of {parameter.device_mesh.ndim} axes already")
        if parameter.dim() == 0:
            raise WrapError(f"parameter {name} is a scalar, which cannot be sharded; give it the shape (1,)")
        if parameter.grad is not None:
            raise WrapError(
                f"parameter {name} has a .grad from before the model is wrapped, which FSDP2 drops; set it to None "
                "(zero_grad) before wrapping, or use DistributedDataParallel, which adds to it"
            )
        if parameter.numel() == 0:
            raise WrapError(
                f"parameter {name} has the shape {list(parameter.shape)}, without elements, which FSDP2 cannot "
                "gather; drop it, or use DistributedDataParallel"
            )
        if not parameter.is_contiguous():
            raise WrapError(
                f"parameter {name} is not contiguous in memory, as FSDP2 needs it; assign "
                "parameter.data = parameter.data.contiguous() before wrapping, or use DistributedDataParallel"
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            raise WrapError(
                f"module {name or 'root'} has sparse gradients (sparse=True), which FSDP2 cannot reduce; use "
                "sparse=False, or DistributedDataParallel"
            )


def _reject_shared_memory(module: nn.Module) -> None:
    by_storage: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if type(parameter.data) is Tensor and parameter.layout == torch.strided and parameter.numel():
            start = int(parameter.storage_offset())
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            by_storage[parameter.untyped_storage()._cdata].append((start, start + int(last), name))
    for ranges in by_storage.values():
        ranges.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
            if start <= end:
                raise WrapError(
                    f"parameters {first} and {second} are two parameters in the same memory, tied by .data, and "
                    "wrapping would untie them; tie them by assigning the parameter itself, as in "
                    "head.weight = embedding.weight"
                )


def reject_expert_parameters(module: nn.Module, config: Any, groups: DataParallelGroups) -> None:
    """Raises if a parameter is an expert's, and nothing says which ranks have replicas of it.

    A wrapper would overwrite one expert by another.

    Args:
        config: the model's; its ``expert_model_parallel_size`` is used if there are no process groups.

    Raises:
        ParallelConfigError: a parameter is marked, and experts are cut over other ranks than dense layers.
    """
    are_apart = groups.model.experts_are_apart or (getattr(config, "expert_model_parallel_size", 1) or 1) > 1
    if groups.experts is not None or not are_apart:
        return
    for name, parameter in module.named_parameters():
        if is_expert_parameter(parameter):
            raise ParallelConfigError(
                f"parameter {name} is marked allreduce=False, as an expert's, with experts cut over ranks, and the "
                "given ranks are those of dense parameters; give pg_collection with expt_dp, or call "
                "initialize_model_parallel with expert_model_parallel_size and give no process_group"
            )


_sharded_here: weakref.WeakSet[FSDPModule] = weakref.WeakSet()
"""Modules that this library sharded. `note_sharded` adds them. Freed modules drop out."""
_TORCH_WRAPPERS = (TorchDistributedDataParallel, FullyShardedDataParallel)


def note_sharded(modules: Iterable[FSDPModule]) -> None:
    """Records that this library sharded these modules, not a call of torch's `fully_shard`."""
    _sharded_here.update(modules)


def reject_wrapped(module: nn.Module, wrappers: tuple[type[nn.Module], ...] = ()) -> None:
    """Raises unless a model is plain: neither it nor a module in it is wrapped or sharded.

    Args:
        wrappers: classes that wrap a model, in addition to torch's.

    Raises:
        WrapError: names the module, who wrapped it, and what to do.
    """
    for name, submodule in module.named_modules():
        kind = type(submodule).__name__.removeprefix("FSDP" if isinstance(submodule, FSDPModule) else "")
        where = f"its module {name!r} ({kind})" if name else f"it ({kind})"
        if isinstance(submodule, (*wrappers, *_TORCH_WRAPPERS)):
            raise WrapError(
                f"the model cannot be wrapped again: {where} is a data-parallel wrapper already; "
                + ("wrap its .module" if not name else "wrap the whole model once, from plain modules")
            )
        if not isinstance(submodule, FSDPModule):
            continue
        if submodule in _sharded_here:
            raise WrapError(
                f"the model cannot be sharded again: {where} is sharded already, by another wrapper of this library; "
                "wrap the plain model once, and keep what wrap_model returned"
            )
        raise WrapError(
            f"the model cannot be sharded again: {where} is sharded already, by a call of torch's fully_shard; drop "
            "that call: the wrapper shards children before their parents by itself. Name the class "
            f"{kind} in sub_modules_to_wrap, or in _fsdp_modules of the model, to make it a unit"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "has_buffer"):
            raise WrapError(
                f"parameter {name} is in the buffers of a wrapper already, a DistributedDataParallel of this "
                "library; wrap the plain model once"
            )


def reject_changed(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Raises unless a model has the parameters with which it was wrapped, and no more that are trained.

    Args:
        names: name of each parameter that the wrapper trains. A parameter may have several forms.

    Raises:
        WrapError: a parameter was replaced, added, removed, tied or made trainable since.
    """
    params = dict(managed_parameters(module))
    names_in_model = {names.get(param) for param in params.values()}
    added = [name for name, param in params.items() if param.requires_grad and param not in names]
    removed = [name for name in names.values() if name not in names_in_model]
    if added or removed:
        change = "was replaced, added or made trainable" if added else "was removed, or tied to another,"
        raise WrapError(
            f"parameter {(added + removed)[0]} {change} after the model was wrapped, so that its gradient is never "
            "reduced; wrap the finished model"
        )


Description = dict[str, str]
"""Description of a rank's model: values by the name in messages, in the model's order."""


def reject_different_models(plan: Plan) -> None:
    """Raises, on every rank of the group, unless all of them wrap the same model with the same settings.

    Without it the first collective whose sizes differ would hang, fail with a message about bytes, or mix up tensors.
    The ranks compare a hash of the model in one small collective, and exchange descriptions only if it differs.

    Args:
        plan: its settings, its units, and the model, which is not wrapped yet and may be on the meta device.

    Raises:
        WrapError: names the first difference, and the value of each rank.
    """
    group = plan.groups.whole
    if group.size() == 1:
        return
    mine = _describe(plan)
    if _is_equal_over_ranks(mine, group):
        return
    name, values = _first_difference(Ranks(group).all_gather(mine))
    differing = join_parts(texts_by_rank(enumerate(values)))
    raise WrapError(
        f"the ranks of a data-parallel group wrap different models, first in {name}: {differing}. Build the same "
        "model from the same settings on every rank (ranks are counted within the group)"
    )


def _describe(plan: Plan) -> Description:
    """Returns everything that must be equal on all ranks, except the values of parameters."""
    (module,), described = plan.root.modules, dict(plan.compared_settings)
    described["the model's class"] = type(module).__name__
    units = {", ".join(unit.names) or "root": unit for unit in plan.units if unit.is_gathered}
    unit_of = {param.name: f", unit {name}" for name, unit in units.items() for param in unit.params}
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if kind_of(parameter) == "ignored":
            continue
        first = first_name.setdefault(parameter, name)
        kind, tie = "" if parameter.requires_grad else ", frozen", f", tied to {first}" if first != name else ""
        shape = f"{list(parameter.shape)} {dtype_name(parameter.dtype)}"
        described[f"parameter {name}"] = f"{shape}{kind}{unit_of.get(first, '')}{tie}"
    for name, buffer in module.named_buffers():
        described[f"buffer {name}"] = f"{list(buffer.shape)} {dtype_name(buffer.dtype)}"
    described["the units' order"] = "; ".join(units) or "none"
    return described


def _is_equal_over_ranks(description: Description, group: dist.ProcessGroup) -> bool:
    digest = hashlib.sha256(json.dumps(list(description.items())).encode()).digest()
    pieces = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4)]
    # The minimum equals the maximum only if all are equal. One all-reduce, which a simulated group supports too.
    extremes = torch.tensor(
        [*pieces, *(-piece for piece in pieces)], dtype=torch.int64, device=device.current_device()
    )
    all_reduce_by_backend(extremes, group, what="the hash of the model's structure", op=dist.ReduceOp.MIN)
    smallest, largest = extremes.view(2, -1).tolist()
    return bool(smallest == [-piece for piece in largest])


def _first_difference(everyone: list[Description]) -> tuple[str, list[str]]:
    """Returns the name of the first entry that differs, and each rank's value."""
    for name in dict.fromkeys(name for description in everyone for name in description):
        values = [description.get(name, "absent") for description in everyone]
        if len(set(values)) > 1:
            return name, values
    return "the order of its parameters", [", ".join(list(d)[-3:]) for d in everyone]
