"""Gives a wrapped model equal initial values on all ranks: values of the first rank, or drawn from its seeds.

    start = InitialValues(module, groups)
    start.equalize()                        # before sharding: broadcasts tensors that every rank has
    shard_model(module, ...)
    start.allocate()                        # the rest
    start.fill()                            # draws it by name, or receives it, tensor by tensor

The first of the ranks that have a tensor decides; those of experts are other ranks. All of them get a tensor that it
has: in place if all have storage, else after sharding, one tensor at a time, so that a rank that started on the meta
device never has the whole model. All draw a tensor that it has on the meta device from its seeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...base import device
from ...base.errors import WrapError
from ...base.initialization import allocate_meta_tensors, initialize_parameters, performs_initialization, root_seed
from ...base.parameters import copy_shard, local_part
from ...comm.collectives import all_reduce_by_backend, broadcast_by_backend
from ...comm.messages import overlaps_itself, write_back
from ..groups import DataParallelGroups, managed_parameters


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors, in place, with the values of the group's first rank. The order is the same on all ranks.

    Sends the local shard of a DTensor: ranks of the group must have the same shard. Skips tensors on the meta device.
    Copies a tensor on another device to the one that this process computes on, so that all ranks send from the same
    kind of device.
    """
    if group.size() == 1:
        return
    for tensor in tensors:
        if not tensor.is_meta:
            local = local_part(tensor.detach())
            message = local.to(device.current_device())
            broadcast_by_backend(message, group, what="initial values")
            write_back(local, message)


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrites persistent buffers with the values of the group's first rank, by one collective for each dtype."""
    if group.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                by_dtype[buffer.dtype].append(local_part(buffer))
    for buffers in by_dtype.values():
        message = torch.cat([buffer.reshape(-1).to(device.current_device()) for buffer in buffers])
        broadcast_by_backend(message, group, what="the model's buffers")
        for buffer, values in zip(buffers, message.split([buffer.numel() for buffer in buffers]), strict=True):
            write_back(buffer, values)


def share_init_seeds(module: nn.Module, group: dist.ProcessGroup) -> int:
    """Replaces every module's `init_seed` by the first rank's of the group. Returns the model's seed."""
    owners = [owner for owner in module.modules() if isinstance(getattr(owner, "init_seed", None), int)]
    seeds = [root_seed(module), *(owner.init_seed for owner in owners)]
    message = torch.tensor(seeds, dtype=torch.int64, device=device.current_device())
    broadcast_tensors([message], group)
    first, *others = message.tolist()
    for owner, seed in zip(owners, others, strict=True):
        owner.init_seed = seed
    return int(first)


