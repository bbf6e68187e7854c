"""Streams a wrapped model's weights as whole tensors, under another system's names, a bucket at a time, or straight
into the shards of receivers.

For shards, ranks say at each call which boxes of each tensor they have, or want. Where two overlap, the elements
travel from the one to the other, in the dtype of the stream: nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import ConfigError, WeightsError, check_choices
from ..base.module_protocol import unwrap_model
from ..base.text import join_parts
from ..dist_checkpointing.agreement import Ranks, held_parts
from ..dist_checkpointing.gathering import BUCKET_BYTES, TensorStream, move, owners_of, plan_transfers
from ..dist_checkpointing.model_state import model_state_dict, stages_state_dict
from ..distributed import _BaseDataParallel
from .names import Adapters, Names, outgoing

_NUM_LISTED = 5


class WeightStream(TensorStream):
    """The weights of a model as ``(name, tensor)`` pairs of whole tensors, in a fixed order, as often as one likes.

    It has the members of vLLM's ``WeightSource``, `metadata` and iteration, so that its trainer engines take it::

        stream = WeightStream(model, dtype=torch.bfloat16, receivers=[0])
        for name, tensor in stream:                          # every rank iterates, between steps
            if rank == 0:
                send(name, tensor)

    Works under every wrapper and tensor parallelism. A rank holds at most a bucket of whole tensors and a bucket of
    copies on top of its own state, or the largest tensor if that is larger. What servers fuse is in one bucket:
    queries, keys and values of a layer, gate and up. A tied weight goes out once, under its first name: give
    ``strict=False`` where `nn.Module.load_state_dict` takes the tensors, whose tie brings the other names.

    Args:
        wrapper: a wrapped model, or a plain one, or all of this rank's pipeline stages.
        names: ``hugging_face`` are those of the files that `save_hugging_face` writes, and of other models than
            `GPTModel` their own; ``megatron`` are Megatron-LM's, with gate and up as halves of one tensor; ``module``
            those of the model's state dict, in its layout.
        dtype: what floating-point parameters are rounded to; None keeps each one's.
        only: names to send; None sends all.
        adapters: ``merge`` adds the updates of LoRA adapters to the weights; ``only`` sends these alone, under PEFT's
            names, and gathers nothing else.
        receivers: ranks of the group that get the tensors; others iterate along and get tensors on the meta device.
            None means all ranks.
        bucket_bytes: bytes of whole tensors that are gathered together.
        process_group: the ranks that hold the model; None means all.

    Raises:
        ConfigError: unknown `names`, `only` or ranks, or a model that cannot have these names.
        CheckpointError: no model of Hugging Face's computes what this one does.
    """

    def __init__(
        self,
        wrapper: nn.Module | Sequence[nn.Module],
        names: Names = "hugging_face",
        *,
        dtype: torch.dtype | None = None,
        only: Iterable[str] | None = None,
        adapters: Adapters = "merge",
        receivers: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        process_group: ProcessGroup | None = None,
    ) -> None:
        given = SimpleNamespace(names=names, adapters=adapters)
        check_choices(given, names=get_args(Names), adapters=get_args(Adapters))
        # Whose parameters it reads: the model, or this rank's pipeline stages.
        self.wrappers = [wrapper] if isinstance(wrapper, nn.Module) else list(wrapper)
        models = [unwrap_model(stage) for stage in self.wrappers]
        views = stages_state_dict(models)
        self._own_names = self._own_views().keys()  # fixed: of this rank's stages
        sent = outgoing(models, views, names, adapters)
        if only is not None:
            wanted = set(only)
            unknown_names = sorted(wanted - {tensor.name for tensor in sent})
            if unknown_names or not wanted:
                shown = join_parts(unknown_names, _NUM_LISTED, ", ") or "nothing"
                raise ConfigError(f"only names {shown}, which the model does not send; names are as {sent[0].name}")
            sent = [tensor for tensor in sent if tensor.name in wanted]
        super().__init__(views, sent, process_group, dtype=dtype, receivers=receivers, bucket_bytes=bucket_bytes)
        if unknown := [rank for rank in self.receivers if not 0 <= rank < self.ranks.size]:
            raise ConfigError(f"receivers has rank {unknown[0]}, and the group has {self.ranks.size} ranks")

    def buckets(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yields the tensors of each bucket together. A bucket is gathered on all ranks when it is yielded, and each
        of its tensors is made when it is asked for.

        Raises:
            ShardstackError: a step has begun, and its backward has not been followed by `finalize_model_grads`.
        """
        self.check_between_steps()
        yield from super().buckets()

    def check_between_steps(self) -> None:
        """Raises unless weights may be read, and waits for the last optimizer step's weights.

        Raises:
            ShardstackError: a step has begun, or the wrapper has released the model.
            CheckpointError: on all ranks: the model has other tensors than before, or shows others.
        """
        for wrapper in (stage for stage in self.wrappers if isinstance(stage, _BaseDataParallel)):
            wrapper.step.reject_mid_step("a stream of weights was started")
            wrapper.step.reject_released("a stream of weights", "model")
            wrapper.engine.parameters.settle()
        self.ranks.on_all(self._look_up)

    def _own_views(self) -> dict[str, Tensor]:
        stages = (model_state_dict(unwrap_model(stage)) for stage in self.wrappers)
        return {name: view for views in stages for name, view in views.items()}

    def _look_up(self) -> None:
        """Takes the tensors that the model has now: a forward may have assigned a buffer since the last pass."""
        own = self._own_views()
        views = {name: own.get(name, view) for name, view in self.views.items()}
        held = {name: held_parts(view) for name, view in views.items()}
        first_held = vars(self).get("held", held)  # by which ranks know what each of them has
        before = {name: (view.dtype, view.shape, *first_held[name]) for name, view in self.views.items()}
        changed = [name for name, view in views.items() if before[name] != (view.dtype, view.shape, *held[name])]
        if changed := changed + sorted(own.keys() ^ self._own_names):
            raise WeightsError(
                f"{changed[0]} has another shape or dtype, or is elsewhere, than when the stream of weights was built "
                "or first sent; build it anew after changing the model, and inside of whole_parameters()"
            )
        self.views, self.held = views, held


