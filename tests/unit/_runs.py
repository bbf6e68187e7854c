"""Short training runs of a small GPT under any wrapper, and the serial run that is their oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.module_protocol import counting_modules
from core.dist_checkpointing.global_view import whole_view
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    _BaseDataParallel,
    finalize_model_grads,
    wrap_model,
)
from core.distributed.finalize_model_grads import end_step
from core.models.gpt import GPTModel
from core.optimizer import MegatronOptimizer, OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from core.transformer.module import Float16Module
from core.transformer.sequences import own_chunks
from core.transformer.transformer_config import TransformerConfig
from tests.unit._whole import assembled

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
    """Returns the config that asks `wrap_model` for a wrapper, with more ``fields`` set."""
    kinds = {"fsdp2": TorchFullyShardedDataParallelConfig, "zero3": FullyShardedDataParallelConfig}
    make = next((kind for name, kind in kinds.items() if name in wrapper), DistributedDataParallelConfig)
    return make(**(WRAPPERS | HYBRIDS)[wrapper], **fields)


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
    length: int = SEQUENCE
    prepare: Callable[[GPTModel], None] | None = None
    """Changes the model before it is wrapped."""

    def build(self, *, is_serial: bool = False) -> GPTModel:
        known = {entry.name for entry in dataclasses.fields(TransformerConfig)}
        sizes = {} if is_serial else {name: size for name, size in self.groups.items() if name in known}
        low = {} if self.precision == "fp32" else {self.precision: True}
        fields = {"calculate_per_token_loss": self.per_token, **low, **self.fields, **sizes}
        model = build_gpt(self.tied, **fields)
        if self.prepare is not None:
            self.prepare(model)
        return model


@dataclass
class Curve:
    """A record of a run: exact per-step numbers, and the last step's gradients and weights, whole."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Steps that were not made, because a gradient was not finite."""
    scales: list[float] = field(default_factory=list)
    """Loss scale after each step."""
    zeros: list[int] = field(default_factory=list)
    """Zeros in the gradient of each step, where the optimizer counts them."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the model computes with."""
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same in fp32."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that checkpoints have, at the end."""


def build_gpt(tied: bool, *, vocab: int = VOCABULARY, **fields: Any) -> GPTModel:
    """Returns a GPT of two layers whose weights a seed decides; ``fields`` override its config."""
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
    return GPTModel(
        config,
        vocab_size=vocab,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )


def micro_batches(step: int, rank: int, masked: bool = False, length: int = SEQUENCE) -> list[Batch]:
    """Makes tokens and labels, `[2, s]`, of a sequence that can be learned: each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sequence = [torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2), generator=generator)]
    for _ in range(length):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    whole_sequence = torch.stack(sequence, dim=-1)
    tokens, labels = whole_sequence[..., :-1].contiguous(), whole_sequence[..., 1:].contiguous()
    if masked:
        lengths = torch.randint(1, length // (rank + 1), (MICRO_BATCHES, 2, 1), generator=generator)
        labels[torch.arange(length) >= lengths] = -100
    return list(zip(tokens, labels, strict=True))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, labels = batch
    losses: torch.Tensor = model(tokens, labels=labels)  # [b, s]
    return losses.mean()


def run_wrapped(wrapper: str, training: Training) -> Curve:
    """Trains on this rank's micro-batches under a wrapper; every rank calls it."""
    module, model = _wrapped(wrapper, training)
    optimizer = _optimizer(training, model)
    scheduler = _scheduler(training, optimizer)
    has_groups = parallel_state.model_parallel_is_initialized()
    replica = parallel_state.get_data_parallel_rank() if has_groups else dist.get_rank()
    curve = Curve()
    for step in range(training.steps):
        model.zero_grad_buffer()
        totals = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(micro_batches(step, replica, training.per_token, training.length)):
            with nullcontext() if index == MICRO_BATCHES - 1 else model.no_sync():
                loss, reported = _loss(model, [own_chunks(part) for part in batch] if has_groups else batch, training)
                optimizer.scale_loss(loss).backward()
            totals += reported
        finalize_model_grads([model], totals[1] if training.per_token else None)
        if step == training.steps - 1:
            curve.gradients = gradients(optimizer)
        _step(curve, step, optimizer, scheduler)
        dist.all_reduce(totals, group=model.process_group)
        curve.losses.append((totals[0] / totals[1]).item())
    _finish(curve, module, optimizer)
    return curve


