"""Short training runs of a small GPT under any wrapper, and the serial run that is their oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from core.distributed import _BaseDataParallel, finalize_model_grads, wrap_model
from core.distributed.finalize_model_grads import end_step
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from core.optimizer_param_scheduler import OptimizerParamScheduler
from core.pipeline_parallel import get_forward_backward_func
from core.transformer.sequences import own_chunks
from tests.unit._gpt import Batch, Training, batches_of, ddp_config, in_precision
from tests.unit._whole import assembled


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
