"""Sends weights from the shards of a trainer straight into the shards of receivers, without a gather.

Ranks say at each call which boxes of each tensor they have, or want. Where two overlap, the elements travel from the
one to the other, in the dtype of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import ConfigError, WeightsError
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.gathering import held_parts, move, owners_of
from ..dist_checkpointing.global_view import Box
from .stream import WeightStream


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
    made = [tensor.name for tensor in stream.outgoing if not isinstance(tensor.make, itemgetter)]
    if made:
        raise ConfigError(
            f"shards of {made[0]} were asked for, which is made out of other tensors; use WeightStream(names='module')"
        )
    stream.check_between_steps()
    held = {tensor.name: held_parts(stream.views[tensor.sources[0]]) for tensor in stream.outgoing}
    metas = {meta.name: (dtype_name(meta.dtype), meta.shape) for meta in stream.metadata()}
    _move_all(held, metas, group, stream.bucket_bytes)


def receive_shards(targets: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Fills tensors, or the shards of them that this rank has, with a trainer's weights, in place.

    Args:
        targets: tensors by the stream's names, as `model_state_dict` returns them: plain ones are whole, and of a
            sharded one each rank gets its own part.
        group: as of `send_shards`.

    Raises:
        WeightsError: on all ranks, before the first byte: a name, shape or dtype is not that of the stream.
    """
    held = {name: held_parts(target) for name, target in targets.items()}
    metas = {name: (dtype_name(target.dtype), tuple(target.shape)) for name, target in targets.items()}
    _move_all(held, metas, group)


def _move_all(
    held: Mapping[str, Mapping[Box, Tensor]],
    metas: Mapping[str, tuple[str, tuple[int, ...]]],
    group: ProcessGroup,
    bucket_bytes: int = 0,
) -> None:
    """Moves what senders hold into what receivers hold.

    Args:
        metas: dtype and shape of each tensor.
        bucket_bytes: of copies that a rank holds; 0 on receivers.
    """
    ranks = Ranks(group)
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
    move([*sent], owners_of(senders), held, wanted, held, ranks, dtypes, limit_bytes)
