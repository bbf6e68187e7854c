"""What is particular to the FSDP2 wrapper; the contract is tested in `test_data_parallel_base.py`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.base.errors import ParallelConfigError, WrapError
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from tests.functional._runs import build_gpt, micro_batches
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import GatherCounter, batches, build, full, gradients, loss_of, oracle, toy


def _shards_everything() -> list[int]:
    model = build("fsdp2", toy())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, parameter in model.module.named_parameters():
        assert torch.equal(full(parameter), dict(toy().named_parameters())[name]), name
    return [parameter.to_local().numel() for parameter in model.parameters()]


def test_every_parameter_is_cut_and_nothing_is_lost():
    shards = run_distributed(_shards_everything, 2)
    assert [sum(parts) for parts in zip(*shards, strict=True)] == [p.numel() for p in toy().parameters()]
    assert max(map(sum, shards)) < 0.6 * sum(map(sum, shards))


def _counts_all_gathers(reshard_after_forward: bool) -> int:
    module = toy(tied=False)
    module.embedding.weights_used_in_backward = False
    model = build("fsdp2", module, reshard_after_forward=reshard_after_forward)
    with GatherCounter() as gathers:
        loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    for name, expected in gradients(model).items():
        assert expected.abs().sum() > 0, name
    return gathers.calls


def test_the_last_unit_and_the_root_stay_gathered():
    # Forward gathers root, embedding, two blocks and head. Backward needs the blocks again: head and root are still
    # there, and no backward reads an embedding's weight.
    assert run_distributed(_counts_all_gathers, 2, True) == [7, 7]
    assert run_distributed(_counts_all_gathers, 2, False) == [5, 5]


def _casts_fp32_parameters(grad_reduce_in_fp32: bool) -> None:
    config = SimpleNamespace(bf16=True)
    model = build("fsdp2", toy(), config=config, grad_reduce_in_fp32=grad_reduce_in_fp32)
    seen = []
    model.module.blocks[0].up.register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, out.dtype)))
    logits = model(batches(0)[0])
    assert logits.dtype == torch.float32  # as Float16Module's output
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(g.dtype == torch.float32 for g in gradients(model).values())
    exact = all(torch.equal(g, g.bfloat16().float()) for g in gradients(model).values())
    assert exact != grad_reduce_in_fp32  # a mean of two bf16 values needs more bits than bf16 has


@pytest.mark.parametrize("grad_reduce_in_fp32", [True, False])
def test_the_fp32_shard_is_the_master(grad_reduce_in_fp32):
    run_distributed(_casts_fp32_parameters, 2, grad_reduce_in_fp32)


def _warns_once() -> None:
    fields = {"overlap_grad_reduce": True, "bucket_size": 7}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            build("fsdp2", toy(), **fields)
    said = [str(warning.message) for warning in caught if "gradient buffers" in str(warning.message)]
    assert len(said) == 1
    assert said[0].startswith("overlap_grad_reduce, bucket_size: ")


def test_fields_that_only_buffers_have_warn_once():
    run_distributed(_warns_once, 1)


def _takes_a_plain_config() -> None:
    model = TorchFullyShardedDataParallel(
        object(), DistributedDataParallelConfig(), toy(), _toys.UNITS, process_group=dist.group.WORLD
    )
    for tokens in batches(dist.get_rank()):
        with model.no_sync():
            loss_of(model, tokens).backward()
    model.finish_grad_sync()
    for name, expected in oracle().items():
        assert torch.equal(gradients(model)[name], expected), name


def test_a_plain_config_takes_the_defaults_of_fsdp2():
    run_distributed(_takes_a_plain_config, 2)


def _refuses() -> None:
    world = {"process_group": dist.group.WORLD}
    for strategy in ("optim", "optim_grads"):
        with pytest.raises(ParallelConfigError, match=f"'{strategy}'"):
            TorchFullyShardedDataParallel(
                object(), DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy), toy(), **world
            )
    with pytest.raises(ParallelConfigError, match=r"reduce_scatter_with_fp32_accumulation .* grad_reduce_in_fp32"):
        build("fsdp2", toy(), reduce_scatter_with_fp32_accumulation=True)
    with pytest.raises(ParallelConfigError, match="num_distributed_optimizer_instances is 2 with a process_group"):
        build("fsdp2", toy(), num_distributed_optimizer_instances=2)
    model = build("fsdp2", toy())
    with pytest.raises(WrapError, match=r"it \(Toy\) is sharded already"):
        build("fsdp2", model.module)
    with pytest.raises(WrapError, match=r"its module 'blocks\.0' \(Block\) is sharded already"):
        build("fsdp2", nn.ModuleDict({"blocks": model.module.blocks}))
    scalar = nn.Linear(2, 2)
    scalar.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(WrapError, match=r"parameter gain is a scalar.*shape \(1,\)"):
        build("fsdp2", scalar)
    with pytest.raises(ParallelConfigError, match="force_all_reduce"):
        model.finish_grad_sync(force_all_reduce=True)


def test_what_fsdp2_cannot_honour_is_refused_by_name():
    run_distributed(_refuses, 1)


def _starts_on_meta(kind: str) -> None:
    direct = {name: parameter.detach().clone() for name, parameter in build_gpt(True).named_parameters()}
    with torch.device("meta"):
        module = build_gpt(True)
    module.init_seed += dist.get_rank()  # ranks seeded apart draw as the first one
    assert all(parameter.is_meta for parameter in module.parameters())
    model = wrap_model(module, module.config, _toys.settings(kind), process_group=dist.group.WORLD)
    for name, parameter in module.named_parameters():
        assert torch.equal(full(parameter), direct[name]), name
    assert module.embedding.word_embeddings.weight.shared_embedding
    tokens, labels = micro_batches(0, dist.get_rank())[0]
    assert torch.equal(model(tokens, labels=labels), build_gpt(True)(tokens, labels=labels))


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3", "fsdp2"])
def test_a_meta_start_gives_the_values_of_a_direct_one(kind):
    for world_size in (1, 2):
        run_distributed(_starts_on_meta, world_size, kind)


def _shards_within_instances(num_instances: int) -> list[int]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=num_instances)
    module = toy(seed=1 + dist.get_rank())
    ddp_config = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=num_instances)
    model = TorchFullyShardedDataParallel(SimpleNamespace(), ddp_config, module, _toys.UNITS)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(full(parameter), dict(toy(seed=1).named_parameters())[name]), name
    for _ in range(2):
        model.zero_grad_buffer()
        for index, tokens in enumerate(batches(dist.get_rank())):
            with nullcontext() if index == 2 else model.no_sync():
                loss_of(model, tokens).backward()
        model.finish_grad_sync()
    # Four ranks add three micro-batches in another order than the oracle does.
    assert_same_sums(gradients(model), oracle(world_size=4), additions=11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(float(dist.get_rank() >= 2))  # the second instance drifts away
    model.broadcast_params()
    for name, parameter in model.module.named_parameters():
        if num_instances == 2:
            assert torch.equal(full(parameter), dict(toy(seed=1).named_parameters())[name]), name
    return [parameter.to_local().numel() for parameter in model.parameters()]


def test_hybrid_shards_in_an_instance_and_replicates_across():
    hybrid, fully_sharded = (run_distributed(_shards_within_instances, 4, instances) for instances in (2, 1))
    elements = [parameter.numel() for parameter in toy().parameters()]
    assert [a + b for a, b in zip(hybrid[0], hybrid[1], strict=True)] == elements
    assert hybrid[0] == hybrid[2] and hybrid[1] == hybrid[3]
    assert [sum(parts) for parts in zip(*fully_sharded, strict=True)] == elements


def _refuses_groups_made_for_other_instances() -> None:
    parallel_state.initialize_model_parallel()
    ddp_config = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2)
    with pytest.raises(ParallelConfigError, match=r"2, but .* was initialised with 1"):
        TorchFullyShardedDataParallel(object(), ddp_config, toy(), _toys.UNITS)


def test_instances_must_be_those_of_the_process_groups():
    run_distributed(_refuses_groups_made_for_other_instances, 2)
