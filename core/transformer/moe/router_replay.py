"""The experts of each token are recorded, and replayed: an inference server chose them, and training takes the same.

    with router_replay.replay(model, indices):  # [tokens, layers, k] for each micro-batch
        loss = model(tokens, labels=labels).mean()

Probabilities are computed from the router's own scores at the replayed experts, so that the router learns. A row with
a -1 is left to the router. The load, biases and balancing losses count the replayed experts; where scores have a bias
or groups, balancing losses count the choice without these, as always.

`record`, `replay` and `collect` take any model. `RouterReplay` is Megatron-LM's form, for routers whose config has
`moe_enable_routing_replay`. A recomputed forward has the experts that it had before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import parallel_state
from ...base.errors import ConfigError, DataError
from ...base.module_protocol import unwrap_model
from ...base.recomputation import is_recomputed_elsewhere, noted
from ...dist_checkpointing.agreement import pipeline_ranks
from ...tensor_parallel.groups import gather_first_dim, rank_slice
from ..sequences import gather_sequence, own_chunks
from .load_balancing import context_group

__all__ = ["RouterReplay", "RouterReplayAction", "collect", "is_router", "record", "replay"]

Models = nn.Module | Sequence[nn.Module]
"""A model in any wrapper, or the list of this rank's pipeline stages, which all ranks of the pipeline give."""

Indices = Tensor | np.ndarray[Any, Any]

Shape = tuple[int, int] | None
"""Length and batch of what our routers map, whose tokens come position by position. None for other routers, whose
tokens come sequence by sequence."""


class RouterReplayAction(Enum):
    """What routers do, by Megatron-LM's names."""

    RECORD = "record"
    """Keep the experts of the last forward."""
    REPLAY_FORWARD = "replay_forward"
    """Take the experts that were set last."""
    REPLAY_BACKWARD = "replay_backward"
    """Take those that were set and not taken so before, the first ones first. Only torch's checkpoint needs it."""


