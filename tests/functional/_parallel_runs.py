"""Short trainings of a small GPT with tensor, sequence and context parallelism under any wrapper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from core import parallel_state
from core.comm.collectives import all_reduce_by_backend
from core.dist_checkpointing.global_view import whole_view
from core.distributed import _BaseDataParallel, finalize_model_grads, wrap_model
from core.models.gpt import GPTModel
from core.optimizer import MegatronOptimizer
from core.tensor_parallel import mappings
from core.transformer import Float16Module, TransformerConfig, own_chunks
from core.transformer.sequences import ScatteringGradients
from tests.functional._runs import (
    VOCABULARY,
    Batch,
    Curve,
    Training,
    _whole,
    ddp_config,
    in_precision,
    loss_and_report,
    micro_batches,
    train_serially,
    train_wrapped,
)

SEQUENCE = 16
"""Divides into two chunks a rank, each cut once more by sequence parallelism."""

ROWS_OF_EMBEDDING = VOCABULARY + 3  # which four ranks divide


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a world."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}-cp{self.cp}{'-sp' if self.sequence_parallel else ''}"


@dataclass(frozen=True)
class Trained:
    """A training that every layout does as one process does."""

    training: Training
    packed: bool = False
    """Sequences hold several documents, which do not see each other."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that differ from those of :func:`build`."""
    fsdp2: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this wrapper, where it is the one."""


def build(trained: Trained, layout: Layout) -> GPTModel:
    """Returns a GPT with query-key norms and grouped queries whose weights a seed decides."""
    torch.manual_seed(7)
    low = trained.training.precision
    fields = {
        "num_layers": 2,
        "hidden_size": 20,
        "ffn_hidden_size": 28,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 6,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.2,
        "calculate_per_token_loss": trained.training.per_token,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
    }
    if low != "fp32":
        fields[low] = True
    config = TransformerConfig(**{**fields, **trained.model})
    tied = trained.training.tied
    return GPTModel(
        config,
        vocab_size=ROWS_OF_EMBEDDING,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )


def run_layout(wrapper: str, layout: Layout, trained: Trained, fault: str | None = None) -> Curve:
    """Trains on this rank's part of its replica's micro-batches; every rank calls it."""
    with FAULTS[fault]() if fault is not None else nullcontext():
        return _run_layout(wrapper, layout, trained)


def _run_layout(wrapper: str, layout: Layout, trained: Trained) -> Curve:
    training = trained.training
    low = training.precision != "fp32"
    config = ddp_config(wrapper, grad_reduce_in_fp32=low, **(trained.fsdp2 if "fsdp2" in wrapper else {}))
    parallel_state.initialize_model_parallel(
        layout.tp,
        context_parallel_size=layout.cp,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    module = build(trained, layout)
    model = wrap_model(in_precision(module, wrapper), module.config, config)
    replica = parallel_state.get_data_parallel_rank()
    curve, optimizer = train_wrapped(
        model,
        training,
        lambda step: micro_batches(step, replica, training.per_token, SEQUENCE),
        lambda batch: _loss(model, batch, trained),
        group,
    )
    curve.masters = _masters(module, optimizer)
    return curve


def run_serial(trained: Trained, replicas: int) -> Curve:
    """Trains in one process, without a wrapper, over the micro-batches of all replicas."""
    training = trained.training
    model: nn.Module = build(trained, Layout())
    module = model
    if training.precision != "fp32":
        model = Float16Module(module.config, module)  # type: ignore[arg-type]
    curve, optimizer = train_serially(
        model,
        training,
        lambda step: [micro_batches(step, replica, training.per_token, SEQUENCE) for replica in range(replicas)],
        lambda batch: _loss(model, batch, trained),
    )
    curve.masters = _masters(module, optimizer)
    return curve


def _loss(model: nn.Module, batch: Batch, trained: Trained) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = (own_chunks(tensor) for tensor in batch)
    packed = {"document_starts": own_chunks(document_starts(len(tokens)))} if trained.packed else {}
    return loss_and_report(model(tokens, labels=labels, **packed), labels, trained.training)


def document_starts(rows: int) -> torch.Tensor:
    """Returns the starts `[b, s]` of documents that end in different chunks in each row."""
    positions = torch.arange(SEQUENCE)
    return torch.stack([positions - positions % (3 + 2 * row) for row in range(rows)])


def _masters(module: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Returns the weights of the whole model, in fp32."""
    tensors = module.state_dict(keep_vars=True)
    state = {name.partition(".")[2]: t for name, t in optimizer.state_tensors().items() if name.startswith("master.")}
    names = [name for name, _ in module.named_parameters()]
    return _whole({name: state.get(name, whole_view(tensors[name])) for name in names})


