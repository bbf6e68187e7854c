"""A small model with everything that makes wrapping hard, and an oracle for its gradients."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from core.base.parameters import kept_range
from core.comm import gloo
from core.comm.call import Collective, CollectiveRecord
from core.dist_checkpointing.global_view import FlatRange, whole_view
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    _BaseDataParallel,
    finalize_model_grads,
)
from core.distributed.flat.unit import POISONS
from core.distributed.fsdp2.torch_private import groups_of

BUFFERED = {
    "ddp": {},
    "ddp_overlap": {"overlap_grad_reduce": True, "bucket_size": 50},
    "zero1": {"use_distributed_optimizer": True, "bucket_size": 50},
    "zero1_overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 80,
    },
    "zero2": {"data_parallel_sharding_strategy": "optim_grads"},
    "zero2_overlap": {
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 50,
    },
}
"""Settings of the wrapper on buffers, by the name that its tests give them."""

WRAPPERS = (*BUFFERED, "zero3", "fsdp2")


class Block(nn.Module):
    """Odd sizes, so that two ranks divide no dimension, and a size-one weight, so that one rank's shard is empty."""

    def __init__(self, width: int = 7, inner: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gain


class Codes(nn.Parameter):
    """Bytes with a state to unpack them by, in a class of its own: the shape of bitsandbytes' ``Params4bit``."""

    quant_state: Any

    def __new__(cls, data: torch.Tensor, quant_state: Any, requires_grad: bool = False) -> Codes:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.quant_state = quant_state
        return made


class Toy(nn.Module):
    """Tokens in, logits out: tied or untied, with a buffer and a frozen weight."""

    def __init__(self, tied: bool = True, vocab: int = 11, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("offset", torch.linspace(0, 1, width))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.weight.partition_dim = 0  # one of Megatron's attributes, which wrapping must keep

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.offset * self.frozen.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Toy):
    """A model whose first block runs twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.blocks[0](self.embedding(tokens)))
        return self.head(x)


class Stack(nn.Module):
    """Layers of one kind, and a parameter of the root."""

    def __init__(self, layers: int = 8, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(layers)])
        self.gain = nn.Parameter(torch.ones(6))
        self.order = list(range(layers))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            layer = self.layers[index]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return x * self.gain


class Adapted(nn.Module):
    """A frozen linear layer with a trainable one of rank 2 next to it (LoRA, Hu et al., 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


UNITS = (Block, nn.Embedding, nn.Linear)


def settings(kind: str, **fields: Any) -> DistributedDataParallelConfig:
    """Returns the arguments for a wrapper of the given kind."""
    if kind in BUFFERED:
        return DistributedDataParallelConfig(**{**BUFFERED[kind], **fields})
    if kind == "zero3":
        return FullyShardedDataParallelConfig(**fields)
    return TorchFullyShardedDataParallelConfig(**fields)


def build(
    kind: str, module: nn.Module, *, config: Any = None, group: Any = None, unit_classes: Any = UNITS, **fields: Any
) -> _BaseDataParallel:
    """Returns a wrapper of the given kind over the default group."""
    config, group = config or SimpleNamespace(), group or dist.group.WORLD
    if kind in BUFFERED:
        return DistributedDataParallel(
            config, settings(kind, **fields), module, sub_modules_to_wrap=unit_classes, process_group=group
        )
    os.environ[POISONS] = "1"  # what reads a slot that is idle shows; compositions and equality cases have it off too
    sharded = FullyShardedDataParallel if kind == "zero3" else TorchFullyShardedDataParallel
    return sharded(config, settings(kind, **fields), module, unit_classes, process_group=group)


def toy(seed: int = 1, **kwargs: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**kwargs)


def batches(rank: int, count: int = 3) -> list[torch.Tensor]:
    """Makes micro-batches `[2, 4]` of tokens, different on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, 11, (2, 4), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1))


def synced_last(model: Any, items: Iterable[Any]) -> Iterator[Any]:
    """Yields items, all but the last inside `no_sync`."""
    *first, last = items
    with model.no_sync():
        yield from first
    yield last


def accumulate(model: nn.Module, count: int = 3) -> None:
    """Runs this rank's micro-batches, all but the last inside `no_sync`."""
    for tokens in synced_last(model, batches(dist.get_rank(), count)):
        loss_of(model, tokens).backward()


def reduced(model: nn.Module, count: int = 3) -> dict[str, torch.Tensor]:
    """Returns the gradients of the second of two steps."""
    for _ in range(2):
        model.zero_grad_buffer()
        accumulate(model, count)
        finalize_model_grads([model])
    return gradients(model)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a whole parameter, or what a state dict holds of it, whole; every rank calls it."""
    view = whole_view(tensor) if kept_range(tensor) is not None else tensor
    if isinstance(view, FlatRange):
        return _joined(view)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _joined(view: FlatRange) -> torch.Tensor:
    """Joins the ranges of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(offsets, piece.clone()) for offsets, piece in view.pieces()])
    whole = torch.full(tuple(view.shape), float("nan"), dtype=view.dtype)
    for offsets, piece in itertools.chain(*found):
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))] = piece
    return whole