class RouterReplay:
    """What one router records and replays, `[tokens, k]` in its own order of tokens, by Megatron-LM's names."""

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []
    """Those of all routers that were built with `moe_enable_routing_replay`, in this order."""

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Sets what each router replays.

        Raises:
            DataError: another number of layers is given.
        """
        num_layers, routers = len(all_layers_topk_indices), RouterReplay.global_router_replay_instances
        if num_layers != len(routers):
            raise DataError(
                f"set_replay_data got indices of {num_layers} layers, and this rank has {len(routers)} routers with "
                "moe_enable_routing_replay; give one tensor for each"
            )
        for router, indices in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Returns what each router has recorded, None of one that has not."""
        return [router.get_recorded_indices() for router in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Forgets what all routers have recorded, and what they were to replay."""
        for router in RouterReplay.global_router_replay_instances:
            router.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Sets what all routers do from now on."""
        for router in RouterReplay.global_router_replay_instances:
            router.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Lets all routers choose again."""
        for router in RouterReplay.global_router_replay_instances:
            router.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forgets all routers, as before another model is built."""
        RouterReplay.global_router_replay_instances.clear()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Sets what the router replays."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Returns what the router has recorded."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keeps the experts of a forward."""
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Forgets what the router has recorded, and what it was to replay."""
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Sets what the router does from now on."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Lets the router choose again."""
        self.router_replay_action = None

    def take(self, scores: Tensor, own: Tensor, shape: Shape, again: bool) -> Tensor | None:
        """Returns what a forward replays, if anything.

        Args:
            again: torch's checkpoint recomputes the forward.
        """
        action, indices = self.router_replay_action, self.target_topk_idx
        if action is RouterReplayAction.RECORD and not again:
            self.record_indices(own)
        if action in (None, RouterReplayAction.RECORD):
            return None
        if action is RouterReplayAction.REPLAY_BACKWARD:
            indices = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        if indices is None:
            raise DataError(f"{action} found no indices for a router; call RouterReplay.set_replay_data first")
        return _checked(indices, scores, own, "a router")


_sources: weakref.WeakKeyDictionary[nn.Module, _Source] = weakref.WeakKeyDictionary()
"""Of each router, what it has in its last context. `_context` alone writes."""


def settle(router: nn.Module, scores: Tensor, own: Tensor, shape: Shape = None) -> Tensor:
    """Returns the experts of each token in this forward, `[tokens, k]`: those that are replayed, or `own`.

    Args:
        scores: `[tokens, experts]`, from which the router has chosen `own`.
    """
    source: Any = _sources.get(router)
    again = is_recomputed_elsewhere()
    if source is None or not (source.is_open or again):
        source = getattr(router, "router_replay", None)

    def take() -> Tensor | None:
        return None if source is None else source.take(scores, own, shape, again)

    taken = take() if again else noted(take)
    return own if taken is None else torch.where((taken < 0).any(-1, keepdim=True), own, taken)


def _checked(indices: Tensor, scores: Tensor, own: Tensor, name: str) -> Tensor:
    """Returns the indices on the router's device, in int64, once they are known to fit its tokens."""
    problem, experts = "", scores.shape[-1]
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        problem = f"are {indices.dtype}; give integers"
    elif indices.shape != own.shape:
        problem = f"are {list(indices.shape)}, not {list(own.shape)}, [tokens, k]; give those of its own micro-batch"
    elif indices.numel():
        ordered = indices.long().sort(-1).values
        least, most = int(ordered.min()), int(ordered.max())
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1) & (ordered[:, 0] >= 0)
        if least < -1 or most >= experts:
            problem = f"go from {least} to {most}; it has {experts} experts, from 0, and -1 leaves a token to it"
        elif repeated.any():
            problem = f"name an expert twice: {indices[repeated][0].tolist()}; give -1 where none is known"
    if problem:
        raise DataError(f"indices that {name} replays {problem}")
    return indices.to(own.device, torch.int64, non_blocking=True)


# ---- contexts


class _Source:
    """What one router records or replays inside of a context, and in later recomputations of its forwards."""

    def __init__(self, router: nn.Module, name: str, indices: Sequence[Tensor] | None) -> None:
        self.name, self.indices, self.is_open = name, indices, True
        self.splits_tokens = getattr(router, "splits_tokens", False)
        self.recorded: list[Tensor] = []
        self.marks: list[Tensor] = []  # of each forward, what tells its scores from those of others

    def take(self, scores: Tensor, own: Tensor, shape: Shape, again: bool) -> Tensor | None:
        if self.indices is None and again:
            return None
        mark = scores.detach().sigmoid().sum(dtype=torch.float64)  # scores may be infinite
        if not again:
            self.marks.append(mark)
            if self.indices is None:
                rows = own.to(torch.int32)
                self.recorded.append(rows if shape is None else rows.view(*shape, -1).transpose(0, 1))
                return None
            return self._rows(len(self.marks) - 1, scores, own, shape)
        numbers = [number for number, known in enumerate(self.marks) if torch.equal(known, mark)]
        matches = [self._rows(number, scores, own, shape) for number in numbers]
        if any(not torch.equal(rows, matches[0]) for rows in matches) or (self.is_open and not matches):
            raise ConfigError(
                f"torch's checkpoint recomputes a forward of {self.name}, and which one is not known; take "
                "recompute_granularity or activation_checkpointing"
            )
        return matches[0] if matches else None

    def _rows(self, number: int, scores: Tensor, own: Tensor, shape: Shape) -> Tensor:
        indices = self.indices or []
        if number >= len(indices):
            raise DataError(f"{self.name} runs micro-batch {number}, and {number} are replayed; give indices of each")
        rows = indices[number]
        if shape is not None and not rows.shape[0] % shape[1]:
            rows = rows.view(shape[1], -1, rows.shape[-1])
            if rows.shape[1] != shape[0]:
                rows = own_chunks(rows)
            if rows.shape[1] != shape[0] and self.splits_tokens:
                rows = rank_slice(rows, 1, parallel_state.get_tensor_model_parallel_group())
            rows = rows.transpose(0, 1).flatten(0, 1)
        return _checked(rows, scores, own, f"{self.name} in micro-batch {number}")


