"""Runs the micro-batches of a step through the pipeline stages of `torch.distributed.pipelining`.

torch's schedules order forwards and backwards, and exchange activations and gradients between neighbours. Their
stages are given no model, but a `_Chunk` that calls it: torch then does nothing to sharded parameters, and a wrapper
works as it does without a pipeline. Its `no_sync` is entered before the first forward of a step and left for the last
backward, so that each stage reduces its gradients once, while later micro-batches cool down elsewhere.

ZBV sends the gradient of a stage's input before it computes those of weights, which linear layers defer
(`tensor_parallel.weight_gradients`). The stage then reduces with the last of these. Where a wrapper frees weights in
backward, both are computed at once.

Losses that balance experts travel with the activations, as a second tensor: the gradient of their sum is their weight
in the loss, which the last stage alone knows, and which flows back like any other gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from .. import parallel_state
from ..base import device
from ..base.device import Seam
from ..base.errors import ConfigError, DataError, OutOfStepError, ParallelConfigError, ShardstackError
from ..comm import streams
from ..comm.awaited_messages import AwaitedMessage
from ..comm.out_of_step import is_failure_of_backend
from ..comm.record import is_recording
from ..distributed import _BaseDataParallel
from ..tensor_parallel.random import stage_streams
from ..tensor_parallel.weight_gradients import Product, compute_deferred, deferring
from ..transformer.moe.load_balancing import pop_balance_losses
from ..transformer.pipeline_stages import PipelineStage, check_rounds, stage_index, stages_of
from ..utils import get_attr_wrapped_model, get_model_config

MicroBatch = Callable[[nn.Module, int], Tensor]
"""Runs the next micro-batch of a model chunk, whose number on this rank follows. Returns the hidden states
`[s, b, h]`, or on the last stage the loss that backward starts from, 0-dim."""


def run_micro_batches(
    chunks: Sequence[nn.Module],
    run: MicroBatch,
    num_microbatches: int,
    *,
    shape: tuple[int, int],
    forward_only: bool = False,
) -> None:
    """Runs the micro-batches of a step: over the pipeline's stages (:func:`run_stages`), or one after the other.

    With one stage all micro-batches but the last run inside the config's `no_sync_func`, by default the wrapper's
    `no_sync`. The arguments are those of :func:`run_stages`; one stage does not read `shape`.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        run_stages(chunks, run, num_microbatches, shape=shape, forward_only=forward_only)
        return
    (model,) = chunks
    no_sync = getattr(get_model_config(model), "no_sync_func", None) or getattr(model, "no_sync", None) or nullcontext
    for index in range(num_microbatches):
        with nullcontext() if forward_only or index == num_microbatches - 1 else no_sync():
            output = run(model, 0)
            if not forward_only:
                output.backward()


