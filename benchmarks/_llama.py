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


class Training:
    """A model, its optimizer, and batches that repeat."""

    def __init__(self, preset: Preset, model_fields: dict[str, Any], wrapper_fields: dict[str, Any]) -> None:
        from core import device, parallel_state
        from core.distributed import DistributedDataParallelConfig, wrap_model
        from core.models.gpt import GPTModel
        from core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
        from core.transformer import TransformerConfig
        from core.transformer.module import Float16Module

        device.init_process_group()
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        self.device, self.preset = device.current_device(), preset
        torch.manual_seed(1)
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
            **{"bf16": True} | model_fields,
        )
        gpt = GPTModel(
            config,
            vocab_size=preset.vocabulary,
            max_sequence_length=preset.sequence,
            share_embeddings_and_output_weights=preset.is_tied,
            position_embedding_type="rope",
        )
        module = (Float16Module(config, gpt) if config.bf16 else gpt).to(self.device)  # cast before it moves
        self.model = wrap_model(module, config, DistributedDataParallelConfig(**wrapper_fields))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-4, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0, bf16=config.bf16
            ),
            [self.model],
        )
        constant = {"lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant"}
        decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0, "wd_incr_style": "constant"}
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=1e-4, max_lr=1e-4, min_lr=1e-4, **constant, **decay
        )
        self.batches = itertools.cycle([self._batch()])
        self.last: Any = None

    def _batch(self) -> dict[str, torch.Tensor]:
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

    def step(self) -> None:
        from core.training.train_step import train_step

        self.last = train_step(self.model, self.optimizer, self.scheduler, self.batches, 1)

    def loss(self) -> float:
        """Returns the loss of the last step, after waiting for the device."""
        return float(self.last.result().loss)
