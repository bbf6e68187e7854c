"""A rank under NCCL leaves a generation that has ended: its groups are aborted, and a wait for its device raises."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from unittest import mock

import pytest
import torch.distributed as dist

from core.base.errors import OutOfStepError
from core.comm import lane
from core.comm.out_of_step import raise_out_of_step
from core.training.launch import generations
from core.training.launch.messages import Generation, encode
from tests.unit._ranks import fake_world

NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The launcher's end of this process's socket."""
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(generations.COPIES_FOLDER, "/dev/shm")
    monkeypatch.setattr(generations, "_launcher", [])
    monkeypatch.setattr(generations, "launcher_socket", lambda: theirs)
    monkeypatch.setattr(generations, "tell_launcher", lambda message: None)
    monkeypatch.setattr(generations, "_close_connections", lambda *unused, **options: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", generations.GENERATION, NCCL):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.delenv(NCCL)
    yield ours
    ours.close()
    lane.groups_are_aborted.clear()


class _Waiting:
    """A point that the device reaches once its groups are aborted."""

    def query(self) -> bool:
        return lane.groups_are_aborted.is_set()


def test_groups_of_nccl_are_aborted_once_before_they_are_left(
    launcher: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    monkeypatch.setattr(generations, "abort_process_groups", lambda: order.append("abort"))
    launcher.sendall(encode(Generation(number=0, limit_s=60.0)))
    blocks = generations.generations()
    with fake_world(rank=0, world_size=2), mock.patch.object(dist, "get_backend_config", lambda: "cuda:nccl"):
        destroy = dist.destroy_process_group
        monkeypatch.setattr(dist, "destroy_process_group", lambda: (order.append("destroy"), destroy()))
        with next(blocks):
            launcher.sendall(encode(Generation(number=1, limit_s=60.0, lost="rank 1")))
            with pytest.raises(OutOfStepError, match="were aborted; what the device had queued has no result"):
                lane.wait_for(_Waiting())  # type: ignore[arg-type]
            raise OutOfStepError("of the step")
    assert order == ["abort", "destroy"] and os.environ[NCCL] == "0"
    with next(blocks) as generation:
        assert generation.number == 1 and not lane.groups_are_aborted.is_set()


def test_groups_of_gloo_are_not_aborted(launcher: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generations, "abort_process_groups", lambda: pytest.fail("aborted"))
    launcher.sendall(encode(Generation(number=0, limit_s=60.0)))
    with fake_world(rank=0, world_size=2), next(generations.generations()):
        launcher.sendall(encode(Generation(number=1, limit_s=60.0)))
        assert generations._launcher[0].has_ended(10.0) and not lane.groups_are_aborted.is_set()
        raise OutOfStepError("of the step")


ERRORS = [OutOfStepError("of a generation that has ended"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_connections_stay_open_after_a_block(
    error: BaseException, launcher: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    closings: list[None] = []
    closed = threading.Event()
    monkeypatch.setattr(generations, "_CLOSE_INTERVAL_S", 0.01)
    monkeypatch.setattr(
        generations, "_close_connections", lambda *unused, **options: (closings.append(None), closed.set())
    )
    launcher.sendall(encode(Generation(number=0, limit_s=60.0)))
    with fake_world(rank=0, world_size=2), suppress(KeyboardInterrupt), next(generations.generations()):
        launcher.sendall(encode(Generation(number=1, limit_s=60.0)))
        assert closed.wait(10.0)
        raise error
    closings.clear()
    time.sleep(0.1)
    assert not closings


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_failures_are_explained_again_after_a_block(error: BaseException, launcher: socket.socket):
    launcher.sendall(encode(Generation(number=0, limit_s=60.0)))
    with fake_world(rank=0, world_size=2), suppress(KeyboardInterrupt), next(generations.generations()):
        launcher.sendall(encode(Generation(number=1, limit_s=60.0)))
        assert generations._launcher[0].has_ended(10.0)
        raise error
    with fake_world(rank=0, world_size=2), pytest.raises(OutOfStepError, match="The backend said: timed out"):
        raise_out_of_step(dist.DistBackendError("timed out"))
