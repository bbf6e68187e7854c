"""Random streams that ranks of a model share or keep apart, and recomputation that draws the same numbers again.

Activations replicated over tensor-parallel ranks need one dropout mask: they draw from torch's default stream, which
:func:`model_parallel_manual_seed` seeds equally on all ranks. Activations split over ranks need different masks: they
draw inside ``get_rng_tracker().fork()``, from a stream of each rank. The rule and its seeds (`seed`, and `seed + 2718
+` the tensor-parallel rank) are Megatron-LM's (`model_parallel_cuda_manual_seed` in
`megatron/core/tensor_parallel/random.py`). As there, data-parallel replicas share both streams.

Context parallelism differs from Megatron-LM on purpose. There no seed contains the context-parallel rank (tensor- and
expert-parallel ranks enter it, and `_set_random_seed` adds 100 x the pipeline stage), so that all parts of a sequence
get one mask: an element dropped in one part is dropped at the same place of every other part, and dropout is no longer
independent between tokens. Here parts of a sequence are treated as in sequence parallelism: no two context-parallel
ranks share a mask. Activations replicated over tensor-parallel ranks, but split along the sequence, draw inside
``fork(CONTEXT_PARALLEL_RNG)``. With one context-parallel rank, and on the first of several in ``fork()``, the seeds
are Megatron-LM's.

Pipeline stages differ too, as in Megatron-LM, whose default streams do so everywhere. Here they differ in forwards of
models alone (:func:`stage_streams`), so that all stages of a loop draw the same data.

Streams of a micro-batch depend on its index in the run, and not on the rank that runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import parallel_state
from ..base.device import device_type
from ..base.errors import ConfigError, ParallelStateError
from ..base.megatron_names import absent_names, checks_arguments, ignore
from ..base.recomputation import recompute, tracked_streams
from ..dist_checkpointing.format.content_hash import splitmix64

MODEL_PARALLEL_RNG = "model-parallel-rng"
CONTEXT_PARALLEL_RNG = "context-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718
_CONTEXT_PARALLEL_OFFSET = 1 << 20  # more than there are tensor-parallel ranks


class RNGStatesTracker:
    """Named random streams next to torch's default one, on the device of this process.

    Args:
        states: filled with the state of each stream; default is a new dict.
    """

    def __init__(self, states: dict[str, torch.Tensor] | None = None) -> None:
        # State of each stream by name, byte tensors on the CPU. `add` and `set_states` set them, `fork` replaces a
        # state on exit, `reset` clears all. While a stream is forked, its current state is torch's default stream.
        self._states = {} if states is None else states

    def reset(self) -> None:
        """Forgets every stream."""
        self._states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns a snapshot of the state of every stream by name, as byte tensors on the CPU."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces every stream, for example by a checkpoint's streams."""
        self._states.clear()
        self._states.update(states)

    def add(self, name: str, seed: int) -> None:
        """Starts the stream `name` at `seed`, without touching torch's default stream.

        Raises:
            ConfigError: there is a stream of that name.
        """
        if name in self._states:
            raise ConfigError(f"the random stream {name!r} exists already; reset() the tracker before seeding again")
        self._states[name] = torch.Generator(device=device_type()).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Makes torch's default stream continue the stream `name`, and restores it on exit, after exceptions too.

        Does nothing if no stream was added and no other rank has a part of the same activations: the default stream
        then serves all, and a model needs only `torch.manual_seed`.

        Raises:
            ParallelStateError: there is no stream of that name.
        """
        num_ranks = (
            parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
        )
        if not self._states and num_ranks == 1:
            yield
            return
        if name not in self._states:
            raise ParallelStateError(
                f"no random stream {name!r} (there are {sorted(self._states)}); call "
                "shardstack.tensor_parallel.model_parallel_manual_seed(seed) after initialize_model_parallel()"
            )
        outer = _get_rng_state()
        _set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_rng_state()
            _set_rng_state(outer)


_tracker = RNGStatesTracker(tracked_streams)
"""The tracker of this process, never replaced. `model_parallel_manual_seed` fills it, and recomputations and
`stage_streams` swap its streams for their time."""


def get_rng_tracker() -> RNGStatesTracker:
    """Returns the tracker of this process."""
    return _tracker


@checks_arguments
def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> RNGStatesTracker:
    """Calls :func:`get_rng_tracker`, under Megatron-LM's name. Ignores other kinds of trackers with a warning."""
    return _tracker


