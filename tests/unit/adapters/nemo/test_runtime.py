"""What is moved to the host, and how a process group ends."""

import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from core.adapters.nemo import _destroy_dist_connection, to_cpu
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed


def _of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = to_cpu(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    assert not isinstance(local, DTensor) and local.tolist() == [2.0 * dist.get_rank(), 2.0 * dist.get_rank() + 1]
    with pytest.raises(ValueError, match="on the device meta"):
        to_cpu(DTensor.from_local(torch.empty(2, device="meta"), mesh, [Shard(0)]))


def test_a_dtensor_gives_its_local_tensor_on_the_cpu_alone():
    run_distributed(_of_dtensors, 2)


def test_other_values_are_given_back():
    tensor, other = torch.ones(2), object()
    assert torch.equal(to_cpu(tensor), tensor)
    assert to_cpu(other) is other and to_cpu(None) is None


def test_the_group_is_destroyed_while_interrupts_are_ignored(monkeypatch):
    seen = []
    destroy = dist.destroy_process_group

    def watched() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        destroy()

    before = signal.signal(signal.SIGINT, lambda *unused: None)
    mine = signal.getsignal(signal.SIGINT)
    try:
        with fake_world(0, 2):
            monkeypatch.setattr(dist, "destroy_process_group", watched)
            _destroy_dist_connection()
            monkeypatch.undo()
            assert seen == [signal.SIG_IGN] and not dist.is_initialized()
            assert signal.getsignal(signal.SIGINT) is mine
        _destroy_dist_connection()  # nothing left to destroy
        thread = threading.Thread(target=_destroy_dist_connection)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
