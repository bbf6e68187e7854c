"""The device of a rank and its backend: by machine, environment and existing group."""

import os
import socket
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base import device
from core.base.errors import ConfigError
from tests.unit._ranks import fake_world


def _see_gpus(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


@pytest.mark.parametrize(
    ("available", "asked", "chosen"),
    [(True, None, "cuda:3"), (False, None, "cpu"), (True, "cpu", "cpu"), (True, "cuda", "cuda:3")],
)
def test_machine_and_environment_decide(
    monkeypatch: pytest.MonkeyPatch, available: bool, asked: str | None, chosen: str
) -> None:
    _see_gpus(monkeypatch, available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv("SHARDSTACK_DEVICE")
    if asked is not None:
        monkeypatch.setenv("SHARDSTACK_DEVICE", asked)
    assert device.device_type() == torch.device(chosen).type
    assert device.current_device() == torch.device(chosen)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("gpu", r"SHARDSTACK_DEVICE is 'gpu'; did you mean 'cpu'. it takes one of cuda, cpu"),
        ("cuda", "sees no GPU; unset it"),
    ],
)
def test_a_device_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, asked: str, message: str) -> None:
    _see_gpus(monkeypatch, False)
    monkeypatch.setenv("SHARDSTACK_DEVICE", asked)
    with pytest.raises(ConfigError, match=message):
        device.device_type()


def test_the_default_group_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, True)
    monkeypatch.setenv("SHARDSTACK_DEVICE", "cuda")
    with fake_world(0, 8):
        assert device.device_type() == "cpu"
        # what torch says of groups made with "nccl", "cpu:gloo,cuda:nccl", or with no backend named on such a machine
        for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
            with monkeypatch.context() as patch:
                patch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
                assert device.device_type() == "cuda"
                device.init_process_group()  # uses it as it is


def test_a_group_of_another_maker_has_to_carry_offloaded_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 2):
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        device.init_process_group(carries_host_tensors=True)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        with pytest.raises(ConfigError, match="made with cuda:nccl, and offloaded shards need gloo too"):
            device.init_process_group(carries_host_tensors=True)


def _default_group_timeout() -> timedelta:
    group = dist.group.WORLD
    assert group is not None
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def test_without_a_launcher_a_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    device.init_process_group(timeout_minutes=2)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert _default_group_timeout() == timedelta(minutes=2)
        value = torch.tensor(5.0)
        dist.all_reduce(value)
        assert value.item() == 5.0
        made = dist.group.WORLD
        device.init_process_group(timeout_minutes=9)
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
    device.init_process_group(timeout_minutes=3)
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
            device.init_process_group(timeout_minutes=0.01)
    monkeypatch.delenv("RANK", raising=False)
    device.init_process_group()
    try:
        assert dist.group.WORLD.group_name == "0"  # type: ignore[union-attr]  # as in a process that never failed
    finally:
        dist.destroy_process_group()


def test_a_rank_with_a_gpu_claims_the_one_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, True)
    place = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"SHARDSTACK_DEVICE": "cuda", **place}.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    device.init_process_group(timeout_minutes=4)
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
        device.init_process_group()
    assert seen == [after]


def test_ranks_on_several_gpus_need_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is set but LOCAL_RANK is not"):
        device._local_rank()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device._local_rank() == 3
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("RANK")
    assert device._local_rank() == 0


def test_more_ranks_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 1, and torch sees 1 GPU on this .*SHARDSTACK_DEVICE=cpu"):
        device._local_rank()


@pytest.mark.parametrize(
    "setting", [("SLURM_GPUS_PER_TASK", "1"), ("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu=1"), ("SLURM_GPU_BIND", "x")]
)
def test_one_visible_gpu_for_each_task_is_taken(monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(*setting)
    assert device._local_rank() == 0


def test_a_barrier_names_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: given.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(device, "device_type", lambda kind=kind: kind)
        device.barrier()
    assert given == [None, [3]]


@pytest.fixture
def _settings_as_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # and unset again afterwards, in any case
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_settings_as_before")
def test_computing_deterministically_is_asked_of_every_library():
    assert not torch.are_deterministic_algorithms_enabled()
    device.compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("_settings_as_before")
def test_a_work_space_that_is_not_deterministic_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*unset it, or set it to :4096:8"):
        device.compute_deterministically()
    assert not torch.are_deterministic_algorithms_enabled()