def model_parallel_manual_seed(seed: int, *, tp_rank: int | None = None) -> None:
    """Seeds the default stream equally on all ranks of a model, and each rank's own stream differently.

    Context parallelism adds a third, equal on tensor-parallel ranks and different on context-parallel ones.

    Args:
        tp_rank: this rank's number in its tensor-parallel group, if `shardstack.parallel_state` is not initialised.
    """
    if tp_rank is None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
    # Not torch.manual_seed, which also formats the whole stack for each kind of accelerator that is not in use.
    torch.default_generator.manual_seed(seed)
    if device_type() == "cuda":
        torch.cuda.manual_seed_all(seed)
    _tracker.reset()
    own = seed + parallel_state.get_context_parallel_rank() * _CONTEXT_PARALLEL_OFFSET
    _tracker.add(MODEL_PARALLEL_RNG, own + _MODEL_PARALLEL_OFFSET + tp_rank)
    if parallel_state.get_context_parallel_world_size() > 1:
        _tracker.add(CONTEXT_PARALLEL_RNG, own + _CONTEXT_PARALLEL_OFFSET)


@checks_arguments
def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Calls :func:`model_parallel_manual_seed`, under Megatron-LM's name, for the device of this process.

    Args:
        seed, tp_rank: arguments of :func:`model_parallel_manual_seed`.
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng: other kinds of trackers, ignored.
        ep_rank, etp_rank: ignored, as experts draw no numbers of their own.
        force_reset_rng: ignored: streams are always reset.
    """
    model_parallel_manual_seed(seed, tp_rank=tp_rank)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Calls `function(*args)` without saving its activations, which backward computes again (Chen et al., 2016).

    Recomputation draws the random numbers of the forward, from the default stream and the tracked ones, and restores
    all streams. It uses torch's non-reentrant checkpoint.

    Args:
        function: the function to call.
        distribute_saved_activations: Megatron-LM's argument, to save a part of the input on each tensor-parallel rank.
            True is ignored with a warning: every rank saves the whole input, and no number changes.
        args: arguments of the function.

    Raises:
        ConfigError: the second argument is no bool, which Megatron-LM has there.
    """
    if not isinstance(distribute_saved_activations, bool):
        raise ConfigError(
            f"checkpoint: distribute_saved_activations is of type {type(distribute_saved_activations).__name__}; it "
            "takes a bool, and the function's arguments follow it: checkpoint(function, False, *args)"
        )
    ignore(
        "checkpoint",
        "every tensor-parallel rank keeps the whole input",
        distribute_saved_activations=(distribute_saved_activations, False),
    )
    return recompute(function, *args)


def _get_rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if device_type() == "cuda" else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    if device_type() == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), _get_rng_state(), *_tracker.get_states().values()]


@contextmanager
def stage_streams(stage: int) -> Iterator[None]:
    """Lets a pipeline stage draw in a micro-batch's forward what no other stage and no other forward draws.

    All streams inside are seeded by the stage and the state of torch's default CPU stream. That moves on by one number
    if anything was drawn, and is as it was if not: what a loop draws for itself is the same on all stages.
    """
    outer, of_device, tracked = torch.get_rng_state(), _get_rng_state(), _tracker.get_states()
    number = int(torch.randint(1 << 48, (), device="cpu"))
    moved_on = torch.get_rng_state()
    model_parallel_manual_seed(splitmix64(stage + 1, number) >> 16)
    begun = _states()
    try:
        yield
    finally:
        ended = _states()
        _tracker.set_states(tracked)
        _set_rng_state(of_device)
        torch.set_rng_state(outer if all(map(torch.equal, begun, ended)) else moved_on)


_NUMPY_SEEDS = 1 << 32


@dataclass(frozen=True)
class MicroBatchSeeds:
    """The seeds of one step."""

    seed: int
    """Seed of the run."""
    first: int
    """Index, in the run, of the step's first micro-batch."""

    def enter(self, index: int) -> None:
        """Seeds every stream of this rank for the step's micro-batch `index`, as `seed_everything` does for a run."""
        seed_everything(splitmix64(self.first + index + 1, self.seed) >> 16)  # 48 bits


def seed_everything(seed: int) -> None:
    """Seeds torch, the tensor-parallel streams, numpy and Python. Ranks of one model must pass the same seed."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    model_parallel_manual_seed(seed)


__getattr__ = absent_names(__package__)
