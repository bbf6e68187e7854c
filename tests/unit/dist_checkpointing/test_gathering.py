"""Tensors of the whole model in buckets: a bucket closes in time, and one process gathers nothing."""

from __future__ import annotations

import torch

from core.dist_checkpointing.gathering import Outgoing, TensorStream


def test_a_bucket_closes_before_it_exceeds_its_bytes():
    sizes = {"a": 2, "b": 2, "c": 1, "large": 9, "d": 3, "e": 3}
    views = {name: torch.zeros(size) for name, size in sizes.items()}
    bundles = [["a"], ["b"], ["c"], ["large"], ["d", "e"]]
    sent = [Outgoing("+".join(names), (1,), tuple(names), dict) for names in bundles]
    buckets = TensorStream(views, sent, bucket_bytes=16).bucket_metadata()
    assert [[meta.name for meta in bucket] for bucket in buckets] == [["a", "b"], ["c"], ["large"], ["d+e"]]


def test_one_process_gathers_nothing():
    weight = torch.arange(6.0).view(2, 3)
    assert dict(TensorStream({"weight": weight}))["weight"].data_ptr() == weight.data_ptr()
