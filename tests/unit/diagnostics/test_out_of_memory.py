"""A failed allocation says where the bytes are and which settings would save most of them."""

from __future__ import annotations

import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import MemoryLimitError
from core.base.memory_categories import (
    CATEGORIES,
    GATHERED,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    REST,
    WHOLE_GRADIENTS,
)
from core.diagnostics import failures_explained
from core.diagnostics.out_of_memory import (
    held_bytes,
    is_out_of_memory,
    memory_by_category,
    requested_bytes,
    savings,
    table_lines,
)
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.distributed.groups import DataParallelGroups, find_groups
from core.distributed.plan import plan_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer import TransformerConfig
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import UNITS, batches, build, loss_of, settings, toy

ON_A_GPU = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which ..."


class _Fails(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x + torch.empty(2**60)  # more than any machine has


def _runs_out_on_the_host(kind: str) -> str:
    model = build(kind, _Fails(), unit_classes=(nn.Linear,))
    with pytest.raises(MemoryError) as caught:
        model(torch.ones(1, 64))
    assert isinstance(caught.value, MemoryLimitError)
    assert "can't allocate memory" in str(caught.value.__cause__)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp2"])
def test_a_failed_allocation_in_forward_is_raised_with_a_table(kind):
    for rank, message in enumerate(run_distributed(_runs_out_on_the_host, 2, kind)):
        lines = message.splitlines()
        assert lines[0] == (
            f"rank {rank} could not allocate 4 EiB more of the host's memory. Where it is on this rank:"
        )
        rows = dict(re.findall(r"^  (\w[\w ]*?)  +([\d.]+ \w+)$", message, re.MULTILINE))
        assert rows["parameters"] == {"fsdp2": "16.2 KiB", "ddp": "32.5 KiB", "zero1": "33 KiB"}[kind]
        assert {"activations and other", "together"} <= set(rows)
        first, second, third = (line for line in lines if re.match(r"  \d\. ", line))
        assert all("about 2 EiB" in line for line in (first, second))
        assert "half the micro-batch" in first + second and "config.bf16=True" in first + second
        assert "activation_checkpointing" in third and "MiB" in third
        assert lines[-1].startswith("The allocator said: ") and "4611686018427387904 bytes" in lines[-1]


@on_ranks(1)
def test_code_that_catches_torchs_or_pythons_error_still_does() -> None:
    model = build("fsdp2", _Fails(torch.OutOfMemoryError(ON_A_GPU)), unit_classes=(nn.Linear,))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"rank 0 could not allocate 20 MiB more of the accelerator's"
    ) as e:
        model(torch.ones(1, 64))
    assert isinstance(e.value, MemoryLimitError) and "1. half the micro-batch" in str(e.value)
    assert not isinstance(e.value, MemoryError)

    model = build("fsdp2", toy())
    with (
        pytest.raises(MemoryLimitError, match="could not allocate more of the host's memory"),
        failures_explained(model),
    ):
        loss_of(model, batches(0)[0]).backward()
        raise MemoryError  # as in backward or in the optimizer's step


def test_the_allocators_are_understood():
    assert requested_bytes(ON_A_GPU) == 20 * 2**20
    assert (
        requested_bytes("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12")
        == 123
    )
    assert requested_bytes("no number") == 0
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(MemoryLimitError("explained already"))


TABLE = dict.fromkeys(CATEGORIES, 0) | {PARAMETERS: 100, GATHERED: 400, GRADIENTS: 100, OPTIMIZER_STATE: 200, REST: 80}


def _savings(kind: str, device_type: str = "cuda", bf16: bool = True, **fields: object) -> dict[str, int]:
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    config = SimpleNamespace(bf16=bf16, recompute_granularity=None)
    module = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(8)).to(
        torch.bfloat16 if bf16 else torch.float32
    )
    plan = plan_model(module, config, settings(kind, **fields), DataParallelGroups(group, group), [nn.Sequential])
    wrapper = SimpleNamespace(module=module, plan=plan, config=config, process_group=group)
    found = savings(wrapper, TABLE, missing_bytes=20, device_type=device_type)
    return {(re.search(r"\((\w+)", setting) or re.search(r"(half)", setting))[1]: size for setting, size in found}


def test_savings_are_computed_from_the_table():
    common = {"half": 50, "activation_checkpointing": 70, "forward_prefetch": 50}
    assert _savings("fsdp2") == common | {"cpu_offload": 400}
    assert _savings("fsdp2", device_type="cpu") == common
    assert _savings("fsdp2", cpu_offload=True) == common
    assert _savings("fsdp2", reshard_after_forward=False)["reshard_after_forward"] == 300
    assert _savings("fsdp2", bf16=False)["config"] == 250
    assert "config" not in _savings("fsdp2", bf16=False, param_dtype="bf16")
    assert "activation_checkpointing" not in _savings("fsdp2", activation_checkpointing="selective")
    assert "forward_prefetch" not in _savings("fsdp2", forward_prefetch=0, backward_prefetch=0)
    assert _savings("zero3") == common | {"cpu_offload": 400}
    assert _savings("zero3", reshard_after_forward=False)["reshard_after_forward"] == 300
    assert "forward_prefetch" not in _savings("zero3", forward_prefetch=0, backward_prefetch=0)
    common = {"half": 50, "activation_checkpointing": 70}
    assert _savings("ddp") == common | {"TorchFullyShardedDataParallelConfig": 300}
    assert _savings("zero1") == common | {"TorchFullyShardedDataParallelConfig": 150}