def run_stages(
    chunks: Sequence[nn.Module],
    run: MicroBatch,
    num_microbatches: int,
    *,
    shape: tuple[int, int],
    forward_only: bool = False,
) -> None:
    """Runs the forwards of a step on this rank's stages, and their backwards unless `forward_only`. All ranks call it.

    Args:
        chunks: this rank's stages, wrapped or not, the first virtual stage first.
        run: called for each micro-batch of each chunk, in order.
        shape: tokens of a whole sequence, which context-parallel and sequence-parallel ranks share, and sequences of a
            micro-batch; the same in each of them.

    Raises:
        ConfigError: a number of chunks or micro-batches that the schedule does not have; or a model that cannot be
            cut, because it has no `set_input_tensor`.
        DataError: a stage's output has another shape than the arguments say.
        OutOfStepError: a neighbour sent nothing. Names stage, micro-batch and direction.
    """
    config = get_model_config(chunks[0])
    sequence_ranks = parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        sequence_ranks *= parallel_state.get_tensor_model_parallel_world_size()
    hidden_shape = (shape[0] // sequence_ranks, shape[1], config.hidden_size)
    pipeline = _pipeline_of(chunks, config, num_microbatches, hidden_shape, forward_only)
    with pipeline.step(chunks, run):
        targets = {} if forward_only else {"target": torch.empty(num_microbatches, device="cpu")}
        pipeline.schedule.step(**targets, return_outputs=False)


class Pipeline:
    """A schedule over this rank's stages, for one number of micro-batches and one shape. It runs one step at a time.

    Args:
        shape: of the hidden states between stages.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: Any,
        num_microbatches: int,
        shape: tuple[int, ...],
        forward_only: bool,
    ) -> None:
        # Torch's stages call the chunks, which do not keep the models alive.
        self._chunks = [_Chunk(chunk, index, shape, config) for index, chunk in enumerate(chunks)]
        group, here = parallel_state.get_pipeline_model_parallel_group(), device.current_device()
        stages, rank = stages_of(config), parallel_state.get_pipeline_model_parallel_rank()
        # What this rank does now, for messages, and whether it waits for a neighbour. Stages write both before each
        # wait and each computation.
        self.doing, self.is_waiting = "connecting to the other pipeline stages", True
        # The message that the device waits for until the next note; None on the host, which waits itself.
        self._awaited: AwaitedMessage | None = None
        self._stages = []
        for chunk in self._chunks:
            chunk.stage = place = stages[stage_index(config, rank, chunk.index)]
            between = chunk.tensors_between(config)
            inputs = () if place.is_first else between
            outputs = (torch.empty((), device="meta"),) if place.is_last else between
            deferred = chunk.take_deferred if config.pipeline_schedule == "ZBVZeroBubble" else None
            stage = STAGE.value(
                chunk, place.index, place.count, here, inputs, outputs, group=group, dw_builder=deferred
            )
            stage.pipeline, stage.chunk = self, chunk
            self._stages.append(stage)
        check_rounds(config, num_microbatches)
        self._num_microbatches, self._forward_only = num_microbatches, forward_only
        self._splits_backward = config.pipeline_schedule == "ZBVZeroBubble" and not forward_only
        self.schedule = self.make_schedule(config.pipeline_schedule, num_microbatches)

    def make_schedule(self, name: str, number: int) -> Any:
        """Makes a schedule of torch's over this rank's stages, for a number of micro-batches."""
        if name == "1F1B" and (number < self._stages[0].group_size or self._forward_only):
            name = "GPipe"  # of so few micro-batches the order is the same, and torch's 1F1B takes no fewer
        stages: Any = self._stages[0] if name in ("1F1B", "GPipe") else self._stages
        # What the last stage has computed is the loss of the micro-batch.
        loss = None if self._forward_only else lambda output, target: output
        return pipelining.schedules.get_schedule_class(name)(stages, number, loss_fn=loss, scale_grads=False)

    @contextmanager
    def step(self, chunks: Sequence[nn.Module], run: MicroBatch) -> Iterator[None]:
        """Lets the chunks run micro-batches inside it, and explains failures."""
        with ExitStack() as stack:
            for stage in self._stages:  # torch's, which after an error still have what was deferred
                stack.callback(stage.dw_runner.clear)
            for chunk, model in zip(self._chunks, chunks, strict=True):
                stack.callback(chunk.end_step)
                splits = self._splits_backward and _may_defer(model)
                chunk.begin_step(model, run, 0 if self._forward_only else self._num_microbatches, splits)
            try:
                yield
            except Exception as error:
                self._explain(error)
                raise

    def note(self, doing: str, *, waits: bool) -> None:
        """Takes down what the rank does now, and whether it waits for a neighbour."""
        if self._awaited is not None:
            self._awaited.end()
        group, self._awaited = self._stages[0].group, None
        if waits and group is not None and streams.is_asynchronous(device.current_device()) and is_recording():
            self._awaited = AwaitedMessage(doing, group)
        self.doing, self.is_waiting = doing, waits

    def _explain(self, error: Exception) -> None:
        """Names the place of an error in the pipeline: in a new error if a neighbour is silent, else in a note."""
        place = f"rank {dist.get_rank()}, {self.doing}"
        if is_failure_of_backend(error) and self.is_waiting:
            raise OutOfStepError(
                f"{place}, and nothing came; look at that rank first. The backend said: {str(error).splitlines()[0]}"
            ) from error
        if not isinstance(error, ShardstackError):
            error.add_note(place)


class _Chunk(nn.Module):
    """What a stage of torch's calls: runs the next micro-batch of a model. Has no parameters that torch could see.

    Args:
        index: its number on this rank.
        shape: of the hidden states between stages.

    Attributes:
        stage: its place in the pipeline.
    """

    stage: PipelineStage

    def __init__(self, model: nn.Module, index: int, shape: tuple[int, ...], config: Any) -> None:
        super().__init__()
        self.index, self._shape = index, shape
        try:
            get_attr_wrapped_model(model, "set_input_tensor")
        except ConfigError as error:
            raise ParallelConfigError(
                f"a {type(model).__name__} cannot be cut into pipeline stages: it has no set_input_tensor, which "
                "takes what the stage before it computed; add that method, or use pipeline_model_parallel_size 1"
            ) from error
        self._dtype, self._has_experts = config.compute_dtype, config.num_moe_experts is not None
        # All valid inside a step; `begin_step` sets them, `end_step` clears them.
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._run: MicroBatch | None = None
        self._backwards_left = 0
        # Weights' gradients that the backward under way leaves for later; `take_deferred` takes them. None: it leaves
        # none.
        self._products: list[Product] | None = None
        # Holds the wrapper's `no_sync`, and hooks of its forward, until the last backward of a step begins, or it
        # fails.
        self._no_sync = ExitStack()
        # Holds random streams of the forward under way.
        self._streams = ExitStack()

    def tensors_between(self, config: Any) -> tuple[Tensor, ...]:
        """Returns what stages exchange: hidden states, and with experts the sum of their auxiliary losses."""
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        losses = torch.empty((), dtype=_loss_dtype(self._dtype), device="meta", requires_grad=True)
        return (hidden, losses) if self._has_experts else (hidden,)

    def begin_step(self, model: nn.Module, run: MicroBatch, num_backwards: int, splits_backward: bool) -> None:
        """Sets the step's model and function, and keeps its gradients on this rank until the last backward.

        Args:
            splits_backward: weights' gradients are computed by the functions that `take_deferred` returns.
        """
        self._model, self._run, self._backwards_left = weakref.ref(model), run, num_backwards
        self._products = [] if splits_backward else None
        # All forwards come before the last backward, which closes the stack.
        draws = partial(stage_streams, self.stage.index)
        begin = model.register_forward_pre_hook(lambda *_: self._streams.enter_context(draws()))
        self._no_sync.callback(begin.remove)
        end = model.register_forward_hook(lambda *_: self._streams.close(), always_call=True)
        self._no_sync.callback(end.remove)
        if num_backwards > 1 or splits_backward:
            context = getattr(get_model_config(model), "no_sync_func", None)
            context = context[self.index] if isinstance(context, (list, tuple)) else context
            if (no_sync := context or getattr(model, "no_sync", None)) is not None:
                self._no_sync.enter_context(no_sync())

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Lets the step's last backward inside it reduce gradients, unless weights' gradients come later."""
        if self._products is None:
            self._note_backward()
            yield
        else:
            with deferring(self._products):
                yield

    def take_deferred(self) -> Callable[[], None]:
        """Returns a function that computes the weights' gradients which the last backward has deferred."""
        if (products := self._products) is None:
            return lambda: None
        self._products = []

        def compute() -> None:
            self._note_backward()
            compute_deferred(products)
            model = self._model()
            if (
                self._backwards_left == 0
                and isinstance(model, _BaseDataParallel)
                and model.plan.settings.overlap_grad_reduce
            ):
                model.start_grad_sync()  # gradients that were not deferred came before

        return compute

    def _note_backward(self) -> None:
        self._backwards_left -= 1
        if self._backwards_left == 0:
            self._no_sync.close()

    def end_step(self) -> None:
        """Drops the step's model and function, after an error too."""
        self._no_sync.close()
        self._model, self._run, self._products = lambda: None, None, None

    def forward(self, hidden: Tensor | None = None, losses: Tensor | None = None) -> Any:
        """Runs the next micro-batch on what the stage before it computed, if there is one."""
        model = self._model()
        if model is None or self._run is None:
            raise ShardstackError("a pipeline stage was called outside of a step; call run_stages")
        if not self.stage.is_first:
            get_attr_wrapped_model(model, "set_input_tensor")([hidden, losses] if self._has_experts else [hidden])
        parallel_state.set_virtual_pipeline_model_parallel_rank(self.index)
        with nullcontext() if self._products is None else deferring(self._products):
            output = self._run(model, self.index)
        if self.stage.is_last:
            return output
        if output.shape != self._shape:
            raise DataError(
                f"{self.stage} returned {list(output.shape)}, and the next one waits for hidden states "
                f"{list(self._shape)}; give seq_length and micro_batch_size of the batch, which all micro-batches have"
            )
        output = output.to(self._dtype)  # wrappers cast what a model returns to fp32
        if not self._has_experts:
            return output
        total = torch.zeros((), dtype=_loss_dtype(self._dtype), device=output.device)
        for loss in pop_balance_losses(model):
            total = total + loss.to(total.dtype)  # the next stage waits for this dtype
        return output, total


class Stage(pipelining.PipelineStage):
    """A stage of torch's that lets its chunk reduce gradients once a step, and notes what the rank does."""

    pipeline: Pipeline
    chunk: _Chunk

    def note(self, what: str, micro_batch: int, peer: int | None = None) -> None:
        """Takes down what the rank does now: a pass of a micro-batch, or its wait for a message of a neighbour."""
        stage = self.chunk.stage
        source = "" if peer is None else f" from stage {peer} (rank {self._resolve_rank(peer)})"
        self.pipeline.note(f"{stage}: {what} of micro-batch {micro_batch}{source}", waits=peer is not None)

    def _resolve_rank(self, stage: int) -> int:
        return dist.get_process_group_ranks(self.group)[self.stage_index_to_group_rank[stage]]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if ops := super().get_fwd_recv_ops(fwd_chunk_id):
            self.note("waits for the activations", fwd_chunk_id, self.stage_index - 1)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if ops := super().get_bwd_recv_ops(bwd_chunk_id):
            self.note("waits for the gradient", bwd_chunk_id, self.stage_index + 1)
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.note("forward", fwd_chunk_id)
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:  # torch puts its own in front of the model's
            raise error.__cause__ or error from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            return None
        self.note("backward", bwd_chunk_id)
        with self.chunk.backward():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Drops torch 2.11's first messages between stages of one rank (ZBV): gloo refuses a message to oneself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    # Where neighbours are on one rank, torch passes gradients by these two, without a backward too.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


STAGE: Seam[Callable[..., Stage]] = Seam(Stage)
"""Makes each stage of a new pipeline, with torch's arguments. The planner's stages have no neighbours."""

_pipelines: weakref.WeakKeyDictionary[nn.Module, dict[bool, tuple[Any, Pipeline]]] = weakref.WeakKeyDictionary()
"""By a rank's first chunk the pipelines of its last training step (False) and its last evaluation (True), with what
they were made for. `_pipeline_of` replaces them. A pipeline owns the memory that it receives into, of each
micro-batch."""


def _pipeline_of(
    chunks: Sequence[nn.Module], config: Any, num_microbatches: int, shape: tuple[int, ...], forward_only: bool
) -> Pipeline:
    """Returns the pipeline of the last step if it was the same, else a new one. All ranks call it."""
    if len(chunks) != (config.virtual_pipeline_model_parallel_size or 1):
        raise ConfigError(
            f"model is a list of {len(chunks)}, and virtual_pipeline_model_parallel_size is "
            f"{config.virtual_pipeline_model_parallel_size}; give a model for each of the rank's virtual stages"
        )
    pipelines = _pipelines.setdefault(chunks[0], {})
    key = (tuple(map(id, chunks)), num_microbatches, shape, config.pipeline_schedule)
    if forward_only not in pipelines or pipelines[forward_only][0] != key:
        pipelines[forward_only] = key, Pipeline(chunks, config, num_microbatches, shape, forward_only)
    return pipelines[forward_only][1]


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _may_defer(model: nn.Module) -> bool:
    """Returns whether weights' gradients may come after inputs' gradients.

    They may not where a backward frees weights, nor where each backward is reduced or counted.
    """
    if not isinstance(model, _BaseDataParallel):
        return True
    plan = model.plan
    return not (
        plan.shards_parameters or plan.settings.reduce_every_micro_batch or plan.settings.reproducible_across_ranks
    )
