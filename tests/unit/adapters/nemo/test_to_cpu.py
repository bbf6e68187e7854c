"""What NeMo Automodel's `to_cpu` returns for each kind of value."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from core.adapters.nemo import to_cpu
from tests.unit._spawn import on_ranks


@on_ranks(2)
def test_a_dtensor_on_the_cpu_gives_its_local_tensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = to_cpu(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    assert not isinstance(local, DTensor) and local.tolist() == [2.0 * dist.get_rank(), 2.0 * dist.get_rank() + 1]
    with pytest.raises(ValueError, match="on the device meta"):
        to_cpu(DTensor.from_local(torch.empty(2, device="meta"), mesh, [Shard(0)]))


def test_tensors_and_other_values() -> None:
    tensor, other = torch.ones(2), object()
    assert torch.equal(to_cpu(tensor), tensor)
    assert to_cpu(other) is other and to_cpu(None) is None
    with pytest.raises(ValueError, match="on the device meta"):
        to_cpu(torch.empty(2, device="meta"))