def _positions_of_the_first_rank() -> AbstractContextManager[Any]:
    """Each context-parallel rank rotates queries and keys as if its tokens were the first."""
    return mock.patch(
        "core.models.gpt.gpt_model.own_positions", lambda length, device: torch.arange(length, device=device)
    )


def _labels_in_whole_order() -> AbstractContextManager[Any]:
    """Chunks are assigned without load balancing, which attention assumes."""
    return mock.patch(
        "tests.functional._parallel_runs.own_chunks",
        lambda tensor: tensor.chunk(parallel_state.get_context_parallel_world_size(), 1)[
            parallel_state.get_context_parallel_rank()
        ],
    )


def _keys_keep_their_own_gradient() -> AbstractContextManager[Any]:
    """Gradients of a rank's keys and values from other ranks' queries are lost."""

    def wait(self: ScatteringGradients) -> tuple[torch.Tensor, ...]:
        assert self.work is not None
        self.work.wait()
        return self.both.zero_().unbind(1)

    return mock.patch.object(ScatteringGradients, "wait", wait)


_finalize_module = sys.modules[finalize_model_grads.__module__]  # whose name in the package is its function's
_sum_partial = _finalize_module._sum_over_sequence_parallel_ranks


def _norms_stay_partial() -> AbstractContextManager[Any]:
    """Gradients of parameters replicated over tensor-parallel ranks, used on other tokens or heads, are not summed."""
    return mock.patch.object(_finalize_module, "_sum_over_sequence_parallel_ranks", lambda chunks, group: None)


def _one_norm_stays_partial() -> AbstractContextManager[Any]:
    """The gradient of one such parameter, of six elements, is not summed."""

    def sum_others(chunks: list[_BaseDataParallel], group: Any) -> None:
        (norm,) = (
            p for name, p in chunks[0].named_parameters() if name.endswith("1.self_attention.q_layernorm.weight")
        )
        norm.sequence_parallel = False  # type: ignore[attr-defined]
        _sum_partial(chunks, group)
        norm.sequence_parallel = True  # type: ignore[attr-defined]

    return mock.patch.object(_finalize_module, "_sum_over_sequence_parallel_ranks", sum_others)


def _gradients_a_twentieth_too_large() -> AbstractContextManager[Any]:
    def sum_and_scale(chunks: list[_BaseDataParallel], group: Any) -> None:
        _sum_partial(chunks, group)
        chunks[0].scale_gradients(1.05)

    return mock.patch.object(_finalize_module, "_sum_over_sequence_parallel_ranks", sum_and_scale)


def _inputs_keep_their_own_gradient() -> AbstractContextManager[Any]:
    """A column-parallel layer does not sum the gradients of its input over ranks."""

    def reduce_others(tensor: torch.Tensor, group: Any, **settings: Any) -> Any:
        if settings["what"] == mappings._GRADIENT:
            return None
        return all_reduce_by_backend(tensor, group, **settings)

    return mock.patch.object(mappings, "all_reduce_by_backend", reduce_others)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    function.__name__.strip("_"): function
    for function in (
        _positions_of_the_first_rank,
        _labels_in_whole_order,
        _keys_keep_their_own_gradient,
        _norms_stay_partial,
        _one_norm_stays_partial,
        _gradients_a_twentieth_too_large,
        _inputs_keep_their_own_gradient,
    )
}
"""Faults planted in `core`, one at a time, that a comparison of runs has to see."""
