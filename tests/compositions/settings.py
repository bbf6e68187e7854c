"""What a composition gives to the wrapper and to the optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.optimizer import OptimizerConfig
from tests.compositions.composition import Composition

STRATEGIES = {"ddp": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}

_BUCKETS: dict[str, dict[str, Any]] = {
    "one": {},
    "small": {"bucket_size": 700},  # elements, of some 6000
    "three": {"num_buckets": 3},
    "padded": {"bucket_size": 2000, "pad_buckets_for_high_nccl_busbw": True},
}
_OVERLAPS: dict[str, dict[str, Any]] = {
    "none": {},
    "gradients": {"overlap_grad_reduce": True},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
_OVERRIDES = {
    "none": (),
    "first kept": ("decoder.layers.0=False",),
    "all but first kept": ("*=False", "decoder.layers.0=True"),
    "root freed": ("=True", "decoder.layers.1=True"),
}
_CUTS = {"blocks": "block:8"}
_REPLICATED: dict[str, tuple[str, ...]] = {"nothing": (), "an mlp": ("decoder.layers.1.mlp.*",), "norms": ("*norm*",)}
DECAYS = {"exponentially": 0.75, "equally": None}
_POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce in fp32": {"grad_reduce_in_fp32": True},
    "fp32 accumulation": {"reduce_scatter_with_fp32_accumulation": True},
    "a layer in fp32": {"param_name_patterns_for_fp32_local_accumulation": ("decoder.layers.0.*",)},
}


def wrapper_config(composition: Composition) -> DistributedDataParallelConfig:
    fields: dict[str, Any] = {"reduce_every_micro_batch": composition.reduces == "each micro-batch"}
    fields["offload_activations"] = composition.activations == "on the host"
    fields["replicated"] = _REPLICATED[composition.replicated]
    if composition.is_hybrid:
        fields["num_distributed_optimizer_instances"] = 2
    if composition.policy == "by dtypes":
        fields |= {"param_dtype": composition.precision, "reduce_dtype": "fp32", "output_dtype": "fp32"}
    else:
        fields |= _POLICIES[composition.policy]
    if not composition.is_fsdp2:
        fields["average_in_collective"] = composition.average == "in the collective"
        fields["data_parallel_sharding_strategy"] = STRATEGIES[composition.wrapper]
    if composition.wrapper not in ("fsdp2", "zero3"):
        fields |= _BUCKETS[composition.buckets] | _OVERLAPS[composition.overlap]
        return DistributedDataParallelConfig(**fields)
    fields |= {
        "reshard_after_forward": {"yes": True, "no": False, "two ranks": 2}[composition.reshard],
        "reshard_overrides": _OVERRIDES[composition.overrides],
        "forward_prefetch": int(composition.forward_prefetch),
        "backward_prefetch": int(composition.backward_prefetch),
    }
    fields |= {"cpu_offload": composition.offload == "yes", "pin_memory": False}
    if composition.wrapper == "zero3":
        outer = "optim" if composition.outer == "optim" else "no_shard"
        fields |= {"shard_cut": _CUTS.get(composition.cut, composition.cut), "outer_dp_sharding_strategy": outer}
        return FullyShardedDataParallelConfig(**fields)
    recompute = {"units": "full", "products of units": "selective"}.get(composition.recompute, "none")
    return TorchFullyShardedDataParallelConfig(
        **fields,
        keep_gathered_between_micro_batches=composition.kept,  # type: ignore[arg-type]
        collectives=composition.collectives,  # type: ignore[arg-type]
        activation_checkpointing=recompute,  # type: ignore[arg-type]
        compile_units=composition.compiled == "units",
    )


def optimizer_config(composition: Composition) -> OptimizerConfig:
    fields: dict[str, Any] = {
        "clip_grad": 0.5 if composition.clip == "yes" else 0.0,
        "weight_decay": 0.0 if composition.decay == "none" else 0.1,
    }
    if composition.optimizer == "adam":
        # A large epsilon: where a gradient is all rounding, Adam would make a whole step of it.
        fields |= {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3}
    else:
        momentum = 0.9 if composition.optimizer in ("sgd", "torch's sgd") else 0.0
        fields |= {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": momentum}
    if composition.precision == "bf16":
        fields["bf16"] = True
    elif composition.precision == "fp16":
        fields |= {"fp16": True, "initial_loss_scale": 2.0**7, "loss_scale_window": 2, "hysteresis": 1}
    return OptimizerConfig(**fields)


def parameter_groups(composition: Composition) -> dict[str, Any]:
    """Returns the arguments that make groups of parameters: other rates and other rules of weight decay."""
    found: dict[str, Any] = {}
    if composition.decay == "all":
        found["no_weight_decay_cond"] = lambda name, shape: False
    if composition.rates == "two":
        found |= {"scale_lr_cond": lambda name, shape: "layers.1" in name, "lr_mult": 0.5}
    return found


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter decays where matrices do; biases of experts are `[experts, out]`."""
    return parameter.ndim > 1 and not name.endswith(".bias")
