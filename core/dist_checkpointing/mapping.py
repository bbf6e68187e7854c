"""Megatron-LM's names for sharded tensors; each raises an error that says what to use instead."""

from __future__ import annotations

from ..absent_names import absent_names

_DTENSORS = "state dicts hold tensors and DTensors of the whole model; core.dist_checkpointing.model_state_dict"

__getattr__ = absent_names(
    __name__,
    {
        "ShardedTensor": _DTENSORS,
        "ShardedObject": _DTENSORS,
        "ShardedStateDict": _DTENSORS,
        "ShardedTensorFactory": _DTENSORS,
        "LocalNonpersistentObject": "save takes metadata next to the tensors",
    },
)