def run_serial(training: Training, ranks: int = 2) -> Curve:
    """Trains without a wrapper: one process runs the micro-batches of all ranks."""
    model = training.build(is_serial=True)
    optimizer = _optimizer(training, model)
    scheduler = _scheduler(training, optimizer)
    curve = Curve()
    for step in range(training.steps):
        optimizer.zero_grad()
        totals = torch.zeros(2, dtype=torch.float64)
        for rank in range(ranks):
            for batch in micro_batches(step, rank, training.per_token, training.length):
                loss, reported = _loss(model, batch, training)
                (loss if training.per_token else loss / ranks).backward()
                totals += reported
        end_step(counting_modules(model), None)
        for parameter in model.parameters():
            if training.per_token and parameter.grad is not None:
                parameter.grad /= totals[1]
        if step == training.steps - 1:
            curve.gradients = gradients(optimizer)
        _step(curve, step, optimizer, scheduler)
        curve.losses.append((totals[0] / totals[1]).item())
    _finish(curve, model, optimizer)
    return curve


def _wrapped(wrapper: str, training: Training) -> tuple[GPTModel, _BaseDataParallel]:
    """Returns the model and its wrapper."""
    config = ddp_config(wrapper, grad_reduce_in_fp32=training.precision != "fp32")
    sizes, group = dict(training.groups), dist.group.WORLD
    if config.num_distributed_optimizer_instances > 1:
        sizes["num_distributed_optimizer_instances"] = config.num_distributed_optimizer_instances
    if sizes:
        parallel_state.initialize_model_parallel(**sizes)
        group = None
    module = training.build()
    model = wrap_model(in_precision(module, wrapper), module.config, config, process_group=group)
    are_apart = bool(training.groups) and model.process_group.size() > 1 and parallel_state.experts_are_apart()
    assert ("each expert on" in model.describe()) == are_apart
    return module, model


def in_precision(module: GPTModel, wrapper: str) -> nn.Module:
    """Rounds a model to low precision as a wrapper needs it: FSDP2 shards fp32 and casts by itself."""
    if module.config.compute_dtype == torch.float32:
        return module
    # FSDP2 would start from what the others have rounded away.
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.data = parameter.data.to(module.config.compute_dtype).float()
    return module if "fsdp2" in wrapper else Float16Module(module.config, module)


def _optimizer(training: Training, model: nn.Module) -> MegatronOptimizer:
    fields = dict(training.optimizer)
    if training.precision == "bf16":
        fields |= {"bf16": True}
    if training.precision == "fp16":
        fields |= {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 10, "hysteresis": 1}
    return get_megatron_optimizer(OptimizerConfig(**fields), [model])


def _scheduler(training: Training, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    lr, decay = training.optimizer["lr"], training.optimizer["weight_decay"]
    return OptimizerParamScheduler(optimizer, 0.0, lr, 0.1 * lr, 3, 50, "cosine", decay, decay, 50, "constant")


def _loss(model: nn.Module, batch: Sequence[torch.Tensor], training: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a micro-batch's loss for backward, and the sum and number of its losses `[b, s]` in double."""
    tokens, labels = batch
    losses = model(tokens, labels=labels)
    reported = torch.stack([losses.detach().double().sum(), (labels != -100).sum()])
    return (losses.sum() if training.per_token else losses.mean() / MICRO_BATCHES), reported


def _step(curve: Curve, step: int, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> None:
    succeeded, grad_norm, zeros = optimizer.step()
    if zeros is not None:
        curve.zeros.append(zeros)
    if succeeded:
        assert grad_norm is not None
        curve.grad_norms.append(grad_norm)
        scheduler.step(1)
    else:
        curve.skipped.append(step)


def _finish(curve: Curve, module: GPTModel, optimizer: MegatronOptimizer) -> None:
    state = {name.partition(".")[2]: t for name, t in optimizer.state_tensors().items() if name.startswith("master.")}
    tensors = module.state_dict(keep_vars=True)
    parameters = {name: whole_view(tensors[name]) for name, _ in module.named_parameters()}
    curve.weights = {
        name: p.to(module.config.compute_dtype) for name, p in assembled(parameters, own_first=True).items()
    }
    biases = {name: buffer for name, buffer in module.named_buffers() if name.endswith("expert_bias")}
    curve.masters = assembled({name: state.get(name, p) for name, p in parameters.items()} | biases, own_first=True)


def gradients(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Returns the whole gradients that the optimizers of all ranks are about to read."""
    gradients = {p.name: (p, p.local_gradient()) for p in optimizer._params}
    return assembled(
        {name: p.whole(gradient) for name, (p, gradient) in gradients.items() if gradient is not None}, own_first=True
    )
