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

from ...base.module_protocol import unwrap_model
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.global_view import FlatRange, local_tensor
from ...distributed import _BaseDataParallel
from ...weights import WeightStream
from ..bridge.trained import Trained


def whole_tensors(trained: Trained, merges: bool, base_sync_done: bool) -> Iterator[tuple[str, Tensor]]:
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


def shards(wrapper: _BaseDataParallel) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """Yields name, this rank's elements in bf16, and place of each tensor, in an order that is equal on every rank.

    A place lists in ``hf_slots`` what goes out of the tensor: itself, or experts one by one, which follow each other
    in it.

    Args:
        wrapper: a wrapped model without adapters.
    """
    model, stream = unwrap_model(wrapper), WeightStream(wrapper, dtype=torch.bfloat16)
    slots: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for tensor in stream.outgoing:
        slots.setdefault(tensor.sources[0], []).append((renamed(tensor.name, model), tuple(tensor.shape)))
    stream.check_between_steps()
    for name, view in stream.views.items():
        spec = ShardSpec.from_param(view)
        if isinstance(view, FlatRange):
            groups = wrapper.plan.groups.of(model.get_parameter(name))
            offsets = view.boxes[0][0] if view.boxes else ()
            strides = torch.empty(view.shape, device="meta").stride()
            spec.place = sum(offset * stride for offset, stride in zip(offsets, strides, strict=False))
            spec.gather_group = groups.shard
            spec.contributes = groups.replicate is None or groups.replicate.rank() == 0
        spec.hf_slots = slots[name]
        yield name, local_tensor(view).to(stream.dtypes[name]).reshape(-1), spec


def delta_entry(name: str, spec: ShardSpec, place: Any, indices: Tensor, values: Tensor) -> tuple[Any, ...]:
    """Returns changed elements in the coordinates of the tensors that go out, as verl's delta engine takes them.

    These are slots, dtype, how many elements changed in each slot, their indices in it, and their values.
    """
    slots = spec.hf_slots or []
    limits = [*itertools.accumulate((torch.Size(shape).numel() for _, shape in slots), initial=0)]
    starts = torch.tensor(limits, device=indices.device)
    flat = translate_flat_indices(indices, place)
    slot_of = torch.searchsorted(starts, flat, right=True) - 1
    counts = torch.bincount(slot_of, minlength=len(slots)).cpu()
    return slots, str(values.dtype).removeprefix("torch."), counts, (flat - starts[slot_of]).to(torch.int32), values
