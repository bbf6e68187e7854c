"""Ends a step for experts, once for all its micro-batches: moves biases, and makes the statistics of the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import parallel_state
from ...base.device import current_device
from ...base.errors import warn_once
from ...comm.collectives import all_reduce_by_backend
from ...tensor_parallel.groups import Group
from .load_balancing import modules_of, take_pending
from .moe_layer import MoELayer
from .router import SUMS

STATISTICS = ("load_max", "load_min", "dropped_share", "entropy", "balance_loss", "z_loss")
"""What the log shows of each layer: the largest and smallest load of an expert, as multiples of the mean load, the
share of choices that were dropped, the mean entropy of a token's scores, in nats, and means of the losses, without
their coefficients."""


@torch.no_grad()
def finish_step(models: Sequence[nn.Module], group: Group) -> None:
    """Adds up the tokens of experts over ranks, and moves each expert's bias by them. All ranks of a model call it.

    `finalize_model_grads` calls it, before the optimizer's step and whether or not that is skipped. Each layer keeps
    its statistics as `step_statistics`.

    Args:
        group: the data-parallel and context-parallel ranks; None if this rank is alone. Tensor-parallel ranks that
            route different tokens are added too.
    """
    layers: list[MoELayer] = modules_of(models, MoELayer)
    if not layers:
        return
    if [layer for layer in layers if take_pending(layer.router) is not None]:
        warn_once(
            "losses that balance experts were computed and not trained: the model was called without labels; give it "
            "labels, or call core.transformer.moe.add_auxiliary_losses(losses, model) on the losses of tokens"
        )
    totals = torch.cat([layer.router.step_sums for layer in layers])
    tensor_ranks = layers[0].tp_group if layers[0].splits_tokens else None
    for ranks in (group, tensor_ranks):
        if ranks is not None and ranks.size() > 1:
            all_reduce_by_backend(totals, ranks, what="tokens of experts")
    for layer, sums in zip(layers, totals.split([len(layer.router.step_sums) for layer in layers]), strict=True):
        router = layer.router
        counts = sums[: -len(SUMS)]
        if router.expert_bias is not None and layer.training:
            rate = layer.config.moe_router_bias_update_rate
            router.expert_bias += rate * (counts.mean() - counts).sign().to(router.expert_bias.dtype)
        layer.step_statistics = _statistics(counts, sums[-len(SUMS) :])
        router.clear_step()


def restart_step(models: Iterable[nn.Module]) -> None:
    """Forgets the tokens of a step that did not end."""
    for layer in modules_of(models, MoELayer):
        layer.router.clear_step()


def logged_statistics(models: Sequence[nn.Module]) -> tuple[list[str], torch.Tensor] | None:
    """Returns names and values, on the device, of what the last step's log shows. None for a model without experts.

    All ranks of a pipeline call it: the log shows the layers of all stages.

    Means over layers come first. With `moe_per_layer_logging` the statistics of each layer follow, and the load of
    each of its experts.
    """
    layers = [layer for layer in modules_of(models, MoELayer) if layer.step_statistics is not None]
    rows = {layer.layer_number: layer.step_statistics for layer in layers}
    config: Any = layers[0].config if layers else models[0].config
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if has_stages and getattr(config, "num_moe_experts", None) is not None:
        rows = _of_all_stages(rows, config)
    if not rows:
        return None
    names = [f"moe/{name}" for name in STATISTICS]
    parts = [torch.stack([row[: len(STATISTICS)] for row in rows.values()]).mean(0)]
    for number, row in rows.items():
        if config.moe_per_layer_logging:
            place = f"moe/layer_{number}"
            names += [f"{place}/{name}" for name in STATISTICS]
            names += [f"{place}/expert_{index}/load" for index in range(len(row) - len(STATISTICS))]
            parts.append(row)
    return names, torch.cat(parts)


def _of_all_stages(rows: Mapping[int, torch.Tensor], config: Any) -> dict[int, torch.Tensor]:
    """Returns the statistics of the layers of all pipeline stages, by layer number."""
    numbers = [number for number in range(1, config.num_layers + 1) if config.has_experts(number)]
    table = torch.zeros(
        len(numbers), len(STATISTICS) + config.num_moe_experts, dtype=torch.float64, device=current_device()
    )
    for place, number in enumerate(numbers):
        if number in rows:
            table[place] = rows[number]
    group = parallel_state.get_pipeline_model_parallel_group()
    all_reduce_by_backend(table, group, what="statistics of experts")
    return dict(zip(numbers, table, strict=True))


def _statistics(counts: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Returns `STATISTICS`, and the load of each expert."""
    tokens, dropped, entropy, micro_batches, balance, of_logits = sums.unbind()
    loads = counts / counts.mean().clamp(min=1e-300)
    shown = [loads.max(), loads.min(), dropped / counts.sum().clamp(min=1), entropy / tokens.clamp(min=1)]
    batches = micro_batches.clamp(min=1e-300)
    return torch.cat([torch.stack([*shown, balance / batches, of_logits / batches]), loads])
