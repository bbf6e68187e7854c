"""Guards of a model before it is changed: what no wrapper, or not FSDP2, can train as the plain module would.

`reject_wrapped` refuses models that are wrapped or sharded already, before a wrapper reads anything of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ...base.errors import ParallelConfigError, WrapError
from ...base.module_protocol import rank_dependence
from ..distributed_data_parallel_config import EngineKind
from ..fsdp2.shard_model import SHARDED_HERE
from ..groups import is_expert_parameter, managed_parameters
from .guard import Guard, PlainModel


class ExpertsHaveRanks(Guard):
    """Megatron-LM's marks of experts (``allreduce=False``) come with the ranks that have replicas of the same experts.

    Else a wrapper would overwrite one expert by another. Without process groups the model's config says whether
    experts are cut over ranks (``expert_model_parallel_size``).
    """

    def at_wrap(self, model: PlainModel) -> None:
        size = getattr(model.config, "expert_model_parallel_size", 1) or 1
        are_apart = model.groups.model.experts_are_apart or size > 1
        if model.groups.experts is not None or not are_apart:
            return
        for name, parameter in model.module.named_parameters():
            if is_expert_parameter(parameter):
                raise ParallelConfigError(
                    f"parameter {name} is marked allreduce=False, as an expert's, with experts cut over ranks, and "
                    "the given ranks are those of dense parameters; give pg_collection with expt_dp, or call "
                    "initialize_model_parallel with expert_model_parallel_size and give no process_group"
                )


class ReproducibleModel(Guard):
    """No module computes with this rank's number, where ``reproducible_across_ranks`` is set."""

    def at_wrap(self, model: PlainModel) -> None:
        if model.ddp_config.reproducible_across_ranks and (dependence := rank_dependence(model.module)):
            raise ParallelConfigError(f"reproducible_across_ranks is set, and {dependence}")


class DenseOnOneDevice(Guard):
    """Trained parameters are real and on one device, and parameters and buffers are dense."""

    def at_wrap(self, model: PlainModel) -> None:
        module = model.module
        for name, parameter in managed_parameters(module):
            if parameter.is_complex() and parameter.requires_grad:
                raise WrapError(
                    f"parameter {name} is complex, which gradient norms and updates do not know; hold its real and "
                    "imaginary parts in a real parameter, and view that with torch.view_as_complex"
                )
        for name, tensor in itertools.chain(managed_parameters(module), module.named_buffers()):
            if tensor.layout != torch.strided:
                raise WrapError(
                    f"{name} has the layout {tensor.layout}, which ranks cannot send each other; register a dense "
                    "tensor, or keep a constant in an attribute that is no buffer"
                )
        devices = {p.device: name for name, p in managed_parameters(module) if p.requires_grad and not p.is_meta}
        if len(devices) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise WrapError(
                f"parameters are trained on several devices ({places}), whose backwards run at the same time; move "
                "the model to one device, or freeze those of the others"
            )


class MemoryIsNotShared(Guard):
    """No two parameters share memory without being one."""

    def at_wrap(self, model: PlainModel) -> None:
        by_storage: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, parameter in model.module.named_parameters():
            if type(parameter.data) is Tensor and parameter.layout == torch.strided and parameter.numel():
                start = int(parameter.storage_offset())
                last = sum(
                    (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
                )
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


class FitForFsdp2(Guard):
    """FSDP2 can shard, gather and reduce every parameter."""

    def at_wrap(self, model: PlainModel) -> None:
        if model.engine is not EngineKind.FSDP2:
            return
        for name, parameter in managed_parameters(model.module):
            problem = ""
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
                problem = f"is on a mesh of {parameter.device_mesh.ndim} axes already"
            elif parameter.dim() == 0:
                problem = "is a scalar, which cannot be sharded; give it the shape (1,)"
            elif parameter.grad is not None:
                problem = (
                    "has a .grad from before the model is wrapped, which FSDP2 drops; set it to None (zero_grad) "
                    "before wrapping, or use DistributedDataParallel, which adds to it"
                )
            elif parameter.numel() == 0:
                problem = (
                    f"has the shape {list(parameter.shape)}, without elements, which FSDP2 cannot gather; drop it, or "
                    "use DistributedDataParallel"
                )
            elif not parameter.is_contiguous():
                problem = (
                    "is not contiguous in memory, as FSDP2 needs it; assign parameter.data = "
                    "parameter.data.contiguous() before wrapping, or use DistributedDataParallel"
                )
            if problem:
                raise WrapError(f"parameter {name} {problem}")
        for name, submodule in model.module.named_modules():
            if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
                raise WrapError(
                    f"module {name or 'root'} has sparse gradients (sparse=True), which FSDP2 cannot reduce; use "
                    "sparse=False, or DistributedDataParallel"
                )


_TORCH_WRAPPERS = (TorchDistributedDataParallel, FullyShardedDataParallel)


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
        if submodule in SHARDED_HERE:
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
