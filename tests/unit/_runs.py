"""Short training runs of a small GPT under any wrapper, and the serial run that is their oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.module_protocol import counting_modules, unwrap_model
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
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from core.optimizer_param_scheduler import OptimizerParamScheduler
from core.pipeline_parallel import get_forward_backward_func
from core.transformer.module import Float16Module
from core.transformer.pipeline_stages import pipeline_stage
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
    stage = pipeline_stage(config, vp_stage)
    return GPTModel(
        config,
        vocab_size=vocab,
        max_sequence_length=SEQUENCE,
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


def run_wrapped(wrapper: str, training: Training) -> Curve:
    """Trains on this rank's micro-batches under a wrapper; every rank calls it."""
    models = wrapped(wrapper, training)
    optimizer = _optimizer(training, models)
    scheduler = _scheduler(training, optimizer)
    average = AveragedWeights(optimizer, 0.5) if training.has_average else None
    curve = Curve()
    for step in range(training.steps):
        totals = run_micro_batches(training, models, step, optimizer.scale_loss)
        if step == training.steps - 1:
            curve.gradients = gradients(optimizer)
        _step(curve, step, optimizer, scheduler)
        dist.all_reduce(totals)  # over ranks of one model too, which report the same
        curve.losses.append((totals[0] / totals[1]).item())
    _finish(curve, [model.module for model in models], optimizer, average, own_first=not training.is_staged)
    return curve


def run_serial(training: Training, ranks: int = 2) -> Curve:
    """Trains without a wrapper: one process runs the micro-batches of all ranks."""
    (model,) = training.alone.build()
    optimizer = _optimizer(training, [model])
    scheduler = _scheduler(training, optimizer)
    average = AveragedWeights(optimizer, 0.5) if training.has_average else None
    curve = Curve()
    for step in range(training.steps):
        optimizer.zero_grad()
        for layer in counting_modules(model):
            layer.clear_step_sums()
        totals = torch.zeros(2, dtype=torch.float64)
        for rank in range(ranks):
            for batch in batches_of(training, step, rank):
                loss, *_, reported = _loss(training, batch[1], model(batch[0], **_arguments(training, batch)))
                (loss if training.per_token else loss / training.micro_batches / ranks).backward()
                totals += reported
        end_step(counting_modules(model), None)
        for parameter in model.parameters():
            if training.per_token and parameter.grad is not None:
                parameter.grad *= (1 / totals[1]).float()
        if step == training.steps - 1:
            curve.gradients = gradients(optimizer)
        _step(curve, step, optimizer, scheduler)
        curve.losses.append((totals[0] / totals[1]).item())
    _finish(curve, [model], optimizer, average, own_first=True)
    return curve


def wrapped(wrapper: str, training: Training) -> list[_BaseDataParallel]:
    """Makes the groups of a training, and returns its model, or this rank's stages, wrapped."""
    config = ddp_config(wrapper, grad_reduce_in_fp32=training.precision != "fp32")
    sizes, group = dict(training.groups), dist.group.WORLD
    if config.num_distributed_optimizer_instances > 1:
        sizes["num_distributed_optimizer_instances"] = config.num_distributed_optimizer_instances
    if sizes:
        parallel_state.initialize_model_parallel(**sizes)
        group = None
    models = [wrap_model(in_precision(m, wrapper), m.config, config, process_group=group) for m in training.build()]
    are_apart = bool(sizes) and models[0].process_group.size() > 1 and parallel_state.experts_are_apart()
    assert [("each expert on" in model.describe()) for model in models] == [are_apart] * len(models)
    return models


def run_micro_batches(
    training: Training, models: list[_BaseDataParallel], step: int, scale_loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Runs forwards and backwards of a step; returns the sum and number of this rank's losses.

    Gradients are zeroed before, and final after.
    """
    has_groups = parallel_state.model_parallel_is_initialized()
    replica = parallel_state.get_data_parallel_rank() if has_groups else dist.get_rank()
    batches = batches_of(training, step, replica)
    for model in models:
        model.zero_grad_buffer()
    if training.is_staged:
        return torch.stack(
            [torch.zeros(2, dtype=torch.float64), *run_stages(training, models, batches, scale_loss)]
        ).sum(0)
    (model,), totals = models, torch.zeros(2, dtype=torch.float64)
    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else model.no_sync():
            tokens, labels = (own_chunks(part) for part in batch) if has_groups else batch
            output = model(tokens, **_arguments(training, (tokens, labels)))
            loss, *_, reported = _loss(training, labels, output)
            scale_loss(loss if training.per_token else loss / training.micro_batches).backward()
        totals += reported
    finalize_model_grads([model], totals[1] if training.per_token else None)
    return totals


def run_stages(
    training: Training,
    models: list[_BaseDataParallel],
    batches: Iterable[Batch],
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Runs Megatron-LM's schedule; returns the reports of micro-batches, none where the last stage is elsewhere."""
    for model in models:
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = scale_loss
    batches = list(batches)
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, training),
        data_iterator=[iter(batches) for _ in models],
        model=models,
        num_microbatches=training.micro_batches,
        seq_length=training.length,
        micro_batch_size=2,
    )
    has_last = any(unwrap_model(model).post_process for model in models)
    assert len(reports) == (training.micro_batches if has_last else 0)
    return reports


