"""The device of a rank and its backend: by machine, environment and existing group."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base import device
from core.base.errors import ConfigError
from core.rendezvous import default_group
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
                default_group.init_process_group()  # uses it as it is


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


def test_memory_is_that_of_the_gpu_which_is_simulated():
    own = device.memory_bytes()
    with device.MEMORY_BYTES.replaced(80 * 2**30):
        assert device.memory_bytes() == 80 * 2**30
        assert torch.compile(device.memory_bytes, fullgraph=True, backend="eager")() == 80 * 2**30
    assert device.memory_bytes() == own == device.host_memory_bytes()


def test_a_value_is_put_back_after_an_error():
    seam, seen = device.Seam(1), list[int]()
    with pytest.raises(KeyboardInterrupt), seam.replaced(2):
        with seam.replaced(3):
            thread = threading.Thread(target=lambda: seen.append(seam.value))
            thread.start()
            thread.join()
        seen.append(seam.value)
        raise KeyboardInterrupt
    assert (seen, seam.value) == ([3, 2], 1)
