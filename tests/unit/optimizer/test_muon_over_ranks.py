"""Muon gives the bits of one process under every wrapper and number of ranks, and continues from any checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.dist_checkpointing import load, model_state_dict, save
from core.dist_checkpointing.flat_range import whole
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.distributed.data_parallel_base import unwrap_model
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer, matrix_owners
from core.optimizer.optimizer_state import export_momentum, import_momentum
from core.tensor_parallel.initialization import FusedRows
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import Shapes, Toy

# The gradient of each step is the same on all ranks and of power-of-two multiples of the weights and their squares,
# so that averaging it over any number of ranks changes no bit: the serial run is the oracle everywhere.
STEPS = 2
SHAPES: Shapes = {
    "qkv.weight": ((72, 40), 0),
    "gated.weight": ((20, 24), 0),
    "down.weight": ((24, 10), 1),
    "experts.weight": ((3, 6, 10), 1),
    "thin.weight": ((1, 31), None),
    "plain.weight": ((33, 17), None),
    "embedding.weight": ((14, 6), 0),
    "norm.weight": ((37,), None),
}
MARKS: dict[str, dict[str, Any]] = {
    "qkv.weight": {"fused_rows": FusedRows((("q", 16), ("k", 4), ("v", 4)), head_rows=4)},
    "gated.weight": {"fused_rows": FusedRows((("gate", 1), ("up", 1)))},
    "experts.weight": {"fused_rows": FusedRows((("gate", 1), ("up", 1)))},
    "embedding.weight": {"is_embedding_or_output_parameter": True},
}
FLAT, SHARDED = DistributedDataParallelConfig, FullyShardedDataParallelConfig
CONFIGS: dict[str, Any] = {
    "ddp": FLAT(),
    "zero1": FLAT(data_parallel_sharding_strategy="optim", bucket_size=500),
    "zero2": FLAT(data_parallel_sharding_strategy="optim_grads", bucket_size=1200),
    "zero3": SHARDED(data_parallel_sharding_strategy="optim_grads_params"),
    "zero3 tensor": SHARDED(data_parallel_sharding_strategy="optim_grads_params", shard_cut="tensor"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
    "hybrid zero1": FLAT(data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2),
    "hybrid fsdp2": TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2),
}


class _Squares(Toy):
    """A loss that every parameter has a part in, and in which every element differs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(shapes=SHAPES, **kwargs)
        for name, param in self.named_parameters():
            vars(param).update(MARKS.get(name, {}))
            with torch.no_grad():
                param.copy_((param / 50).sin())
        for child in self.children():  # a parameter is read in its own module's forward, which waits for it
            child.forward = partial(_squares, child)  # type: ignore[method-assign]

    def forward(self) -> Tensor:
        return torch.stack([child() for child in self.children()]).sum()


def _squares(module: nn.Module) -> Tensor:
    return torch.stack([(p * p * (40 * p.detach()).cos()).sum().float() for p in module.parameters()]).sum()


