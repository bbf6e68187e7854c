"""What a rank has of a model, as Megatron-LM's ``--save`` and ``--load`` take it.

A rank that has a run of a tensor's elements gives Megatron-LM the boxes that the run is made of, with their places in
the whole, under the names that its replicas write. Nothing is gathered, and nothing in the files says how the model
was sharded: any number of ranks, any wrapper of this adapter and Megatron-LM's own replicas continue from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core import utils as megatron_utils
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ...base.errors import CheckpointError
from ...base.parameters import kept_range
from ...dist_checkpointing.global_view import boxes_of_range, held_boxes
from ...distributed import _BaseDataParallel

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
"""What Megatron-LM's `sharded_state_dict` has of a tensor: its name and place in a checkpoint."""


def held_pieces(
    wrapper: _BaseDataParallel, entry: Entry, values: Tensor, start: int, prefix: str = ""
) -> dict[str, ShardedTensor]:
    """Returns the boxes of a tensor that this rank has, for Megatron-LM's `save` and `load`.

    Args:
        entry: of the parameter, as if this rank had all of it.
        values: `[n]`, the elements from `start` on of the parameter, or of a tensor of its shape. Shared, not copied.
        prefix: goes before the name in the checkpoint.

    Raises:
        CheckpointError: a tensor that Megatron-LM stores in parts that are no runs of it.
    """
    whole = torch.empty(entry.data.shape, dtype=values.dtype, device="meta")
    changes: dict[str, Any] = {"key": prefix + entry.key, "data": whole}
    if isinstance(entry, ShardedTensorFactory):
        parts = [*nested_values({"": replace(entry, **changes).build()})]
    else:
        parts = [replace(entry, **changes, dtype=values.dtype)]
    replicas = wrapper.plan.groups.of(entry.data).replicate
    replica = (0 if replicas is None else replicas.rank(),)
    pieces = dict[str, ShardedTensor]()
    for part in parts:
        if not part.data.is_contiguous():
            raise CheckpointError(
                f"{part.key} is stored in parts that are no runs of its elements, of which a rank has one; save under "
                "Megatron-LM's replicas"
            )
        first, outer = part.data.storage_offset(), (0,) * part.prepend_axis_num
        at, end = max(start, first), min(start + len(values), first + part.data.numel())
        for offsets, sizes in boxes_of_range(part.local_shape, at - first, end - first):
            shape, after = (*(1 for _ in outer), *sizes), at + math.prod(sizes)
            pieces[str(len(pieces))] = replace(
                part,
                data=values[at - start : after - start].view(shape),
                local_shape=shape,
                global_offset=tuple(map(sum, zip(part.global_offset, (*outer, *offsets), strict=True))),
                axis_fragmentations=None,  # boxes are no regular grid
                prepend_axis_num=0,
                replica_id=part.replica_id if wrapper.plan.is_replicated else (*part.replica_id[:-1], *replica),
            )
            at = after
    return pieces


def fill(values: Tensor, loaded: Mapping[str, Tensor]) -> None:
    """Copies what was loaded in the place of `held_pieces`, which may be in `values` already."""
    values.copy_(torch.cat([loaded[str(i)].reshape(-1).to(values.device) for i in range(len(loaded))]))


def own_elements(parameter: Tensor) -> tuple[Tensor, int]:
    """Returns the elements of a parameter that this rank has, and the first one's place."""
    if not isinstance(parameter, DTensor):
        return kept_range(parameter) or (parameter.detach().view(-1), 0)
    ((offsets, rows),) = held_boxes(parameter)
    return rows.view(-1), offsets[0] * math.prod(parameter.shape[1:])


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) or (isinstance(tensor, Tensor) and kept_range(tensor) is not None)


def whole_model_state(wrapper: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns Megatron-LM's `sharded_state_dict` of a model, as if this rank had whole parameters."""
    model: Any = megatron_utils.unwrap_model(wrapper)
    has_dtensor = megatron_utils.HAVE_DTENSOR
    megatron_utils.HAVE_DTENSOR = False  # else 0.16 takes the local part of a DTensor
    try:
        state: dict[str, Any] = type(model).sharded_state_dict(model, *args, **kwargs)
        return state
    finally:
        megatron_utils.HAVE_DTENSOR = has_dtensor


class ModelInPieces(_BaseDataParallel):
    """A wrapper whose model is saved and loaded by what this rank has of sharded parameters."""

    def save_in_pieces(self) -> None:
        """Replaces the model's `sharded_state_dict`, which Megatron-LM calls without the wrapper."""

        def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            state = whole_model_state(self, *args, **kwargs)
            for name, entry in state.items():
                if isinstance(entry, Entry) and _is_sharded(entry.data):
                    state[name] = held_pieces(self, entry, *own_elements(entry.data))
            return {name: entry for name, entry in state.items() if entry != {}}

        vars(megatron_utils.unwrap_model(self))["sharded_state_dict"] = sharded_state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies what Megatron-LM has loaded: in pieces, or whole as from its format ``torch``.

        Returns:
            Missing and unexpected keys. Extra state, and parameters that this rank has nothing of, do not count.

        Raises:
            CheckpointError: there are such keys, and `strict`.
        """
        tensors = megatron_utils.unwrap_model(self).state_dict(keep_vars=True)
        if any(_is_sharded(tensors.get(name)) and isinstance(value, Tensor) for name, value in state_dict.items()):
            return super().load_state_dict(state_dict, strict, assign)
        has_part = {name: isinstance(t, Tensor) and len(own_elements(t)[0]) > 0 for name, t in tensors.items()}
        keys = _IncompatibleKeys(
            [name for name, counts in has_part.items() if counts and name not in state_dict],
            [name for name in state_dict if name not in tensors and not name.endswith("_extra_state")],
        )
        if strict and any(keys):
            raise CheckpointError(
                f"load_state_dict of {type(self).__name__}: missing keys: {', '.join(keys.missing_keys) or 'none'}; "
                f"unexpected keys: {', '.join(keys.unexpected_keys) or 'none'}; load a state of this model, or give "
                "strict=False"
            )
        for name, value in ((name, value) for name, value in state_dict.items() if name in tensors):
            if isinstance(value, dict):
                fill(own_elements(tensors[name])[0], value)
            elif isinstance(value, Tensor):
                tensors[name].copy_(value)
        self.engine.updated()
        return keys