def communication_of(module: nn.Module) -> tuple[Any, Any]:
    """Returns the all-gather and the reduce-scatter of a module of FSDP2."""
    (group,) = groups_of(module)
    return group._all_gather_comm, group._reduce_scatter_comm


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every gradient that the optimizer would read, whole, under the plain model's names."""
    module = model.module if isinstance(model, _BaseDataParallel) else model
    is_sharded = isinstance(model, _BaseDataParallel) and model.plan.shards_buffers
    gathered = _gather_shards(model) if is_sharded else {}
    found = {}
    for name, parameter in module.named_parameters():
        gradient = gathered.get(parameter, getattr(parameter, "main_grad", None))
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found[name] = full(gradient)
    return found


def _gather_shards(model: _BaseDataParallel) -> dict[nn.Parameter, torch.Tensor]:
    found, plan = {}, model.plan
    for bucket in (b for b in model.engine.buckets if b.has_reduced):
        whole = bucket.grads.shard.clone()
        for group in (plan.groups.shard,):
            parts = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(parts, whole, group=group)
            whole = torch.cat(parts)
        for parameter in bucket.params:
            start, end = bucket.param_to_index[parameter]
            found[parameter] = whole[start:end].view(parameter.shape)
    return found


def oracle(world_size: int = 2, reduce: str = "mean", **kwargs: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of a step: each rank's accumulated serially, then added in rank order."""
    totals: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        model = toy(**kwargs)
        for tokens in batches(rank):
            loss_of(model, tokens).backward()
        for name, gradient in gradients(model).items():
            totals[name] = totals[name] + gradient if name in totals else gradient
    return {name: total / world_size if reduce == "mean" else total for name, total in totals.items()}


class CountedTraffic(TorchDispatchMode):
    """Counts all-gathers and reductions: those of torch on this thread, and our messages between gloo's ranks on all
    threads.

    ``sent_bytes`` are those of all messages, of gathers too; ``counts`` has torch's collectives by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reductions = self.sent_bytes = 0
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> CountedTraffic:
        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(dist, "isend", self._isend))
        self._patches.enter_context(mock.patch.object(gloo, "start_all_gather", self._start_all_gather))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name] += 1
            self.gathers += "allgather" in func._schema.name
            self.reductions += "reduce" in func._schema.name
        return func(*args, **(kwargs or {}))

    def _isend(self, tensor: torch.Tensor, **options: Any) -> Any:
        self.reductions += options["tag"] & 0xFFFF != gloo.GATHER_TAG
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return _isend(tensor, **options)

    def _start_all_gather(self, *args: Any) -> Any:
        self.gathers += 1
        return _start_all_gather(*args)


_isend, _start_all_gather = dist.isend, gloo.start_all_gather


@contextmanager
def recorded_collectives(of: str = "") -> Iterator[list[tuple[str, str, int, int]]]:
    """Notes kind, subject, bytes and ranks of each collective over several ranks, on all threads.

    Args:
        of: what the subjects begin with, as "the gradients of".
    """
    noted: list[tuple[str, str, int, int]] = []
    collective = CollectiveRecord.collective

    def note(record: CollectiveRecord, kind: str, what: str, num_bytes: int, **options: Any) -> Collective:
        if record.num_ranks > 1 and what.startswith(of):
            noted.append((kind, what, num_bytes, record.num_ranks))
        return collective(record, kind, what, num_bytes, **options)

    with mock.patch.object(CollectiveRecord, "collective", note):
        yield noted
