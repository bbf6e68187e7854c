"""A small GPT, what it trains, and the config of each wrapper by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.models.gpt import GPTModel
from core.transformer.module import Float16Module
from core.transformer.pipeline_stages import pipeline_stage
from core.transformer.transformer_config import TransformerConfig

# Odd widths: two ranks divide neither the hidden size, nor the MLP's, nor the vocabulary.
HIDDEN, FFN, VOCABULARY, SEQUENCE, MICRO_BATCHES = 15, 37, 61, 13, 4

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of a micro-batch."""

_BUCKETS = {"bucket_size": 700}  # elements; the model has some 6000
_OVERLAP = {**_BUCKETS, "overlap_grad_reduce": True}
_OVERLAP_BOTH = {**_OVERLAP, "overlap_param_gather": True}
_ZERO1 = {"data_parallel_sharding_strategy": "optim"}
_ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
_HYBRID = {"num_distributed_optimizer_instances": 2}

WRAPPERS: dict[str, Mapping[str, Any]] = {
    "ddp": {},
    "ddp, overlapped": _OVERLAP,
    "zero1": _ZERO1 | _BUCKETS,
    "zero1, overlapped": _ZERO1 | _OVERLAP_BOTH,
    "zero2": _ZERO2 | _BUCKETS,
    "zero2, overlapped": _ZERO2 | _OVERLAP_BOTH,
    "zero2, every micro-batch": _ZERO2 | _BUCKETS | {"reduce_every_micro_batch": True},
    "zero3": {},
    "zero3, gathered once a step": {"reshard_after_forward": False, "forward_prefetch": 0},
    "zero3, every micro-batch": {"reduce_every_micro_batch": True, "backward_prefetch": 2},
    "fsdp2": {},
    "fsdp2, torch's collectives": {"collectives": "torch", "forward_prefetch": 0, "backward_prefetch": 0},
    "fsdp2, gathered once a step": {"keep_gathered_between_micro_batches": "all"},
    "fsdp2, offloaded": {"cpu_offload": True},
    "fsdp2, every micro-batch": {"reduce_every_micro_batch": True, "reshard_after_forward": False},
}
"""The arguments of each."""

HYBRIDS: dict[str, Mapping[str, Any]] = {
    "hybrid zero1": _HYBRID | _ZERO1 | _BUCKETS,
    "hybrid zero2, overlapped": _HYBRID | _ZERO2 | _OVERLAP_BOTH,
    "hybrid zero3": _HYBRID,
    "hybrid fsdp2": _HYBRID,
}
"""Sharded within two ranks, replicated across two."""


def ddp_config(wrapper: str, **fields: Any) -> DistributedDataParallelConfig:
    """Returns the config that asks `wrap_model` for a wrapper of the tables above, with more ``fields`` set."""
    return config_of(wrapper, **(WRAPPERS | HYBRIDS)[wrapper], **fields)


def config_of(wrapper: str, **fields: Any) -> DistributedDataParallelConfig:
    """Returns a config of the class that the name of a wrapper says."""
    kinds = {"fsdp2": TorchFullyShardedDataParallelConfig, "zero3": FullyShardedDataParallelConfig}
    return next((kind for name, kind in kinds.items() if name in wrapper), DistributedDataParallelConfig)(**fields)


@dataclass(frozen=True)
class Training:
    """A training that is the same under all wrappers."""

    optimizer: Mapping[str, Any]
    steps: int
    tied: bool = True
    precision: str = "fp32"
    """``fp32``; ``bf16``; or ``fp16`` with a dynamic loss scale that starts, and grows, too high."""
    per_token: bool = False
    """Labels are masked, more on some ranks than on others, and every token of the step weighs the same."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More of the model's config."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Sizes that `initialize_model_parallel` is given; the config has those of its fields too."""
    cut: Mapping[str, Any] = field(default_factory=dict)
    """More of the config where ranks share the model: one process has none of it."""
    length: int = SEQUENCE
    micro_batches: int = MICRO_BATCHES
    has_documents: bool = False
    """Each sequence holds two documents, which do not see each other."""
    has_average: bool = False
    """The curve has an average of the weights too."""
    prepare: Callable[[Sequence[GPTModel]], None] | None = None
    """Changes the model, or all of this rank's stages, before they are wrapped."""

    @property
    def alone(self) -> Training:
        """The same in one process."""
        return dataclasses.replace(self, groups={}, cut={})

    @property
    def is_staged(self) -> bool:
        return self.groups.get("pipeline_model_parallel_size", 1) > 1

    def build(self) -> list[GPTModel]:
        """Returns the model; or this rank's stages of it, each of which has a part."""
        known = {entry.name for entry in dataclasses.fields(TransformerConfig)}
        sizes = {name: size for name, size in self.groups.items() if name in known}
        low = {} if self.precision == "fp32" else {self.precision: True}
        fields = {"calculate_per_token_loss": self.per_token, **low, **self.fields, **sizes, **self.cut}
        turns = self.groups.get("virtual_pipeline_model_parallel_size")
        models = [
            build_gpt(self.tied, vp_stage=turn, **fields) for turn in ([None] if turns is None else range(turns))
        ]
        if self.prepare is not None:
            self.prepare(models)
        return models


def build_gpt(
    tied: bool, *, vocab: int = VOCABULARY, positions: str = "rope", vp_stage: int | None = None, **fields: Any
) -> GPTModel:
    """Returns a GPT of two layers, or this rank's stage of it, whose weights a seed decides; ``fields`` override its
    config."""
    torch.manual_seed(7)
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": 3,
            "num_query_groups": 1,
            "kv_channels": 6,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.2,
            **fields,
        }
    )
    return gpt_of(config, tied, vocab, positions=positions, vp_stage=vp_stage)


def gpt_of(
    config: TransformerConfig,
    tied: bool,
    vocab: int,
    length: int = SEQUENCE,
    *,
    positions: str = "rope",
    vp_stage: int | None = None,
) -> GPTModel:
    """Returns the GPT of a config, or this rank's stage of it."""
    stage = pipeline_stage(config, vp_stage)
    return GPTModel(
        config,
        vocab_size=vocab,
        max_sequence_length=length,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        vp_stage=vp_stage,
    )


def micro_batches(
    step: int, rank: int, masked: bool = False, length: int = SEQUENCE, number: int = MICRO_BATCHES
) -> list[Batch]:
    """Makes tokens and labels, `[2, s]`, of a sequence that can be learned: each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sequence = [torch.randint(0, VOCABULARY, (number, 2), generator=generator)]
    for _ in range(length):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    whole_sequence = torch.stack(sequence, dim=-1)
    tokens, labels = whole_sequence[..., :-1].contiguous(), whole_sequence[..., 1:].contiguous()
    if masked:
        lengths = torch.randint(1, length // (rank + 1), (number, 2, 1), generator=generator)
        labels[torch.arange(length) >= lengths] = -100
    return list(zip(tokens, labels, strict=True))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, labels = batch
    losses: torch.Tensor = model(tokens, labels=labels)  # [b, s]
    return losses.mean()


def batches_of(training: Training, step: int, replica: int) -> list[Batch]:
    return micro_batches(step, replica, training.per_token, training.length, training.micro_batches)


def in_precision(module: GPTModel, wrapper: str) -> nn.Module:
    """Rounds a model to low precision as a wrapper needs it: FSDP2 shards fp32 and casts by itself."""
    if module.config.compute_dtype == torch.float32:
        return module
    # FSDP2 would start from what the others have rounded away.
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.data = parameter.data.to(module.config.compute_dtype).float()
    return module if "fsdp2" in wrapper else Float16Module(module.config, module)