def _run(wrapper: str, tp: int, settings: dict[str, Any]) -> tuple[Any, MegatronOptimizer]:
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    if wrapper == "serial":
        model: Any = _Squares(filled=True, dtype=dtype)
    else:
        parallel_state.destroy_model_parallel()
        instances = 2 if "hybrid" in wrapper else 1
        parallel_state.initialize_model_parallel(tp, num_distributed_optimizer_instances=instances)
        model = wrap_model(_Squares(filled=True, dtype=dtype), None, CONFIGS[wrapper])
    # no clipping: the norm of a serial run knows no tensor parallelism, and would differ in its last bit
    config = OptimizerConfig(**({"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0} | settings))
    return model, get_megatron_optimizer(config, [model])


def _train(model: Any, optimizer: MegatronOptimizer, steps: int) -> None:
    for _ in range(steps):
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
            model().backward()
            finalize_model_grads([model])
        else:
            optimizer.zero_grad()
            model().backward()
        optimizer.step()


def _state(model: Any, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Makes a state as a training run keeps it: masters in the place of the parameters that were rounded from them."""
    state = optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in state.items() if name.startswith("master.")}
    weights = {f"model.{name}": masters.get(name, t) for name, t in model_state_dict(unwrap_model(model)).items()}
    return weights | {name: t for name, t in state.items() if not name.startswith("master.")}


def _whole_state(wrapper: str, tp: int, settings: dict[str, Any], bucket: int) -> dict[str, Tensor]:
    before, matrix_owners.BUCKET_ELEMENTS = matrix_owners.BUCKET_ELEMENTS, bucket
    try:
        model, optimizer = _run(wrapper, tp, settings)
        _train(model, optimizer, STEPS)
        state = _state(model, optimizer)
        return {name: whole(tensor).clone() for name, tensor in state.items()}
    finally:
        matrix_owners.BUCKET_ELEMENTS = before


def _differing(wrapper: str, tp: int, settings: dict[str, Any], expected: dict[str, Tensor], bucket: int) -> list[str]:
    state = _whole_state(wrapper, tp, settings, bucket)
    assert state.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])]


CASES = [
    *((2, wrapper, 1) for wrapper in CONFIGS if "hybrid" not in wrapper),
    *((2, "zero1", 2), (4, "zero1", 2), (4, "fsdp2", 2), (4, "hybrid zero1", 1), (4, "hybrid fsdp2", 1)),
    *((4, wrapper, 1) for wrapper in CONFIGS if "hybrid" not in wrapper),
    *((16, "fsdp2", 1), (16, "zero1", 1), (4, "ddp", 2)),
]


@pytest.mark.parametrize("holder", ["shards", "owners"])
@pytest.mark.parametrize(
    ("ranks", "wrapper", "tp"),
    quick(CASES, lambda case: case[0] < 16),
    ids=lambda value: str(value),
)
def test_every_wrapper_equals_one_process(ranks: int, wrapper: str, tp: int, holder: str):
    settings = {"muon_momentum_holder": holder, "bf16": wrapper == "zero2", "muon_split_qkv_per_head": tp > 1}
    expected = _whole_state("serial", 1, settings, matrix_owners.BUCKET_ELEMENTS)
    assert run_distributed(_differing, ranks, wrapper, tp, settings, expected, 400) == [[]] * ranks


def _write(wrapper: str, tp: int, settings: dict[str, Any], folder: str) -> None:
    model, optimizer = _run(wrapper, tp, settings)
    _train(model, optimizer, STEPS)
    save(_state(model, optimizer), folder, metadata={"optimizer": optimizer.state_scalars()})


def _continue(wrapper: str, tp: int, settings: dict[str, Any], source: str, target: str) -> None:
    """Loads into a model that has gone elsewhere in the meantime, trains on, and saves."""
    model, optimizer = _run(wrapper, tp, settings)
    _train(model, optimizer, 1)
    metadata = load(_state(model, optimizer), source)
    optimizer.load_state_scalars(metadata["optimizer"])
    _train(model, optimizer, 1)
    _state(model, optimizer)  # a checkpoint between two steps, which changes nothing
    _train(model, optimizer, STEPS - 1)
    save(_state(model, optimizer), target, metadata={"optimizer": optimizer.state_scalars()})


def _on_ranks(fn: Any, world_size: int, wrapper: str, *args: Any) -> None:
    if world_size == 1:
        fn("serial", *args)
    else:
        run_distributed(fn, world_size, wrapper, *args)


MOVES = [
    ((2, "zero1", 1), (4, "fsdp2", 2)),
    ((4, "zero3", 1), (1, "serial", 1)),
    ((1, "serial", 1), (2, "zero3 tensor", 1)),
    ((2, "ddp", 1), (4, "hybrid zero1", 1)),
    ((4, "fsdp2", 2), (2, "zero2", 1)),
]


@pytest.mark.parametrize("holders", [("shards", "owners"), ("owners", "shards"), ("owners", "owners")])
@pytest.mark.parametrize(("writer", "reader"), MOVES)
def test_checkpoint_continues_under_any_wrapper(tmp_path: Path, writer, reader, holders):
    first, second = ({"muon_momentum_holder": holder, "bf16": reader[1] == "zero2"} for holder in holders)
    _on_ranks(_write, *writer, first, str(tmp_path / "first"))
    _on_ranks(_continue, *reader, second, str(tmp_path / "first"), str(tmp_path / "second"))
    model, optimizer = _run("serial", 1, first)
    _train(model, optimizer, 2 * STEPS)
    expected = _state(model, optimizer)
    actual = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert load(actual, tmp_path / "second")["optimizer"]["step"] == 2 * STEPS
    wrong = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not wrong, f"{wrong} differ from the serial run"


def _goes_to_torch_and_back(wrapper: str, holder: str, expected: dict[str, Tensor]) -> list[str]:
    settings = {"muon_momentum_holder": holder}
    model, optimizer = _run(wrapper, 1, settings)
    _train(model, optimizer, STEPS)
    exported = export_momentum(optimizer)
    _, continued = _run(wrapper, 1, settings)
    import_momentum(continued, exported)
    again = export_momentum(continued)
    return [
        n for n in expected if not torch.equal(exported[n], expected[n]) or not torch.allclose(again[n], expected[n])
    ]


@pytest.mark.parametrize("holder", ["shards", "owners"])
@pytest.mark.parametrize("wrapper", ["zero1", "fsdp2"])
def test_momentum_goes_to_torch_and_back(wrapper: str, holder: str):
    model, optimizer = _run("serial", 1, {})
    _train(model, optimizer, STEPS)
    tensors = optimizer.state_tensors()
    momenta = {n.partition(".")[2]: t * (1 - 0.95) for n, t in tensors.items() if n.startswith("momentum_buffer.")}
    assert run_distributed(_goes_to_torch_and_back, 2, wrapper, holder, momenta) == [[], []]