def batches_of(training: Training, step: int, replica: int) -> list[Batch]:
    return micro_batches(step, replica, training.per_token, training.length, training.micro_batches)


def _forward_step(training: Training, data: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    return model(tokens, **_arguments(training, (tokens, labels))), partial(_loss, training, labels)


def _arguments(training: Training, batch: Batch) -> dict[str, torch.Tensor]:
    tokens, labels = batch
    if not training.has_documents:
        return {"labels": labels}
    places, second = torch.arange(training.length), training.length // 3
    begins = torch.where(places < second, 0, second).expand(tokens.shape)
    return {"labels": labels, "position_ids": places - begins, "document_starts": begins}


def in_precision(module: GPTModel, wrapper: str) -> nn.Module:
    """Rounds a model to low precision as a wrapper needs it: FSDP2 shards fp32 and casts by itself."""
    if module.config.compute_dtype == torch.float32:
        return module
    # FSDP2 would start from what the others have rounded away.
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.data = parameter.data.to(module.config.compute_dtype).float()
    return module if "fsdp2" in wrapper else Float16Module(module.config, module)


def _optimizer(training: Training, models: Sequence[nn.Module]) -> MegatronOptimizer:
    fields = dict(training.optimizer)
    if training.precision == "bf16":
        fields |= {"bf16": True}
    if training.precision == "fp16":
        fields |= {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 10, "hysteresis": 1}
    return get_megatron_optimizer(OptimizerConfig(**fields), models)


def _scheduler(training: Training, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    lr, decay = training.optimizer["lr"], training.optimizer["weight_decay"]
    return OptimizerParamScheduler(optimizer, 0.0, lr, 0.1 * lr, 3, 50, "cosine", decay, decay, 50, "constant")


def _loss(training: Training, labels: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a loss function of Megatron-LM's loops returns: the mean of a micro-batch's losses `[b, s]`, or
    their sum and number; and the sum and number in double."""
    number = (labels != -100).sum()
    reported = torch.stack([losses.detach().double().sum(), number])
    return (losses.sum(), number, reported) if training.per_token else (losses.mean(), reported)


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


def _finish(
    curve: Curve,
    modules: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    average: AveragedWeights | None,
    own_first: bool,
) -> None:
    optimizer.finish_step()
    state = {name.partition(".")[2]: t for name, t in optimizer.state_tensors().items() if name.startswith("master.")}
    modules = [unwrap_model(module) for module in modules]
    parameters = _shown(modules)
    dtype = modules[0].config.compute_dtype
    curve.weights = {name: p.to(dtype) for name, p in assembled(parameters, own_first=own_first).items()}
    biases = {n: b for module in modules for n, b in module.named_buffers() if n.endswith("expert_bias")}
    masters = {name: state.get(name, p) for name, p in parameters.items()}
    curve.masters = assembled(masters | biases, own_first=own_first)
    if average is not None:
        with average.swapped():
            shown = assembled(_shown(modules), own_first=own_first)
            curve.masters |= {f"average.{name}": value.clone() for name, value in shown.items()}


def _shown(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns this rank's parts of what state dicts show of parameters."""
    found = {}
    for module in modules:
        tensors = module.state_dict(keep_vars=True)
        found |= {name: whole_view(tensors[name]) for name, _ in module.named_parameters()}
    return found


def gradients(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Returns the whole gradients that the optimizers of all ranks are about to read."""
    gradients = {p.name: (p, p.local_gradient()) for p in optimizer._params}
    return assembled(
        {name: p.whole(gradient) for name, (p, gradient) in gradients.items() if gradient is not None}, own_first=True
    )
