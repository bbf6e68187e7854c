"""Weights out of an engine in bounded memory, in Hugging Face's names: whole tensors, shards, and their changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.spec import ShardSpec, translate_flat_indices
from verl.workers.engine.utils import hf_delta_export

from ...base.module_protocol import unwrap_model
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.global_view import FlatRange, local_tensor
from ...distributed import _BaseDataParallel
from ...weights import WeightStream
from ..bridge.trained import Trained

Named = Iterator[tuple[str, Tensor]]


def whole_tensors(trained: Trained, merges: bool, base_sync_done: bool) -> Named:
    """Yields what a rollout server loads: whole tensors on every rank, one at a time.

    Args:
        merges: of a model with adapters send the sum, in bf16, as verl does. Else its base under the names of layers
            that have adapters, or once `base_sync_done` the adapters alone.
    """
    model: Any = unwrap_model(trained.wrapper)
    if merges or not hasattr(model, "peft_config"):
        for name, tensor in WeightStream(trained.wrapper):
            yield renamed(name, model), tensor.to(torch.bfloat16) if merges else tensor
    elif base_sync_done:
        yield from WeightStream(trained.wrapper, adapters="only")
    else:
        base = {name: view for name, view in trained.model_tensors().items() if "lora_" not in name}
        config, inside = model.peft_config["default"], "base_model.model."
        plain = ((name.removeprefix(inside).replace(".base_layer", ""), tensor) for name, tensor in TensorStream(base))
        named = ((renamed(replace_lora_wrapper(name, config), model), tensor) for name, tensor in plain)
        yield from unfuse_moe_params(named, model.config.model_type)


def renamed(name: str, model: Any) -> str:
    """Returns a tensor's name in the model's files, where transformers loads it under another."""
    return next(iter(convert_weight_keys({name: None}, model)))  # type: ignore[no-any-return]


class Shards:
    """This rank's pieces of a model, in bf16 as on verl's wire, and how they lie in whole tensors.

    Args:
        wrapper: a wrapped model without adapters.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        self._model = unwrap_model(wrapper)
        self._wrapper, self._stream = wrapper, WeightStream(wrapper, dtype=torch.bfloat16)
        # What goes out of each of the model's tensors: itself, or experts one by one, which follow each other in it.
        self._slots: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for tensor in self._stream.outgoing:
            slots = self._slots.setdefault(tensor.sources[0], [])
            slots.append((renamed(tensor.name, self._model), tuple(tensor.shape)))

    def __iter__(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        """Yields name, local elements and place of each tensor, in an order that is equal on every rank."""
        self._stream.check_between_steps()
        for name, view in self._stream.views.items():
            local = local_tensor(view).to(self._stream.dtypes[name]).reshape(-1)
            yield name, local, self._spec(name, view)

    def _spec(self, name: str, view: Tensor) -> ShardSpec:
        if not isinstance(view, FlatRange):
            return ShardSpec.from_param(view)
        groups = self._wrapper.plan.groups.of(self._model.get_parameter(name))
        strides = torch.empty(view.shape, device="meta").stride()
        first = view.boxes[0][0] if view.boxes else (0,) * len(strides)
        start = sum(offset * stride for offset, stride in zip(first, strides, strict=True))
        is_first = groups.replicate is None or groups.replicate.rank() == 0
        return ShardSpec(tuple(view.shape), place=start, gather_group=groups.shard, contributes=is_first)

    def changes(self, snapshots: dict[str, Tensor]) -> Iterator[Any]:
        """Yields what changed since the snapshots, which verl's function then renews."""
        return hf_delta_export(iter(self), snapshots, self._entry)  # type: ignore[no-any-return]

    def _entry(self, name: str, spec: ShardSpec, place: Any, indices: Tensor, values: Tensor) -> tuple[Any, ...]:
        """Returns changed elements in the coordinates of the tensors that go out, as verl's delta engine takes them:
        slots, dtype, how many changed in each, their indices in it, and values."""
        slots = self._slots[name]
        limits = [*itertools.accumulate((torch.Size(shape).numel() for _, shape in slots), initial=0)]
        starts = torch.tensor(limits, device=indices.device)
        flat = translate_flat_indices(indices, place)
        slot_of = torch.searchsorted(starts, flat, right=True) - 1
        counts = torch.bincount(slot_of, minlength=len(slots)).cpu()
        return (
            slots,
            str(values.dtype).removeprefix("torch."),
            counts,
            (flat - starts[slot_of]).to(torch.int32),
            values,
        )
