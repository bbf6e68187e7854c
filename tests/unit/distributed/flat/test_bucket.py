"""Buckets: how large they are, when they leave, and that gradients and parameters are views of their buffer."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.flat.bucket import Bucket
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import (
    BUFFERED,
    CountedTraffic,
    accumulate,
    batches,
    build,
    gradients,
    loss_of,
    oracle,
    toy,
)

SHARDED = [kind for kind in BUFFERED if kind.startswith("zero")]


@on_ranks(2)
def test_a_bucket_is_full_at_bucket_size_elements() -> None:
    # In reverse, of two blocks with down 42, up 40 and gain 1, and the embedding of 77: 82, 83 and 78 elements.
    for size, disable_bucketing, calls in ((50, False, 3), (50, True, 1), (None, False, 1)):
        ddp_config = DistributedDataParallelConfig(bucket_size=size)
        model = DistributedDataParallel(object(), ddp_config, toy(), disable_bucketing, process_group=dist.group.WORLD)
        for tokens in batches(dist.get_rank()):
            loss_of(model, tokens).backward()
        with CountedTraffic() as traffic:
            finalize_model_grads([model])
        assert_same(gradients(model), oracle())
        assert traffic.reductions == calls


@on_ranks(2)
def test_buckets_are_sent_in_the_last_backward_in_a_fixed_order() -> None:
    for kind in BUFFERED:
        model = build(kind, toy(tied=False))
        with mock.patch.object(Bucket, "start_grad_sync", autospec=True, side_effect=Bucket.start_grad_sync) as m:
            accumulate(model)
            left = [call.args[0] for call in m.call_args_list]
        assert left == ([] if kind in ("ddp", "zero1") else model.bucket_groups), kind
        model.finish_grad_sync()


@on_ranks(1)
def test_main_grads_are_views_of_one_buffer_unless_frozen() -> None:
    model = build("ddp", toy())
    accumulate(model)
    storages = {p.main_grad.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
    (buffer,) = model.buffers
    assert storages == {buffer.grad_data.data_ptr()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model.module.frozen, "main_grad")
    assert buffer.numel < sum(p.numel() for p in model.parameters()) + 64 * (len(buffer.params) + 2)
    names = [name for name, p in toy().named_parameters() if p.requires_grad]
    assert [slot.name for bucket in buffer.buckets for slot in bucket.slots] == names[::-1]


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_parameters_are_views_of_the_gathered_buffer(kind: str) -> None:
    model = build(kind, toy())
    for buffer in model.buffers:
        for parameter, (start, end, _) in buffer.param_index_map.items():
            assert torch.equal(buffer.param_data[start:end].view(parameter.shape), parameter)
            assert parameter.data_ptr() == buffer.param_data[start:end].data_ptr()
    assert_same(model.state_dict(), toy().state_dict())
    with torch.no_grad():
        for group in model.bucket_groups:
            group.local_param_shard += dist.get_rank() + 1.0
    model.start_param_sync(force_sync=True)
    for group in model.bucket_groups:
        expected = torch.arange(1.0, 3.0).repeat_interleave(group.numel // 2)
        for parameter in group.params:
            start, end = group.param_to_index[parameter]
            moved = (
                parameter.detach().flatten()
                - dict(zip(model.parameters(), toy().parameters(), strict=True))[parameter].detach().flatten()
            )
            assert torch.allclose(moved, expected[start:end], atol=1e-6)
