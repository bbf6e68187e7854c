"""What a wrapped model starts from: the values of the first rank, or values that are still to be drawn.

    start = InitialValues(module, group)
    start.equalize()                        # before sharding: what every rank holds becomes the first one's
    shard_model(module, ...)
    start.fill()                            # storage for the rest, drawn by name, or received part by part

The first rank decides, tensor by tensor. What it holds, all get: in place where all have storage, else after sharding,
one tensor at a time, so that a rank which started on the meta device never holds the model whole. What it has on the
meta device, all draw from its seeds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ... import device
from ...errors import WrapError
from ...tensor_parallel.allocation import allocate_meta_tensors
from ...tensor_parallel.initialization import initialize_parameters
from ...tensor_parallel.partition import copy_shard
from ...transformer.module import performs_initialization, root_seed
from .broadcast import broadcast_tensors, share_init_seeds


class InitialValues:
    """Makes a model's parameters and buffers start equal over a group; every rank of it takes every step.

    Args:
        module: the model; on each rank wholly, partly or not at all on the meta device.
        group: the ranks that are to hold the same model (replicas, or shards of one).
        from_first_rank: False leaves each rank what it holds, for callers who know that it is equal; what is on the
            meta device is then drawn from each rank's own seeds.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, from_first_rank: bool = True) -> None:
        self._module, self._group = module, group
        self._follows_first = from_first_rank and group.size() > 1
        tensors = _named_tensors(module)
        on_meta = [tensor.is_meta for tensor in tensors.values()]
        of_first, of_any = self._agree(on_meta) if self._follows_first else (on_meta, on_meta)
        flags = list(zip(tensors, of_first, of_any, strict=True))
        self._drawn = [name for name, first, _ in flags if first]
        self._received = [name for name, first, anywhere in flags if anywhere and not first]
        held = [name for name, _, anywhere in flags if not anywhere]
        self._equalized = [tensors[name] for name in held] if self._follows_first else []
        # The first rank's own, kept whole while the module gets shards in their place.
        self._whole = {name: tensors[name].detach() for name in self._received if group.rank() == 0}
        sharded = [name for name, tensor in self._whole.items() if isinstance(tensor, DTensor)]
        if sharded:
            raise WrapError(
                f"{sharded[0]} is a DTensor on the first rank and on the meta device elsewhere; start all ranks on "
                "meta, and load the values by core.dist_checkpointing.load_model_state_dict"
            )
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def equalize(self) -> None:
        """Before the model is sharded."""
        broadcast_tensors(self._equalized, self._group)
        self._equalized = []

    def fill(self, parameter_device: torch.device | str | None = None) -> None:
        """After it. What starts on meta goes to this process's device, or parameters to the one given."""
        if not self._drawn and not self._received:
            return
        allocate_meta_tensors(self._module, device.current_device(), parameter_device)
        self._draw()
        self._receive()

    def _draw(self) -> None:
        if not self._drawn:
            return
        seed = share_init_seeds(self._module, self._group) if self._follows_first else root_seed(self._module)
        tensors = _named_tensors(self._module)
        buffers = dict(self._module.named_buffers())
        draws = performs_initialization(self._module)
        only = [tensors[name] for name in self._drawn if draws or name in buffers]
        if only:
            initialize_parameters(self._module, seed, only=only)

    @torch.no_grad()
    def _receive(self) -> None:
        tensors = _named_tensors(self._module)
        for name in self._received:
            whole = self._whole.pop(name, None)
            if whole is None:
                shape, dtype = self._specs[name]
                whole = torch.empty(shape, dtype=dtype, device=device.current_device())
            whole = whole.to(device.current_device()).contiguous()
            broadcast_tensors([whole], self._group)
            copy_shard(whole, tensors[name])

    def _agree(self, on_meta: list[bool]) -> tuple[list[bool], list[bool]]:
        """Returns which tensors the first rank has on meta, and which any rank has there."""
        if dist.get_backend(self._group) == "fake":
            return on_meta, on_meta  # a simulation: there is no other rank to ask
        own = torch.tensor(on_meta, dtype=torch.int32)
        of_first = own if self._group.rank() == 0 else torch.zeros_like(own)
        both = torch.stack([of_first, own]).to(device.current_device())
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        first, anywhere = both.bool().tolist()
        return first, anywhere


def start_equal(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Both steps, for a wrapper that does not shard."""
    start = InitialValues(module, group)
    start.equalize()
    start.fill()


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer once, by its first name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts every floating-point buffer of the model, in place; parameters stay."""
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(submodule, name, buffer.to(dtype))
