"""What a composition gives to the wrapper and to the optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.optimizer import MegatronOptimizer, OptimizerConfig
from core.optimizer_param_scheduler import OptimizerParamScheduler
from tests.compositions.composition import Composition

STRATEGIES = {"ddp": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}

_BUCKETS: dict[str, dict[str, Any]] = {
    "one": {},
    "small": {"bucket_size": 700},  # elements, of some 6000
    "three": {"bucket_size": 2000},
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
    "a layer in fp32": {"param_name_patterns_for_fp32_local_accumulation": ("decoder.layers.0.*",)},
}


def wrapper_config(composition: Composition) -> DistributedDataParallelConfig:
    fields: dict[str, Any] = {"reduce_every_micro_batch": composition.reduces == "each micro-batch"}
    fields["offload_activations"] = composition.activations == "on the host"
    fields["replicated"] = _REPLICATED[composition.replicated]
    if composition.is_hybrid:
        fields["num_distributed_optimizer_instances"] = 2
    if composition.buffers != "read":
        fields["broadcast_buffers"] = True
    if composition.policy == "by dtypes":
        fields |= {"param_dtype": composition.precision, "reduce_dtype": "fp32"}
    else:
        fields |= _POLICIES[composition.policy]
    if not composition.is_fsdp2:
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
    fields["cpu_offload"] = composition.offload == "yes"
    if composition.wrapper == "zero3":
        fields["shard_cut"] = _CUTS.get(composition.cut, composition.cut)
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
    elif composition.optimizer == "muon":
        # Few iterations, which amplify less of what is rounding in a gradient (`compare.MUON_SLOPE`).
        fields |= {"optimizer": "muon", "lr": 2e-2, "adam_eps": 1e-3, "muon_num_ns_steps": 2}
        fields["muon_fp32_matmul_prec"] = "highest"
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


def scheduler_of(composition: Composition, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds the schedule: constant rates of the optimizer's config, or `plain_optimizer.SCHEDULE`."""
    config = optimizer_config(composition)
    lr, decay = config.lr or 0.0, config.weight_decay
    if composition.schedule == "constant":
        fields: dict[str, Any] = {"init_lr": lr, "min_lr": lr, "lr_warmup_steps": 0, "lr_decay_style": "constant"}
        fields |= {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}
    else:
        fields = {"init_lr": 0.25 * lr, "min_lr": 0.1 * lr, "lr_warmup_steps": 1, "lr_decay_style": "linear"}
        fields |= {"start_wd": 0.5 * decay, "end_wd": 1.5 * decay, "wd_incr_style": "linear"}
    return OptimizerParamScheduler(optimizer, max_lr=lr, lr_decay_steps=4, wd_incr_steps=4, **fields)
