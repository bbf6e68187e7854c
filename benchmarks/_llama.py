"""Dense GPTs of Llama's shape: their sizes, the operations of a step, and how a step of one is trained."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Preset:
    """A model of Llama's shape, and the batch of a step."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int = 128_256
    is_tied: bool = True
    sequence: int = 4096
    samples: int = 2


PRESETS = {
    "small": Preset(2, 64, 4, 2, 160, vocabulary=512, sequence=64),
    "1b": Preset(16, 2048, 32, 8, 8192, samples=4),  # Llama 3.2 1B
    "3b": Preset(28, 3072, 24, 8, 8192),  # Llama 3.2 3B
    "4b": Preset(32, 3072, 32, 8, 9216, samples=1),
}


def matrix_parameters(preset: Preset) -> int:
    """Returns the parameters that each token is multiplied by: all but norms and the input embedding.

    A tied embedding counts once, as the projection to the vocabulary.
    """
    channels = preset.hidden // preset.heads
    attention = preset.hidden * channels * (2 * preset.heads + 2 * preset.groups)
    return preset.layers * (attention + 3 * preset.hidden * preset.ffn) + preset.vocabulary * preset.hidden


def model_flops(preset: Preset, *, causal: bool = True) -> int:
    """Returns the operations of a step's forward and backward, 2 a multiply-add, nothing counted twice.

    6 a token and parameter of a matrix: one product in forward and two in backward (Kaplan et al., 2020). Attention
    has two products in forward and four in backward over the pairs of tokens that see each other, s (s + 1) / 2 of a
    causal sequence.
    """
    tokens = preset.samples * preset.sequence
    pairs = preset.sequence * (preset.sequence + 1) // 2 if causal else preset.sequence**2
    return 6 * matrix_parameters(preset) * tokens + 12 * preset.layers * preset.hidden * preset.samples * pairs


WRAPPERS = ("bare", "ddp", "zero3", "fsdp2")
"""What may be around the model; `bare` is torch alone: no wrapper, and torch's own clipping and AdamW."""

LEARNING_RATE, DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0


class Training:
    """A model, its optimizer, and batches that repeat.

    Args:
        model_fields: of the model's config.
        wrapper_fields: of the wrapper's config; of these `bare` takes `compile_units` alone.
        wrapper: one of `WRAPPERS`.

    Raises:
        ValueError: `bare` is given another field of a wrapper.
    """

    def __init__(
        self, preset: Preset, model_fields: dict[str, Any], wrapper_fields: dict[str, Any], wrapper: str = "ddp"
    ) -> None:
        from core import parallel_state
        from core.base import device
        from core.transformer import TransformerConfig

        device.init_process_group()
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        self.device, self.preset = device.current_device(), preset
        config = TransformerConfig(
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
            **{"bf16": True} | model_fields,
        )
        gpt = build_on_device(preset, config, self.device)
        self.batch = self._make_batch()
        self.last: Any = None
        if wrapper == "bare":
            self._train_bare(gpt, config, wrapper_fields)
        else:
            self._train_wrapped(gpt, config, wrapper_fields, wrapper)

    def _train_wrapped(self, gpt: Any, config: Any, fields: dict[str, Any], wrapper: str) -> None:
        from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
        from core.distributed.fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
        from core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
        from core.training.train_step import train_step
        from core.transformer.module import Float16Module

        kinds: dict[str, Any] = {
            "ddp": DistributedDataParallelConfig,
            "zero3": FullyShardedDataParallelConfig,
            "fsdp2": TorchFullyShardedDataParallelConfig,
        }
        # A wrapper that shards parameters keeps them in fp32, and casts what it gathers.
        module = Float16Module(config, gpt) if config.bf16 and wrapper == "ddp" else gpt
        self.model = wrap_model(module, config, kinds[wrapper](**fields))
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
            bf16=config.bf16,
        )
        self.optimizer: Any = get_megatron_optimizer(settings, [self.model])
        constant = {"lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant"}
        decay = {"start_wd": DECAY, "end_wd": DECAY, "wd_incr_steps": 0, "wd_incr_style": "constant"}
        scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=LEARNING_RATE, max_lr=LEARNING_RATE, min_lr=LEARNING_RATE, **constant, **decay
        )
        batches = itertools.cycle([self.batch])

        def step() -> None:
            self.last = train_step(self.model, self.optimizer, scheduler, batches, 1)

        self.step = step
        self.loss = lambda: float(self.last.result().loss)

    def _train_bare(self, gpt: Any, config: Any, fields: dict[str, Any]) -> None:
        if refused := fields.keys() - {"compile_units"}:
            raise ValueError(
                f"{', '.join(sorted(refused))} cannot be had without a wrapper; choose one with --wrapper"
            )
        from core.transformer.module import Float16Module

        if fields.get("compile_units"):
            for layer in gpt.decoder.layers:
                layer.forward = torch.compile(layer.forward)
        model = Float16Module(config, gpt) if config.bf16 else gpt
        self.optimizer = TorchAdamW(list(model.parameters()))
        batch = self.batch

        def step() -> None:
            losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
            loss = (losses.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)
            loss.backward()
            self.optimizer.start_step()
            self.last = loss.detach()

        self.step = step
        self.loss = lambda: float(self.last)

    def _make_batch(self) -> dict[str, torch.Tensor]:
        shape = (self.preset.samples, self.preset.sequence + 1)
        tokens = torch.randint(0, self.preset.vocabulary, shape, generator=torch.Generator().manual_seed(2))
        inputs = tokens[:, :-1].contiguous()
        positions = torch.arange(self.preset.sequence).expand_as(inputs).contiguous()
        return {
            "tokens": inputs.to(self.device),
            "labels": tokens[:, 1:].contiguous().to(self.device),
            "loss_mask": torch.ones(inputs.shape, device=self.device),
            "position_ids": positions.to(self.device),
        }


def build_on_device(preset: Preset, config: Any, device: torch.device) -> torch.nn.Module:
    """Builds the model in fp32 and draws its weights on the device: on one core of a CPU 3 B take minutes."""
    from core.models.gpt import GPTModel

    with device:
        gpt: torch.nn.Module = GPTModel(
            config,
            vocab_size=preset.vocabulary,
            max_sequence_length=preset.sequence,
            share_embeddings_and_output_weights=preset.is_tied,
            position_embedding_type="rope",
        )
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.init_method_std, generator=generator)
            else:
                parameter.fill_(1.0)  # of a norm: there are no biases
    return gpt


class TorchAdamW:
    """Clips and updates with torch's own parts: fp32 masters where parameters are in half precision, fused AdamW."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        is_fp32 = all(one.dtype is torch.float32 for one in parameters)
        self.masters = parameters if is_fp32 else [torch.nn.Parameter(one.detach().float()) for one in parameters]
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
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.rule.step()
        self.rule.zero_grad()
        if self.masters is not self.parameters:
            torch._foreach_copy_(self.parameters, self.masters)
