"""A rank joins the default group as its launcher's environment says, and claims its GPU."""

import os
import socket
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError
from core.rendezvous import default_group
from tests.unit._ranks import fake_world


def test_a_group_of_another_maker_has_to_carry_offloaded_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 2):
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        default_group.init_process_group(carries_host_tensors=True)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        with pytest.raises(ConfigError, match="made with cuda:nccl, and offloaded shards need gloo too"):
            default_group.init_process_group(carries_host_tensors=True)


def _default_group_timeout() -> timedelta:
    group = dist.group.WORLD
    assert group is not None
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def test_without_a_launcher_a_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    default_group.init_process_group(timeout_minutes=2)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert _default_group_timeout() == timedelta(minutes=2)
        value = torch.tensor(5.0)
        dist.all_reduce(value)
        assert value.item() == 5.0
        made = dist.group.WORLD
        default_group.init_process_group(timeout_minutes=9)
        assert dist.group.WORLD is made
        assert _default_group_timeout() == timedelta(minutes=2)
    finally:
        dist.destroy_process_group()


def _place(num_ranks: int) -> dict[str, str]:
    """Returns the first rank's variables, with a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    return {"RANK": "0", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def test_under_a_launcher_the_environment_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _place(1).items():
        monkeypatch.setenv(name, value)
    default_group.init_process_group(timeout_minutes=3)
    try:
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert _default_group_timeout() == timedelta(minutes=3)
    finally:
        dist.destroy_process_group()


def test_a_failed_attempt_to_join_leaves_the_names_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name, value in _place(2).items():
            patch.setenv(name, value)
        with pytest.raises(dist.DistError):
            default_group.init_process_group(timeout_minutes=0.01)
    monkeypatch.delenv("RANK", raising=False)
    default_group.init_process_group()
    try:
        assert dist.group.WORLD.group_name == "0"  # type: ignore[union-attr]  # as in a process that never failed
    finally:
        dist.destroy_process_group()


def test_a_rank_with_a_gpu_claims_the_one_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"SHARDSTACK_DEVICE": "cuda", **place}.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    default_group.init_process_group(timeout_minutes=4)
    assert calls == [1, (("nccl",), {"timeout": timedelta(minutes=4)})]


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("cuda", None, "1"), ("cuda", "0", "0"), ("cpu", None, None)], ids=str
)
@pytest.mark.parametrize("name", ["TORCH_GLOO_LAZY_INIT", "NCCL_LAUNCH_ORDER_IMPLICIT"])
def test_the_environment_of_backends_is_filled_up_on_a_gpu(
    name: str, kind: str, before: str | None, after: str | None
) -> None:
    with (
        mock.patch.dict(os.environ, SHARDSTACK_DEVICE=kind),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(dist, "init_process_group") as joined,
    ):
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
        seen: list[str | None] = []
        joined.side_effect = lambda *args, **kwargs: seen.append(os.environ.get(name))
        default_group.init_process_group()
    assert seen == [after]


def test_ranks_on_several_gpus_need_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is set but LOCAL_RANK is not"):
        default_group._local_rank()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert default_group._local_rank() == 3
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("RANK")
    assert default_group._local_rank() == 0


def test_more_ranks_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 1, and torch sees 1 GPU on this .*SHARDSTACK_DEVICE=cpu"):
        default_group._local_rank()


@pytest.mark.parametrize(
    "setting", [("SLURM_GPUS_PER_TASK", "1"), ("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu=1"), ("SLURM_GPU_BIND", "x")]
)
def test_one_visible_gpu_for_each_task_is_taken(monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(*setting)
    assert default_group._local_rank() == 0
