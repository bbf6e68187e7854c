"""A training loop as Megatron-LM's smallest example: its schedule, an optimizer of torch, and a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import dist_checkpointing, parallel_state
from core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from core.datasets.utils import compile_helpers
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from core.distributed.finalize_model_grads import finalize_model_grads
from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.models.gpt.gpt_model import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel.schedules import get_forward_backward_func
from core.tensor_parallel.random import model_parallel_cuda_manual_seed
from core.tokenizers import MegatronTokenizer
from core.transformer.transformer_config import TransformerConfig
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import full

LENGTH, BATCH, VOCAB, STEPS = 16, 4, 100, 3


def build(seed: int) -> GPTModel:
    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=LENGTH)


def batches() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    while True:
        text = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": positions}


def forward_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, partial(mean_loss, torch.ones(BATCH * LENGTH))


def mean_loss(mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.sum(output.float().view(-1) * mask) / mask.sum()
    return loss, {"lm loss": loss}


WRAPPERS = {
    "ddp": (DistributedDataParallel, DistributedDataParallelConfig(grad_reduce_in_fp32=False)),
    "zero3": (FullyShardedDataParallel, FullyShardedDataParallelConfig()),
    "fsdp2": (TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig()),
}


def _trains_saves_and_loads(kind: str, tensor_parallel: int, folder: str) -> list[str]:
    """Returns the names of tensors that differ after a checkpoint was loaded into another model."""
    parallel_state.initialize_model_parallel(tensor_parallel, 1)
    wrapper, ddp_config = WRAPPERS[kind]
    inner = build(123)
    model = wrapper(config=inner.config, ddp_config=ddp_config, module=inner)
    optimizer = (
        torch.optim.Adam(model.parameters())
        if kind == "ddp"
        else get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
    )
    data, run = batches(), get_forward_backward_func()
    for _ in range(STEPS):
        model.zero_grad_buffer()
        (losses,) = run(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        finalize_model_grads([model])
        optimizer.step()
        assert losses["lm loss"].isfinite()
    dist_checkpointing.save(sharded_state_dict=model.sharded_state_dict(prefix="model."), checkpoint_dir=folder)
    other = wrapper(config=inner.config, ddp_config=ddp_config, module=build(7))
    assert differing(model, other)
    state = dist_checkpointing.load(
        sharded_state_dict=other.sharded_state_dict(prefix="model."), checkpoint_dir=folder
    )
    assert differing(model, other) == []
    other.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    return differing(model, other)


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    others = {name: full(tensor) for name, tensor in other.state_dict().items()}
    return [name for name, tensor in one.state_dict().items() if not torch.equal(full(tensor), others[name])]


@pytest.mark.parametrize(("kind", "tensor_parallel"), [("ddp", 2), ("zero3", 1), ("fsdp2", 1)])
def test_a_loop_of_megatron_trains_saves_and_loads(kind, tensor_parallel, tmp_path):
    folder = tmp_path / "checkpoint"
    assert run_distributed(_trains_saves_and_loads, 2, kind, tensor_parallel, str(folder)) == [[], []]


def _with_offsets() -> None:
    build(1).sharded_state_dict(sharded_offsets=((0, 1, 2),))


def test_offsets_of_parts_are_refused():
    parallel_state.destroy_model_parallel()
    with pytest.raises(Exception, match="was given sharded_offsets"):
        run_distributed(_with_offsets, 1)


def mock_batches() -> Iterator[dict[str, Tensor]]:
    compile_helpers()
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        tokenizer=MegatronTokenizer.from_pretrained(metdata_path={"library": "null-text"}, vocab_size=VOCAB - 1),
    )
    datasets = BlendedMegatronDatasetBuilder(MockGPTDataset, [500, None, None], lambda: True, config).build()
    return iter(torch.utils.data.DataLoader(datasets[0], batch_size=BATCH))


def masked_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"].view(-1))


def _learns_mock_data(folder: str) -> list[float]:
    parallel_state.initialize_model_parallel(2, 1)
    inner = build(123)
    model = DistributedDataParallel(config=inner.config, ddp_config=DistributedDataParallelConfig(), module=inner)
    optimizer, data, losses = torch.optim.Adam(model.parameters(), 1e-2), mock_batches(), []
    for _ in range(20):
        optimizer.zero_grad()
        (loss,) = get_forward_backward_func()(
            forward_step_func=masked_step,
            data_iterator=data,
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        finalize_model_grads([model])
        optimizer.step()
        losses.append(float(loss["lm loss"]))
    dist_checkpointing.save(sharded_state_dict=model.module.sharded_state_dict(), checkpoint_dir=folder)
    state = dist_checkpointing.load(sharded_state_dict=model.module.sharded_state_dict(), checkpoint_dir=folder)
    model.module.load_state_dict(state)
    return losses


def test_mock_data_loop_learns_and_saves(tmp_path):
    (first, second) = run_distributed(_learns_mock_data, 2, str(tmp_path))
    assert first == second
    assert sum(first[-5:]) / 5 < first[0] - 0.2