def test_one_rank_alone_has_nothing_to_shard():
    with fake_world(rank=0, world_size=1):
        model = build("ddp", toy())
        assert "sharding" not in " ".join(name for name, _ in savings(model, TABLE, 0, "cpu"))
        assert dist.get_world_size() == 1


ELEMENTS = sum(parameter.numel() for parameter in toy(tied=False).parameters())
TRAINABLE = ELEMENTS - 3
BUFFERS = 7


def _table_of(kind: str) -> tuple[dict[str, int], ...]:
    """Returns the table between forward and backward, after a backward inside `no_sync`, and after a step."""
    model = build(kind, toy(tied=False))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    tokens = batches(dist.get_rank())[0]
    model.zero_grad_buffer()
    loss = loss_of(model, tokens)
    forward = memory_by_category(model, "cpu")
    with model.no_sync():
        loss.backward()
    accumulated = memory_by_category(model, "cpu")
    model.finish_grad_sync()
    optimizer.step()
    stepped = memory_by_category(model, "cpu")
    assert all(tuple(table) == CATEGORIES for table in (forward, accumulated, stepped))
    return forward, accumulated, stepped


def test_fsdp2_keeps_half_per_rank_and_gathers_what_it_needs():
    tables = run_distributed(_table_of, 2, "fsdp2")
    for moment in range(3):
        # A shard is padded to the largest, so two ranks together hold a little more than the model.
        assert 4 * ELEMENTS <= sum(table[moment][PARAMETERS] for table in tables) < 4 * ELEMENTS * 1.5
    # Two moments of each parameter, on one of the ranks, and step counts.
    assert 8 * TRAINABLE <= sum(stepped[OPTIMIZER_STATE] for _, _, stepped in tables) < 8 * TRAINABLE + 4096
    for forward, accumulated, stepped in tables:
        head, root = 77, 4  # the last unit and the root stay gathered, padded to the number of ranks
        assert 4 * (head + root) <= forward[GATHERED] < 4 * (head + root) + 64
        assert forward[GRADIENTS] == forward[WHOLE_GRADIENTS] == 0
        assert accumulated[WHOLE_GRADIENTS] == 4 * TRAINABLE and accumulated[GRADIENTS] == 0
        assert stepped[WHOLE_GRADIENTS] == 0 and stepped[GATHERED] == 0
        assert 0 < stepped[GRADIENTS] < 4 * TRAINABLE


def test_replicas_hold_everything():
    for _, accumulated, stepped in run_distributed(_table_of, 2, "ddp"):
        assert stepped[PARAMETERS] == 4 * (ELEMENTS + BUFFERS)
        assert stepped[GATHERED] == stepped[WHOLE_GRADIENTS] == 0
        assert 4 * TRAINABLE <= accumulated[GRADIENTS] == stepped[GRADIENTS] < 4 * TRAINABLE + 4096
        assert 8 * TRAINABLE <= stepped[OPTIMIZER_STATE] < 8 * TRAINABLE + 4096


def test_zero2_lets_whole_gradients_go():
    for _, accumulated, stepped in run_distributed(_table_of, 2, "zero2"):
        assert accumulated[WHOLE_GRADIENTS] >= 4 * TRAINABLE
        assert stepped[WHOLE_GRADIENTS] == 0
        assert 0 < stepped[GRADIENTS] < accumulated[WHOLE_GRADIENTS]


def test_the_rest_is_what_the_process_holds_beyond():
    before = held_bytes("cpu")
    ballast = torch.ones(2**24)  # 64 MiB
    assert 60 * 2**20 < held_bytes("cpu") - before < 200 * 2**20
    assert ballast.sum() > 0


def test_the_table_leaves_out_what_holds_nothing():
    lines = table_lines({PARAMETERS: 2**20, GATHERED: 0, REST: 2**21})
    assert [line.split() for line in lines] == [
        ["parameters", "1", "MiB"],
        ["activations", "and", "other", "2", "MiB"],
        ["together", "3", "MiB"],
    ]


ALL_SETTINGS = [
    *(DistributedDataParallelConfig(data_parallel_sharding_strategy=s) for s in ("no_shard", "optim", "optim_grads")),
    FullyShardedDataParallelConfig(forward_prefetch=1),
    TorchFullyShardedDataParallelConfig(),
]


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_advice_names_settings_that_there_are(settings: DistributedDataParallelConfig) -> None:
    with fake_world(rank=0, world_size=2):
        plan = plan_model(toy(), None, settings, find_groups("test", 1, dist.group.WORLD), UNITS)
        wrapper = SimpleNamespace(plan=plan, config=None, process_group=plan.groups.whole, module=toy())
        advice = " ".join(name for name, _ in savings(wrapper, dict.fromkeys(CATEGORIES, 10**9), 0, "cuda"))
    found = set(re.findall(r"(\w+)=", advice)) - {"bf16"}
    assert found <= {f.name for kind in (type(settings), TransformerConfig) for f in fields(kind)}
    assert "activation_checkpointing" in found and ("cpu_offload" in found) == plan.shards_parameters