def send_shards(stream: WeightStream, group: ProcessGroup) -> None:
    """Sends a stream's weights into the shards of the receivers in `group`, which call `receive_shards`.

    Args:
        stream: its trainer ranks all call this. It has the model's own tensors under any names: none that is cut out
            of another one or merged.
        group: the trainer's ranks and the receivers, at least one of each.

    Raises:
        ConfigError: the stream makes tensors out of others.
        WeightsError: on all ranks, before the first byte: a receiver wants something else.
        ShardstackError: a step has begun.
    """
    if made := [tensor.name for tensor in stream.outgoing if not isinstance(tensor.make, itemgetter)]:
        raise ConfigError(
            f"shards of {made[0]} were asked for, which is made out of other tensors; use WeightStream(names='module')"
        )
    stream.check_between_steps()
    sent = {tensor.name: stream.views[tensor.sources[0]] for tensor in stream.outgoing}
    _move_all(sent, {meta.name: meta.dtype for meta in stream.metadata()}, group, stream.bucket_bytes)


def receive_shards(targets: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Fills tensors, or the shards of them that this rank has, with a trainer's weights, in place.

    Args:
        targets: tensors by the stream's names, as `model_state_dict` returns them: plain ones are whole, and of a
            sharded one each rank gets its own part.
        group: as of `send_shards`.

    Raises:
        WeightsError: on all ranks, before the first byte: a name, shape or dtype is not that of the stream.
    """
    _move_all(targets, {name: target.dtype for name, target in targets.items()}, group)


def _move_all(
    tensors: Mapping[str, Tensor], wire: Mapping[str, torch.dtype], group: ProcessGroup, bucket_bytes: int = 0
) -> None:
    """Moves what senders hold into what receivers hold.

    Args:
        wire: what each tensor travels in.
        bucket_bytes: of copies that a rank holds; 0 on receivers.
    """
    ranks, held = Ranks(group), {name: held_parts(tensor) for name, tensor in tensors.items()}
    metas = {name: (dtype_name(wire[name]), tuple(tensor.shape)) for name, tensor in tensors.items()}
    sides = ranks.all_gather((bucket_bytes, metas, {name: [*boxes] for name, boxes in held.items()}))
    senders = {rank: boxes for rank, (sends, _, boxes) in enumerate(sides) if sends}
    wanted = {rank: boxes for rank, (sends, _, boxes) in enumerate(sides) if not sends}
    if not senders or not wanted:
        raise WeightsError(f"shards need senders and receivers in one group, which has {len(senders)} senders")
    limit_bytes, sent, _ = sides[min(senders)]
    for rank in wanted:
        for name, meta in sides[rank][1].items():
            if sent.get(name) != meta:
                raise WeightsError(f"rank {rank} wants {name} as {meta}, and it is sent as {sent.get(name)}")
    dtypes = {name: DTYPES[dtype] for name, (dtype, _) in sent.items()}
    planned = plan_transfers([*sent], owners_of(senders), wanted, ranks.rank, dtypes, limit_bytes)
    move(planned, held, held, ranks, dtypes)


@dataclass(frozen=True)
class FlattenedTensorMetadata:
    """The place of a tensor in a flattened bucket, in elements. SGLang's class of this name has the same fields."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def flattened(bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[Tensor, list[FlattenedTensorMetadata]]]:
    """Returns a bucket in SGLang's form ``flattened_bucket``: one flat tensor for each dtype, and the place of each
    tensor in it."""
    made = []
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in bucket):
        named = [(name, tensor) for name, tensor in bucket if tensor.dtype == dtype]
        ends = itertools.accumulate(tensor.numel() for _, tensor in named)
        places = [
            FlattenedTensorMetadata(name, tensor.shape, dtype, end - tensor.numel(), end, tensor.numel())
            for (name, tensor), end in zip(named, ends, strict=True)
        ]
        made.append((torch.cat([tensor.reshape(-1) for _, tensor in named]), places))
    return made