Predicate = Callable[[nn.Module], bool]
"""Returns whether a module chooses experts, with one `topk` over the experts' scores `[tokens, experts]`."""


def is_router(module: nn.Module) -> bool:
    """Returns whether a module is `TopKRouter`, or by its class's name a router of transformers or the like."""
    name = type(module).__name__
    return name.endswith("Router") or (name.endswith(("Gate", "Gating")) and hasattr(module, "num_experts"))


@contextmanager
def record(model: Models, routers: Predicate = is_router) -> Iterator[list[Tensor]]:
    """Records the experts of every forward of the model, each as one micro-batch.

    Returns:
        a list that is filled when the context ends: of each micro-batch the experts of this rank's tokens and layers
        in int32, `[b, s, layers, k]`, or `[tokens, layers, k]` of other libraries' routers. See `collect`.

    Raises:
        ConfigError: the model has no routers, or one of them is in a context.
        DataError: a router did not run as often as others.
    """
    recorded: list[Tensor] = []
    names, _ = _find(model, routers)
    sources = {router: _Source(router, name, None) for router, name in names.items()}
    with _context(sources, None):
        yield recorded
    recorded += [torch.stack(rows, -2) for rows in zip(*(source.recorded for source in sources.values()), strict=True)]


@contextmanager
def replay(model: Models, indices: Indices | Sequence[Indices], routers: Predicate = is_router) -> Iterator[None]:
    """Gives each forward of the model the experts of the next micro-batch, in order. Backward may come later.

    Args:
        indices: of one micro-batch, or a list with those of each, `[tokens, layers, k]` or `[b, s, layers, k]` in
            integers of any width. Of whole sequences and all layers each rank takes its own; or they are this rank's,
            as recorded.

    Raises:
        ConfigError: the model has no routers, or one of them is in a context.
        DataError: indices are not those of the model's layers, experts or tokens, or of other micro-batches than ran.
    """
    names, counts = _find(model, routers)
    total = sum(map(sum, counts))
    batches = [torch.as_tensor(batch) for batch in (indices if isinstance(indices, list | tuple) else [indices])]
    own, rows = _own_layers(counts), []
    for number, batch in enumerate(batches):
        if batch.dim() not in (3, 4) or batch.shape[-2] not in (len(names), total):
            raise DataError(
                f"indices of micro-batch {number} are {list(batch.shape)}, and the model has {total} layers with "
                f"routers; give [tokens, {total}, k]"
            )
        layers = batch.flatten(0, -3).cpu()  # checked there in each layer, without waiting for a device
        rows.append((layers if batch.shape[-2] == len(names) else layers[:, own]).unbind(1))
    sources = {
        router: _Source(router, name, [layers[place] for layers in rows])
        for place, (router, name) in enumerate(names.items())
    }
    with _context(sources, len(batches)):
        yield


def collect(recorded: Sequence[Tensor], model: Models, routers: Predicate = is_router) -> list[Tensor]:
    """Returns what the ranks that share a model recorded, as a server has it: `[tokens, layers, k]` of each
    micro-batch, for whole sequences, one after the other, and all layers. All of these ranks call it."""
    names, counts = _find(model, routers)
    splits_tokens = any(getattr(router, "splits_tokens", False) for router in names)
    whole = []
    for rows in recorded:
        if rows.dim() == 4:
            by_place = rows.transpose(0, 1).contiguous()
            if splits_tokens and (group := parallel_state.get_tensor_model_parallel_group()) is not None:
                by_place = gather_first_dim(by_place, group, what="experts of tokens")[0]
            rows = gather_sequence(by_place, context_group()).transpose(0, 1)
        whole.append(rows.flatten(0, -3))
    parts = pipeline_ranks().all_gather((_own_layers(counts), [rows.cpu() for rows in whole]))
    order = torch.tensor([place for places, _ in parts for place in places]).argsort()
    return [torch.cat(batch, 1)[:, order] for batch in zip(*(rows for places, rows in parts if places), strict=True)]