class InitialValues:
    """Makes a model's parameters and buffers equal over their replicas. Every rank calls every method.

    Args:
        module: the model; on each rank wholly, partly or not at all on the meta device.
        groups: the ranks of the same model (replicas, or shards of one), and of the same experts.
        from_first_rank: if False, ranks keep their tensors, which the caller knows to be equal; tensors on the meta
            device are drawn from each rank's own seeds.
    """

    def __init__(self, module: nn.Module, groups: DataParallelGroups, *, from_first_rank: bool = True) -> None:
        self._module, self._group, self._tp_group = module, groups.whole, groups.model.tp
        self._follows_first = from_first_rank and groups.whole.size() > 1
        tensors = _named_tensors(module)
        # The ranks that have each tensor, by name.
        self._group_of = {name: groups.of(tensor).whole for name, tensor in tensors.items()}
        flags = [(name, tensor.is_meta, tensor.is_meta) for name, tensor in tensors.items()]
        if self._follows_first:
            flags = [flag for group in dict.fromkeys(self._group_of.values()) for flag in self._agree(tensors, group)]
        # Names of tensors that each rank draws from seeds, and names of tensors that it receives from the first rank.
        self._drawn_names = [name for name, first, _ in flags if first]
        self._received_names = [name for name, first, anywhere in flags if anywhere and not first]
        names_in_memory = [name for name, _, anywhere in flags if not anywhere]
        # The module's tensors that every rank has, by name. `equalize` broadcasts and clears them.
        self._common_tensors = {name: tensors[name] for name in names_in_memory} if self._follows_first else {}
        # On the first rank, the whole tensors that other ranks receive. They share the model's memory, and keep it
        # alive after sharding, until `fill` has sent them.
        firsts = (name for name in self._received_names if self._group_of[name].rank() == 0)
        self._whole = {name: tensors[name].detach() for name in firsts}
        sharded = [name for name, tensor in self._whole.items() if isinstance(tensor, DTensor)]
        if sharded:
            raise WrapError(
                f"{sharded[0]} is a DTensor on the first rank and on the meta device elsewhere; start all ranks on "
                "meta, and load the values by shardstack.dist_checkpointing.load_model_state_dict"
            )
        # Shapes and dtypes before the model is sharded, to receive whole tensors into.
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def equalize(self) -> None:
        """Broadcasts tensors that every rank has. Call it before the model is sharded."""
        for name, tensor in self._common_tensors.items():
            broadcast_tensors([tensor], self._group_of[name])
        self._common_tensors = {}

    def allocate(self, parameter_device: torch.device | str | None = None, **options: bool) -> None:
        """Allocates tensors on the meta device.

        Args:
            parameter_device: device of parameters; None means that of this process.
            options: keyword arguments of `allocate_meta_tensors`.
        """
        if self._drawn_names or self._received_names:
            allocate_meta_tensors(self._module, device.current_device(), parameter_device, **options)

    def fill(self) -> None:
        """Fills what `allocate` has allocated, one tensor at a time. Call it after the model is sharded."""
        self._draw()
        self._receive()

    def _draw(self) -> None:
        is_drawing = bool(self._drawn_names)
        if self._follows_first and len({*self._group_of.values()}) > 1:  # ranks may draw experts alone
            flags = torch.tensor(int(is_drawing), device=device.current_device())
            all_reduce_by_backend(flags, self._group, what="whether values are drawn", op=dist.ReduceOp.MAX)
            is_drawing = bool(flags)
        if not is_drawing:
            return
        seed = share_init_seeds(self._module, self._group) if self._follows_first else root_seed(self._module)
        tensors = _named_tensors(self._module)
        buffers = dict(self._module.named_buffers())
        draws = performs_initialization(self._module)
        only = [tensors[name] for name in self._drawn_names if draws or name in buffers]
        if only:
            initialize_parameters(self._module, seed, only=only, tp_group=self._tp_group)

    @torch.no_grad()
    def _receive(self) -> None:
        tensors = _named_tensors(self._module)
        for name in self._received_names:
            whole = self._whole.pop(name, None)
            if whole is None:
                shape, dtype = self._specs[name]
                whole = torch.empty(shape, dtype=dtype, device=device.current_device())
            whole = whole.to(device.current_device()).contiguous()
            broadcast_tensors([whole], self._group_of[name])
            copy_shard(whole, tensors[name])

    def _agree(
        self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> Iterator[tuple[str, bool, bool]]:
        """Yields the names of a group's tensors, whether its first rank has each on meta, and whether any rank has."""
        names = [name for name in tensors if self._group_of[name] is group]
        flags = [(tensors[name].is_meta, overlaps_itself(local_part(tensors[name]))) for name in names]
        own = torch.tensor(flags, dtype=torch.int32).view(-1, 2).t()
        of_first = own if group.rank() == 0 else torch.zeros_like(own)
        both = torch.stack([of_first, own]).to(device.current_device())
        if dist.get_backend(group) == "fake":
            both = torch.stack([own, own])  # a simulated group has no other rank
        else:
            all_reduce_by_backend(both, group, what="which values are on the meta device", op=dist.ReduceOp.MAX)
        (first, overlaps_first), (anywhere, overlaps) = both.bool().tolist()
        for name, on_first, on_any in zip(names, overlaps_first, overlaps, strict=True):
            if on_any and not on_first:
                raise WrapError(
                    f"{name} has one memory for several elements (Tensor.expand) on some ranks, and not on the first, "
                    "whose values all of them get; build it equally on all ranks"
                )
        yield from zip(names, first, anywhere, strict=True)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter that settings do not ignore, and every buffer, once, by its first name."""
    return dict(managed_parameters(module)) | dict(module.named_buffers())


def apply_to_buffers(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces every buffer of the model by ``fn(buffer)``, as ``Module.to`` does.

    A module whose attribute ``buffers_keep_dtype`` is true, because it adds up small numbers in them, as a router's
    bias, keeps their dtype and values: they only move.
    """
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                new = fn(buffer)
                is_kept = getattr(submodule, "buffers_keep_dtype", False) and new.dtype != buffer.dtype
                submodule._buffers[name] = buffer.to(new.device) if is_kept else new


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Torch's dicts of a tensor's hooks. None where there are none. The handle of a hook removes it from its dict."""


@contextmanager
def parameter_attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restores, by name, the custom attributes and the hooks of parameters that are replaced inside.

    FSDP2, ``to_empty``, ``.to(dtype)`` of sharded modules and ``assign=True`` build new parameters without Megatron's
    ``tensor_model_parallel``, ``partition_dim``, ``sequence_parallel`` and other attributes.
    """
    attributes = {
        name: vars(parameter) | {key: hooks for key in _HOOKS if (hooks := getattr(parameter, key)) is not None}
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in attributes.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
