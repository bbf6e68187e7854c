"""Layers that compute gradients in the wrapper's memory change no bit of any number, and allocate none."""

from __future__ import annotations

import functools
import pickle
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.base.errors import ShardstackError
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.flat.grad_slot import GradSlot
from core.model_parallel_config import ModelParallelConfig
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from core.transformer.module import Float16Module
from core.transformer.transformer_config import TransformerConfig
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import BUFFERED, build, gradients, synced_last

VOCAB, LENGTH, WIDTH = 96, 12, 32
STEPS, MICRO_BATCHES = 2, 3
WRAPPERS = {**BUFFERED, "zero2 every": {**BUFFERED["zero2_overlap"], "reduce_every_micro_batch": True}}


class Twice(nn.Module):
    """Every weight several times in a forward, the table three times and as the last product too."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        options = {"config": config, "init_method": lambda t: t.normal_(0, 0.2)}
        self.config = config
        self.table = VocabParallelEmbedding(VOCAB, WIDTH, **options)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, **options)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, **options)
        self.head = ColumnParallelLinear(
            WIDTH, VOCAB, bias=False, skip_weight_param_allocation=True, gather_output=True, **options
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.table(labels.flip(0)) * 0.5 + self.table(ids.roll(1)) * 0.25
        for _ in range(3):
            x = x + self.down(torch.tanh(self.up(x)[0]))[0]
        logits = self.head(x, self.table.weight)[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(tied: bool = True, frozen: str = "", **fields: Any) -> nn.Module:
    sizes = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "init_method_std": 0.2} | fields
    config = TransformerConfig(hidden_dropout=0.0, attention_dropout=0.0, **sizes)
    model = GPTModel(
        config,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute" if tied else "rope",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    return Float16Module(config, model) if config.bf16 else model


def twice(**fields: Any) -> nn.Module:
    return Twice(ModelParallelConfig(**fields))


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "tied": gpt,
    "untied": functools.partial(gpt, tied=False),
    "twice": twice,
    "full recompute": functools.partial(gpt, tied=False, **RECOMPUTE),
    "selective recompute": functools.partial(gpt, recompute_granularity="selective"),
    "bf16": functools.partial(gpt, tied=False, bf16=True),
    "bf16, tied": functools.partial(gpt, bf16=True),
    "gated": functools.partial(gpt, False, add_bias_linear=False, gated_linear_unit=True, num_query_groups=2),
    "frozen table": functools.partial(gpt, False, "word_embeddings"),
    "frozen layer": functools.partial(gpt, True, "layers.1"),
}


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB // 3, (2, LENGTH + 1), generator=generator)  # some of them more than once
    return model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).mean()


def wrap(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    group = None if parallel_state.model_parallel_is_initialized() else dist.group.WORLD
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model, process_group=group)


def accumulate(model: DistributedDataParallel, step: int) -> None:
    rank = dist.get_rank(model.process_group)
    for index in synced_last(model, range(MICRO_BATCHES)):
        loss_of(model, 1000 * rank + 10 * step + index).backward()


def train(make: Any, settings: dict[str, Any], fused: bool) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Returns gradients of each step, the weights after the last, and how often memory was lent."""
    torch.manual_seed(3)
    torch._dynamo.reset()  # processes of ranks are reused, and torch compiles a function a few times at most
    module = make(gradient_accumulation_fusion=fused)
    model = wrap(module, **settings)
    bf16 = getattr(module.config, "bf16", False)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, bf16=bf16), [model])
    found = []
    with mock.patch.object(GradSlot, "lend", autospec=True, side_effect=GradSlot.lend) as lend:
        for step in range(STEPS):
            model.zero_grad_buffer()
            accumulate(model, step)
            finalize_model_grads([model])
            found.append(gradients(model))
            optimizer.step()
    model.finish_param_sync()
    found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found, lend.call_count


_unfused: dict[Any, tuple[list[dict[str, torch.Tensor]], int]] = {}
"""What `train_unfused` has found, in the processes of ranks, which many tests share."""