def _find(model: Models, is_router: Predicate) -> tuple[dict[nn.Module, str], list[list[int]]]:
    """Returns this rank's routers with their names, and of each rank of the pipeline how many its stages have."""
    models = [unwrap_model(model)] if isinstance(model, nn.Module) else [unwrap_model(stage) for stage in model]
    found = [{m: name for name, m in stage.named_modules() if is_router(m)} for stage in models]
    counts = pipeline_ranks().all_gather([len(names) for names in found])
    if not any(map(any, counts)):
        raise ConfigError(
            f"{type(models[0]).__name__} has no routers whose experts could be recorded; name them with routers="
        )
    return {router: name for names in found for router, name in names.items()}, counts


def _own_layers(counts: list[list[int]]) -> list[int]:
    """Returns the places of this rank's routers among those of all stages."""
    places = sorted((turn, rank, i) for rank, own in enumerate(counts) for turn, n in enumerate(own) for i in range(n))
    return [place for place, (_, rank, _) in enumerate(places) if rank == pipeline_ranks().rank]


@contextmanager
def _context(sources: Mapping[nn.Module, _Source], number: int | None) -> Iterator[None]:
    """Lets routers record or replay, and checks that each ran as many micro-batches as are given, or as others."""
    if any(router in _sources and _sources[router].is_open for router in sources):
        raise ConfigError("record or replay is called for a model inside of another for it; leave that one first")
    for router in sources:
        # Hooks stay: a recomputation after the context asks again. Our routers call `settle` themselves.
        if router not in _sources and not hasattr(router, "splits_tokens"):
            router.register_forward_pre_hook(_enter_choice)
            router.register_forward_hook(_leave_choice, always_call=True)
    _sources.update(sources)
    try:
        yield
    finally:
        for source in sources.values():
            source.is_open = False
        while _choices:  # of a forward that was interrupted
            _choices.pop().__exit__(None, None, None)
    expected = max([1, *(len(source.marks) for source in sources.values())]) if number is None else number
    for source in sources.values():
        if len(source.marks) != expected:
            raise DataError(
                f"{source.name} chose experts for {len(source.marks)} of {expected} micro-batches; run all that are "
                "recorded or replayed, uncompiled, and name with routers= the modules that choose experts by topk"
            )


# ---- routers of other libraries


class _Choice(TorchFunctionMode):
    """Settles the `topk` over experts in a forward of another library's router."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.has_chosen = router, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        scores, own = (args or (kwargs["input"],))[0], result.indices
        sizes = {"num_experts": scores.shape[-1], "top_k": own.shape[-1]}
        if scores.dim() != 2 or any(getattr(self.router, name, size) != size for name, size in sizes.items()):
            return result  # over groups of experts
        if self.has_chosen:
            raise ConfigError(
                f"{type(self.router).__name__} calls topk over its experts twice, and which of the two chooses is not "
                "known; its experts cannot be recorded"
            )
        self.has_chosen = True
        experts = settle(self.router, scores, own)
        return result if experts is own else torch.return_types.topk((scores.gather(-1, experts), experts))


_choices: list[_Choice] = []
"""Of the routers whose forwards run, the innermost last."""


def _enter_choice(router: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _choices.append(_Choice(router).__enter__())


def _leave_choice(router: nn.Module, args: Any, output: Any) -> None:
    # The last choice is another router's where a hook before ours raised.
    if not torch.compiler.is_compiling() and _choices and _choices[-1].router is router:
        _choices.pop().__exit__(None, None, None)
