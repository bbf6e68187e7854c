"""What is particular to the FSDP2 wrapper; the contract is tested in `test_data_parallel_base.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel, wrap_model
from tests.unit._gpt import build_gpt, micro_batches
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import CountedTraffic, batches, build, full, gradients, loss_of, oracle, toy


@on_ranks(2)
def test_every_parameter_is_cut_and_nothing_is_lost() -> None:
    model, whole = build("fsdp2", toy()), dict(toy().named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, parameter in model.module.named_parameters():
        assert torch.equal(full(parameter), whole[name]), name
    held = torch.tensor([parameter.to_local().numel() for parameter in model.parameters()])
    assert sum(held) < 0.6 * sum(parameter.numel() for parameter in whole.values())
    dist.all_reduce(held)
    assert held.tolist() == [parameter.numel() for parameter in whole.values()]


@on_ranks(2)
def test_the_last_unit_and_the_root_stay_gathered() -> None:
    # Forward gathers root, embedding, two blocks and head. Backward needs the blocks again: head and root are still
    # there, and no backward reads an embedding's weight.
    for reshard_after_forward, calls in ((True, 7), (False, 5)):
        module = toy(tied=False)
        module.embedding.weights_used_in_backward = False
        model = build("fsdp2", module, reshard_after_forward=reshard_after_forward)
        with CountedTraffic() as traffic:
            loss_of(model, batches(dist.get_rank())[0]).backward()
        model.finish_grad_sync()
        assert all(gradient.any() for gradient in gradients(model).values())
        assert traffic.gathers == calls


@pytest.mark.parametrize("grad_reduce_in_fp32", [True, False])
@on_ranks(2)
def test_the_fp32_shard_is_the_master(grad_reduce_in_fp32: bool) -> None:
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


@on_ranks(2)
def test_a_plain_config_takes_the_defaults_of_fsdp2() -> None:
    model = TorchFullyShardedDataParallel(
        object(), DistributedDataParallelConfig(), toy(), _toys.UNITS, process_group=dist.group.WORLD
    )
    assert_same(_toys.reduced(model), oracle())


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


@on_ranks(4)
def test_hybrid_shards_in_an_instance_and_replicates_across() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp_config = _toys.settings("fsdp2", num_distributed_optimizer_instances=2)
    model = wrap_model(toy(seed=1 + dist.get_rank()), SimpleNamespace(), ddp_config, sub_modules_to_wrap=_toys.UNITS)
    first = dict(toy(seed=1).named_parameters())
    assert_same({name: full(parameter) for name, parameter in model.module.named_parameters()}, first)
    for _ in range(2):
        model.zero_grad_buffer()
        _toys.accumulate(model)
        model.finish_grad_sync()
    # Four ranks add three micro-batches in another order than the oracle does.
    assert_same_sums(gradients(model), oracle(world_size=4), additions=11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(float(dist.get_rank() >= 2))  # the second instance drifts away
    model.broadcast_params()
    assert_same({name: full(parameter) for name, parameter in model.module.named_parameters()}, first)
    held = torch.zeros(4, len(first), dtype=torch.long)
    held[dist.get_rank()] = torch.tensor([parameter.to_local().numel() for parameter in model.parameters()])
    dist.all_reduce(held)
    assert torch.equal(held[:2], held[2:])
    assert held[:2].sum(0).tolist() == [parameter.numel() for parameter in first.values()]