def train_unfused(make: Any, settings: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Runs `train` without fusion, once for all wrappers that are equal to the last bit at two ranks."""
    key: tuple[Any, ...] = (repr(make), settings.get("reduce_every_micro_batch"), settings.get("grad_reduce_in_fp32"))
    if settings.get("compile_units"):
        key += (repr(settings),)  # compiled layers of bf16 are not equal under different wrappers, lent memory or not
    if key not in _unfused:
        _unfused[key] = train(make, settings, fused=False)
    return _unfused[key]


def _changes_nothing(make: Any, settings: dict[str, Any]) -> None:
    found, lent = train(make, settings, fused=True)
    expected, never = train_unfused(make, settings)
    assert lent > 0 == never
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not wrong, f"differ: {wrong}"
        assert all(value.isfinite().all() for value in ours.values())
        assert sum(bool(value.any()) for value in ours.values()) > len(ours) / 2


@pytest.mark.parametrize(
    ("wrapper", "model"),
    quick(
        product(("ddp", "zero1_overlap", "zero2_overlap", "zero2 every"), MODELS),
        lambda case: case[0] == "zero2_overlap" or case[1] == "twice" or case == ("zero1_overlap", "tied"),
    ),
)
def test_fusion_changes_no_bit(wrapper, model):
    run_distributed(_changes_nothing, 2, MODELS[model], WRAPPERS[wrapper])


@pytest.mark.parametrize("wrapper", ["ddp", "zero2"])
def test_fusion_into_fp32_gradients_of_bf16_changes_no_bit(wrapper):
    settings = {**WRAPPERS[wrapper], "grad_reduce_in_fp32": True}
    for model in ("bf16", "bf16, tied"):
        run_distributed(_changes_nothing, 2, MODELS[model], settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrapper", "model"), [("ddp", "untied"), ("zero2_overlap", "bf16"), ("zero2 every", "full recompute")]
)
def test_fusion_in_compiled_units_changes_no_bit(wrapper, model):
    run_distributed(_changes_nothing, 2, MODELS[model], {**WRAPPERS[wrapper], "compile_units": True})


def _changes_nothing_under_tensor_parallelism(make: Any, settings: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _changes_nothing(make, settings)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("model", ["tied", "untied", "twice"])
def test_fusion_under_tensor_parallelism_changes_no_bit(model, sequence_parallel):
    if model == "twice" and sequence_parallel:
        pytest.skip("its table does not cut the sequence")
    make = functools.partial(MODELS[model], tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    run_distributed(_changes_nothing_under_tensor_parallelism, 2, make, WRAPPERS["ddp"])


def _hook_order(fused: bool) -> list[str]:
    torch.manual_seed(3)
    model = wrap(gpt(gradient_accumulation_fusion=fused))
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    accumulate(model, 0)
    return order


@on_ranks(1)
def test_gradients_arrive_in_the_same_order_without_fusion() -> None:
    order = _hook_order(True)
    assert order == _hook_order(False)
    assert len(order) == MICRO_BATCHES * len(set(order))


class _Allocations(TorchDispatchMode):
    """Records the storages of at least `least` bytes that operations return, without those of `known`."""

    def __init__(self, least: int, known: set[int]) -> None:
        super().__init__()
        self.least, self.known = least, known
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least and storage.data_ptr() not in self.known:
                    self.seen.append(str(func))
        return result


def _allocations(fused: bool, micro_batches: int) -> list[str]:
    """Returns the operations of the last micro-batch that allocate as much as the smallest matrix."""
    torch.manual_seed(3)
    model = wrap(gpt(tied=False, num_layers=1, hidden_size=64, gradient_accumulation_fusion=fused))
    model.zero_grad_buffer()
    for index in range(micro_batches - 1):
        loss_of(model, index).backward()
    tensors = [*model.parameters(), *(buffer.grad_data for buffer in model.buffers)]
    least = min(p.numel() for p in model.parameters() if p.dim() == 2) * 4
    with _Allocations(least, {t.untyped_storage().data_ptr() for t in tensors}) as allocations:
        tokens = torch.arange(4).view(1, 4)
        model(tokens, labels=tokens).mean().backward()
    return allocations.seen


@on_ranks(1)
def test_no_gradient_of_a_matrix_or_a_later_table_is_allocated() -> None:
    assert len(_allocations(False, 1)) >= 6  # one for each matrix, at least
    assert _allocations(True, 1) == []
    assert 0 < len(_allocations(True, 2)) < len(_allocations(False, 2))  # products, but no table


class _Copies(TorchDispatchMode):
    """Records the shapes of matrices that are copied into some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages, self.seen = storages, list[torch.Size]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default and args[0].dim() == 2
        if is_copy and args[0].untyped_storage().data_ptr() in self.storages:
            self.seen.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def _copies(fused: bool) -> list[torch.Size]:
    """Returns the gradients of matrices that the first backward of compiled layers copies."""
    torch.manual_seed(3)
    model = wrap(gpt(tied=False, gradient_accumulation_fusion=fused), compile_units=True)
    for _ in range(2):  # the first compiles
        model.zero_grad_buffer()
        loss = loss_of(model, 1)
        with _Copies({buffer.grad_data.untyped_storage().data_ptr() for buffer in model.buffers}) as copies:
            loss.backward()
    return copies.seen


@pytest.mark.long
@on_ranks(1)
def test_no_gradient_of_a_compiled_matrix_is_copied() -> None:
    assert len(_copies(False)) == 2 * 4 + 2  # four of each layer, the table and the last product
    assert _copies(True) == []


class Nested(Twice):
    """A product of a weight, in whose backward another backward brings a gradient of the same weight."""

    use_reentrant = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self._block(self.table(ids))
        x = checkpoint(self._block, x, use_reentrant=self.use_reentrant)
        return self._block(x).square().mean()

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)[0])[0]


@on_ranks(1)
def test_a_nested_backward_with_the_same_gradient_is_refused() -> None:
    for use_reentrant in (False, True):
        model = wrap(Nested(ModelParallelConfig()))
        model.zero_grad_buffer()
        model.module.use_reentrant = use_reentrant
        if not use_reentrant:
            accumulate(model, 0)
            continue
        with pytest.raises(ShardstackError, match=r"parameter down.weight .* use_reentrant=True"):
            accumulate(model, 0)
        model.zero_grad_buffer()
        model.module.use_reentrant = False
        accumulate(model, 0)  # all is forgotten


@on_ranks(1)
def test_a_pickled_parameter_has_no_lender() -> None:
    model = wrap(gpt())
    weight = model.module.decoder.layers[0].mlp.linear_fc1.weight
    assert weight.lend_gradient_memory is not None
    assert not hasattr(pickle.loads(pickle.dumps(weight)), "lend_gradient_memory")


@on_ranks(2)
def test_a_product_is_computed_in_aligned_memory_alone() -> None:
    for of_layers in (False, True):
        module = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((3, 3), (3, 5), (5, 16))))
        for parameter in module.parameters() if of_layers else ():
            parameter.partition_dim = -1
        model = build("ddp", module)
        model.zero_grad_buffer()
        lent = [parameter.lend_gradient_memory() is not None for parameter in module.parameters()]
        # In the order of the buffer: 80 elements, 15, 9. Those of plain modules follow each other without gaps.
        assert lent == [of_layers, True, True]
