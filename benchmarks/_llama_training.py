"""A training step of a GPT of Llama's shape: under this project's wrappers, and by torch's own means."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from _llama import Preset, build_on_device, make_batches
from torch import nn

TORCHS = ("bare", "fully_shard")
"""Without this project's wrappers and optimizer: no wrapper, or torch's `fully_shard` of each layer and the root."""

WRAPPERS = (*TORCHS, "ddp", "zero3", "fsdp2")
"""What may be around the model."""

LEARNING_RATE, DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0


def model_config(preset: Preset, fields: dict[str, Any]) -> Any:
    """Returns the config of a preset's model: bf16, no biases and no dropout, unless `fields` say otherwise."""
    from core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=preset.layers,
        hidden_size=preset.hidden,
        num_attention_heads=preset.heads,
        num_query_groups=preset.groups,
        ffn_hidden_size=preset.ffn,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func="silu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rotary_base=500_000.0,
        perform_initialization=False,
        **{"bf16": True} | fields,
    )


class Training:
    """A model, its optimizer, and micro-batches that repeat each step.

    Args:
        model_fields: of the model's config.
        wrapper_fields: of the wrapper's config; of these `TORCHS` take `compile_units` alone.
        wrapper: one of `WRAPPERS`.

    Raises:
        ValueError: one of `TORCHS` is given another field of a wrapper.
    """

    model: nn.Module
    """What a step calls. Its forward is the first work of a step."""

    optimizer: Any
    """Its `start_step` makes the update from the parameters' gradients."""

    def __init__(
        self, preset: Preset, model_fields: dict[str, Any], wrapper_fields: dict[str, Any], wrapper: str = "ddp"
    ) -> None:
        from core import parallel_state
        from core.base import device
        from core.rendezvous import default_group

        default_group.init_process_group()
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        self.device, self.preset = device.current_device(), preset
        config = model_config(preset, model_fields)
        gpt = build_on_device(preset, config, self.device)
        self.parameters = sum(parameter.numel() for parameter in gpt.parameters())
        self.batches = make_batches(preset, self.device)
        self.last: Any = None
        if wrapper in TORCHS:
            self._train_by_torch(gpt, config, wrapper_fields, wrapper)
        else:
            self._train_wrapped(gpt, config, wrapper_fields, wrapper)

    def _train_wrapped(self, gpt: Any, config: Any, fields: dict[str, Any], wrapper: str) -> None:
        from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
        from core.distributed.fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
        from core.optimizer import OptimizerConfig, get_megatron_optimizer
        from core.optimizer_param_scheduler import OptimizerParamScheduler
        from core.training.train_step import train_step
        from core.transformer.module import Float16Module

        kinds: dict[str, Any] = {
            "ddp": DistributedDataParallelConfig,
            "zero3": FullyShardedDataParallelConfig,
            "fsdp2": TorchFullyShardedDataParallelConfig,
        }
        # A wrapper that shards parameters keeps them in fp32, and casts what it gathers.
        module = Float16Module(config, gpt) if config.bf16 and wrapper == "ddp" else gpt
        self.model = model = wrap_model(module, config, kinds[wrapper](**fields))
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
            bf16=config.bf16,
        )
        self.optimizer = get_megatron_optimizer(settings, [model])
        constant = {"lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant"}
        decay = {"start_wd": DECAY, "end_wd": DECAY, "wd_incr_steps": 0, "wd_incr_style": "constant"}
        scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=LEARNING_RATE, max_lr=LEARNING_RATE, min_lr=LEARNING_RATE, **constant, **decay
        )
        batches = itertools.cycle(self.batches)

        def step() -> None:
            self.last = train_step(model, self.optimizer, scheduler, batches, len(self.batches))

        self.step = step
        self.loss = lambda: float(self.last.result().loss)

    def _train_by_torch(self, gpt: Any, config: Any, fields: dict[str, Any], wrapper: str) -> None:
        if refused := fields.keys() - {"compile_units"}:
            raise ValueError(f"{', '.join(sorted(refused))} cannot be had with {wrapper}; choose another --wrapper")
        from core.transformer.module import Float16Module

        if fields.get("compile_units"):
            for layer in gpt.decoder.layers:
                layer.forward = torch.compile(layer.forward)
        is_sharded = wrapper == "fully_shard"
        if is_sharded:
            shard_by_torch(gpt, torch.bfloat16 if config.bf16 else None, self.device)
        self.model = model = Float16Module(config, gpt) if config.bf16 and not is_sharded else gpt
        self.optimizer = TorchAdamW(list(model.parameters()))

        def step() -> None:
            losses = []
            for number, batch in enumerate(self.batches, start=1):
                if is_sharded:
                    model.set_requires_gradient_sync(number == len(self.batches))
                losses.append(_mean_loss(model, batch) / len(self.batches))
                losses[-1].backward()
            self.optimizer.start_step()
            self.last = torch.stack([loss.detach() for loss in losses]).sum()

        self.step = step
        self.loss = lambda: float(self.last)


def _mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    total: torch.Tensor = (losses.float() * batch["loss_mask"]).sum()
    return total / batch["loss_mask"].sum().clamp(min=1)


def shard_by_torch(gpt: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """Applies torch's `fully_shard` to each layer and the root, in the dtypes of this project's FSDP2 wrapper.

    Args:
        dtype: of computation and of the reduction of gradients. None keeps fp32.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in gpt.decoder.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype))
    output_dtype = None if dtype is None else torch.float32
    fully_shard(gpt, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype, output_dtype))


class TorchAdamW:
    """Clips and updates with torch's own parts: fp32 masters where parameters are in half precision, fused AdamW."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        is_fp32 = all(one.dtype is torch.float32 for one in parameters)
        self.masters = parameters if is_fp32 else [nn.Parameter(one.detach().float()) for one in parameters]
        groups = [
            {"params": [one for one in self.masters if one.ndim > 1], "weight_decay": DECAY},
            {"params": [one for one in self.masters if one.ndim == 1], "weight_decay": 0.0},
        ]
        self.rule = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)

    @torch.no_grad()
    def start_step(self) -> None:
        """Updates from the parameters' gradients, and drops these."""
        if self.masters is not self.parameters:
            wide = [torch.empty_like(master) for master in self.masters]
            torch._foreach_copy_(wide, [parameter.grad for parameter in self.parameters])
            for master, parameter, grad in zip(self.masters, self.parameters, wide, strict=True):
                master.grad, parameter.grad = grad, None
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.rule.step()
        self.rule.zero_grad()
        if self.masters is not self.parameters:
            torch._foreach_copy_(self.parameters, self.masters)
