"""The settings that FSDP2 has beyond those of every wrapper: each has its effect, and none changes a number."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    torch_fully_sharded_data_parallel,
)
from core.distributed.fsdp_collectives import DirectReduceScatter
from core.distributed.sharding import fsdp_modules
from core.errors import ParallelConfigError, WrapError
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_layer import TransformerLayer
from tests.functional._runs import build_gpt
from tests.unit._spawn import run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import (
    GatherCounter,
    GradientTraffic,
    batches,
    build,
    gradients,
    loss_of,
    oracle,
    toy,
)

VARIANTS: list[dict[str, Any]] = [
    {"reshard_after_forward": False},
    {"reshard_overrides": ("=True", "blocks.0=False", "head=True")},
    {"forward_prefetch": 0, "backward_prefetch": 0},
    {"forward_prefetch": 3, "backward_prefetch": 2},
    {"collectives": "torch"},
    {"collectives": "torch", "forward_prefetch": 0, "backward_prefetch": 0},
    {"keep_gathered_between_micro_batches": True},
    {"keep_gathered_between_micro_batches": True, "reduce_every_micro_batch": True},
    {"cpu_offload": True},
]


def step(model: Any, rank: int) -> None:
    for index, tokens in enumerate(batches(rank)):
        with nullcontext() if index == 2 else model.no_sync():
            loss_of(model, tokens).backward()
    finalize_model_grads([model])


def _gives_the_numbers_of_the_serial_run(tied: bool) -> None:
    for settings in VARIANTS:
        model = build("fsdp2", toy(tied=tied), **settings)
        for _ in range(2):  # the second time the order of units is known
            model.zero_grad_buffer()
            with torch.no_grad():
                model(batches(0)[0])
            step(model, dist.get_rank())
        for name, expected in oracle(tied=tied).items():
            found = gradients(model)[name]
            if "reduce_every_micro_batch" in settings:  # which adds in another order
                assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8), (settings, name)
            else:
                assert torch.equal(found, expected), (settings, name)


@pytest.mark.parametrize("tied", [True, False])
def test_no_setting_changes_a_number(tied):
    run_distributed(_gives_the_numbers_of_the_serial_run, 2, tied)


# ---- when parameters are gathered


class Stack(nn.Module):
    """Layers of one kind, and a parameter of the root."""

    def __init__(self, layers: int = 8, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(layers)])
        self.gain = nn.Parameter(torch.ones(6))
        self.order = list(range(layers))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            layer = self.layers[index]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return x * self.gain


def stacked(**settings: Any) -> TorchFullyShardedDataParallel:
    return build("fsdp2", Stack(), unit_classes=[nn.Linear], **settings)


def _gathers_of_a_step(settings: dict[str, Any]) -> int:
    model = stacked(**settings)
    for _ in range(2):
        with GatherCounter() as gathers:
            for index in range(4):
                with nullcontext() if index == 3 else model.no_sync():
                    model(torch.ones(2, 6)).sum().backward()
            model.finish_grad_sync()
        model.zero_grad_buffer()
    return gathers.calls


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4 * (1 + 8 + 7)),  # root and layers, and all layers but the last again for backward
        ({"reshard_overrides": ("=True", "layers.7=True")}, 4 * (1 + 8 + 1 + 8)),
        ({"reshard_after_forward": False}, 4 * (1 + 8)),
        ({"keep_gathered_between_micro_batches": True}, 1 + 8),
        ({"forward_prefetch": 0, "backward_prefetch": 0}, 4 * (1 + 8 + 7)),
        ({"forward_prefetch": 2, "backward_prefetch": 3, "collectives": "torch"}, 4 * (1 + 8 + 7)),
    ],
)
def test_settings_decide_how_often_parameters_are_gathered(settings, expected):
    assert run_distributed(_gathers_of_a_step, 2, settings) == [expected] * 2


def _keeps_parameters_whole_among_neighbours(reshard: Any) -> list[list[int]]:
    gathered_from: list[int] = []
    model = stacked(reshard_after_forward=reshard, collectives="torch")
    gather = dist.all_gather_single

    def record(output: Any, input_: Any, group: Any, async_op: bool) -> Any:
        gathered_from.append(group.size())
        return gather(output, input_, group=group, async_op=async_op)

    expected = Stack()
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    with torch.no_grad():
        model(x)
    assert all(p._sharded_post_forward_param_data is None for m in fsdp_modules(model) for p in _fsdp_params(m))
    with model.no_sync():
        model(2.0 * x).sum().backward()
    dist.all_gather_single = record
    try:
        loss = model(x).sum()
        if reshard == 2:
            kept = model.module.layers[0].weight
            assert kept.shape == (6, 6) and kept.to_local().shape == (3, 6)
        loss.backward()
    finally:
        dist.all_gather_single = gather
    model.finish_grad_sync()
    for rank in range(4):
        for factor in (2.0, 1.0):
            expected(torch.full((2, 6), factor * (1.0 + rank))).sum().div(4).backward()
    for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
        assert torch.allclose(found, wanted.grad, rtol=1e-5, atol=1e-7), name
    return sorted(gathered_from)


def test_a_number_gathers_for_backward_from_that_many_ranks():
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 2) == [[2] * 7 + [4] * 9] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 4) == [[4] * 16] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 1) == [[4] * 9] * 4


def _refuses_a_number_that_does_not_divide() -> None:
    with pytest.raises(ParallelConfigError, match=r"is 3, which does not divide the 2 ranks .* one of 1, 2"):
        stacked(reshard_after_forward=3)


def test_a_number_must_divide_the_ranks():
    run_distributed(_refuses_a_number_that_does_not_divide, 2)


# ---- ahead of their use


def _gathered_ahead(depths: tuple[int, int], order: list[int], recomputes: bool) -> tuple[list[Any], list[Any]]:
    """For each layer that has run, which are gathered or on their way: itself too, until its gradient is reduced."""
    module = Stack(4, recomputes)
    layers = list(module.layers)
    model = build(
        "fsdp2",
        module,
        unit_classes=[nn.Linear],
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
        reshard_overrides=("layers.3=True",),
    )
    seen: list[tuple[int, list[int]]] = []

    def ahead() -> list[int]:
        groups = [layer._get_fsdp_state()._fsdp_param_groups[0] for layer in layers]
        return [i for i, g in enumerate(groups) if g._all_gather_result is not None or g.is_unsharded]

    module.order = order
    x = torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()  # the first pass learns the order
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda m, args, out, i=index: seen.append((i, ahead())))
        layer.register_full_backward_hook(lambda m, *grads, i=index: seen.append((i, ahead())))
    loss = model(x).sum()
    forward, seen[:] = list(seen), []
    loss.backward()
    model.finish_grad_sync()
    assert not ahead()
    return forward, seen


def test_forward_gathers_as_many_units_ahead_as_asked_in_the_order_of_execution():
    order = [2, 0, 3, 1]
    forward, _ = run_distributed(_gathered_ahead, 2, (1, 1), order, False)[0]
    assert forward == [(2, [0]), (0, [3]), (3, [1]), (1, [])]
    forward, _ = run_distributed(_gathered_ahead, 2, (2, 1), order, False)[0]
    assert forward == [(2, [0, 3]), (0, [1, 3]), (3, [1]), (1, [])]
    forward, _ = run_distributed(_gathered_ahead, 2, (0, 1), order, False)[0]
    assert forward == [(2, []), (0, []), (3, []), (1, [])]


@pytest.mark.parametrize("recomputes", [False, True])
def test_backward_gathers_ahead_in_the_reverse_of_it_also_when_it_recomputes(recomputes):
    order = [2, 0, 3, 1]
    backward = {}
    for depth in (0, 1, 2):
        _, events = run_distributed(_gathered_ahead, 2, (1, depth), order, recomputes)[0]
        backward[depth] = {index: sorted({*ahead} - {index}) for index, ahead in events}
    assert backward[0] == {1: [], 3: [], 0: [], 2: []}
    assert backward[1] == {1: [3], 3: [0], 0: [2], 2: []}
    assert backward[2] == {1: [0, 3], 3: [0, 2], 0: [2], 2: []}


def _gathers_of_adapters() -> int:
    module = Stack(4)
    for layer in module.layers[:3]:
        layer.requires_grad_(False)
    model = build("fsdp2", module, unit_classes=[nn.Linear], reshard_overrides=("layers.3=True",), backward_prefetch=2)
    with GatherCounter() as gathers:
        model(torch.ones(2, 6)).sum().backward()
        model.finish_grad_sync()
    return gathers.calls


def test_what_backward_never_reaches_is_not_gathered_for_it():
    assert run_distributed(_gathers_of_adapters, 2) == [1 + 4 + 1] * 2  # root and layers, and the last one again


def _survives_another_order() -> None:
    module = Stack(4)
    model = build("fsdp2", module, unit_classes=[nn.Linear], forward_prefetch=2)
    for order in ([0, 1, 2, 3], [3, 1], [1, 1, 2, 0], [0, 1, 2, 3]):
        module.order, expected = order, Stack(4)
        expected.order = order
        with torch.no_grad():  # gathers ahead what it then does not use
            module.order = [0]
            model(torch.ones(2, 6))
            module.order = order
        model(torch.ones(2, 6)).sum().backward()
        finalize_model_grads([model])
        expected(torch.ones(2, 6)).sum().backward()
        for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
            assert torch.equal(found, torch.zeros_like(wanted) if wanted.grad is None else wanted.grad), (order, name)
        model.zero_grad_buffer()


def test_a_wrong_guess_changes_what_is_gathered_ahead_and_no_number():
    run_distributed(_survives_another_order, 2)


def _forgets_what_was_gathered_ahead() -> None:
    module = Stack(3)
    model = build("fsdp2", module, unit_classes=[nn.Linear])
    x = torch.ones(2, 6)
    with torch.no_grad():
        model(x)
        module.order = [0]
        model(x)  # gathers layer 1 ahead, and does not use it
        for parameter in model.parameters():
            parameter.to_local().mul_(2.0)
        module.order = [0, 1, 2]
        doubled = Stack(3)
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
        assert torch.equal(model(x), doubled(x))


def test_parameters_gathered_ahead_and_not_used_are_gathered_again_after_an_update():
    run_distributed(_forgets_what_was_gathered_ahead, 2)


# ---- how gradients are reduced


def _reduces_each_micro_batch() -> list[int]:
    calls = []
    for every in (False, True):
        model = build("fsdp2", toy(tied=False), reduce_every_micro_batch=every)
        with GradientTraffic() as traffic:
            step(model, dist.get_rank())
        calls.append(traffic.calls)
        assert all(p._unsharded_param.grad is None for m in fsdp_modules(model) for p in _fsdp_params(m))
    return calls


def _fsdp_params(module: Any) -> list[Any]:
    return [p for g in module._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params if p.param_dtype is None]


def test_reduce_every_micro_batch_keeps_no_whole_gradient():
    once, every = run_distributed(_reduces_each_micro_batch, 2)[0]
    assert every == 3 * once > 0


def _doubles_gradients_when_the_exchange_does() -> bool:
    call = DirectReduceScatter.__call__

    def doubled(self: Any, output_tensor: torch.Tensor, **kwargs: Any) -> None:
        call(self, output_tensor, **kwargs)
        output_tensor.mul_(2.0)

    DirectReduceScatter.__call__ = doubled
    try:
        model = build("fsdp2", toy())
        step(model, dist.get_rank())
    finally:
        DirectReduceScatter.__call__ = call
    return all(torch.equal(gradients(model)[name], 2.0 * wanted) for name, wanted in oracle().items())


def test_gradients_really_go_through_the_direct_exchange():
    assert run_distributed(_doubles_gradients_when_the_exchange_does, 2) == [True, True]


def _trains_on_one_sample() -> None:
    module = build_gpt(False)
    model = build("fsdp2", module, unit_classes=[TransformerLayer])
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, labels=tokens).sum().backward()
        model.finish_grad_sync()


def test_a_micro_batch_of_one_sample_warns_of_nothing():
    run_distributed(_trains_on_one_sample, 2)


# ---- precision


class MixedLayer(nn.Module):
    """A bf16 layer with an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x.float()).bfloat16())


class Mixed(nn.Module):
    """A bf16 model with fp32 norms, as checkpoints in low precision hold them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([MixedLayer() for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.float()).bfloat16()).float()


class Scaled(nn.Module):
    """fp32 weights in modules whose children are bf16, and in the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gain = nn.Parameter(torch.full((6,), 1.5))
        self.layers = nn.ModuleList([_scaled_layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.linear = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x.bfloat16()).float() * self.scale


def _scaled_layer() -> ScaledLayer:
    return ScaledLayer()


def _splits_from_the_inside() -> None:
    for unit_classes in ([ScaledLayer], []):
        model = build("fsdp2", Scaled(), unit_classes=unit_classes)
        expected, x = Scaled(), torch.linspace(0, 1, 12).view(2, 6)
        model(x).sum().backward()
        model.finish_grad_sync()
        expected(x).sum().backward()
        for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted.grad), name


def test_a_module_whose_children_have_another_dtype_keeps_its_own():
    run_distributed(_splits_from_the_inside, 2)


class Branching(nn.Module):
    """bf16, with a branch that is not always taken, and a unit that is never reached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.layer.forward = self._layer
        self.spare = nn.Linear(6, 6)
        self.takes_branch = False

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer["b"](self.layer["a"](x)) if self.takes_branch else self.layer["a"](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x)


def _accumulates_in_fp32(branches: list[bool]) -> None:
    module = Branching()
    model = build(
        "fsdp2", module, config=SimpleNamespace(bf16=True), unit_classes=[nn.Linear], grad_reduce_in_fp32=True
    )
    x = torch.linspace(0, 1, 12).view(2, 6)
    for index, branch in enumerate(branches):
        module.takes_branch = branch
        with nullcontext() if index == len(branches) - 1 else model.no_sync():
            model(x).sum().backward()
    finalize_model_grads([model])
    found = gradients(model)
    assert found["layer.a.weight"].abs().sum() > 0 and not found["spare.weight"].any()
    assert found["layer.b.weight"].any() == any(branches)


@pytest.mark.parametrize("branches", [[False, False], [False, True], [True, False]])
def test_gradients_that_accumulate_in_fp32_may_come_late_or_never(branches):
    run_distributed(_accumulates_in_fp32, 2, branches)


def _keeps_fp32_parameters() -> None:
    model = build("fsdp2", Mixed(), config=SimpleNamespace(bf16=True), unit_classes=[MixedLayer])
    assert [unit.names for unit in model.units] == [
        ("layers.0.norm",),
        ("layers.0",),
        ("layers.1.norm",),
        ("layers.1",),
        ("norm",),
    ]
    expected = Mixed()
    x = torch.linspace(0, 1, 12).view(2, 6)
    model(x).sum().backward()
    model.finish_grad_sync()
    expected(x).sum().backward()
    for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted.grad), name


def test_fp32_norms_in_a_bf16_model_keep_their_dtype():
    run_distributed(_keeps_fp32_parameters, 2)


def _names_the_module_of_two_dtypes() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(WrapError, match=r"module '0' holds trainable parameters of 2 dtypes, .*bfloat16.*float32"):
        build("fsdp2", module)
    module[0].bias.requires_grad_(False)
    model = build("fsdp2", module)
    assert model.units


def test_a_module_of_two_dtypes_is_named():
    run_distributed(_names_the_module_of_two_dtypes, 1)


def _casts_as_asked() -> None:
    seen = {}
    module = toy(tied=False)
    settings = {"param_dtype": "fp16", "output_dtype": torch.bfloat16, "buffer_dtype": "fp16"}
    model = build("fsdp2", module, config=SimpleNamespace(fp16=True), **settings)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    module.blocks[0].up.register_forward_hook(lambda m, args, out: seen.update(weight=m.weight.dtype, out=out.dtype))
    output = model(batches(0)[0])
    assert seen == {"weight": torch.float16, "out": torch.float16}
    assert output.dtype == torch.bfloat16 and module.offset.dtype == torch.float16


def test_dtypes_are_those_asked_for():
    run_distributed(_casts_as_asked, 2)


def _skips_an_overflow_on_all_ranks() -> None:
    model = build("fsdp2", toy(), config=SimpleNamespace(fp16=True))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=2.0**8, hysteresis=1), [model]
    )
    before = {name: parameter.to_local().clone() for name, parameter in model.module.named_parameters()}
    scale = optimizer.get_loss_scale().item()
    optimizer.scale_loss(loss_of(model, batches(0)[0])).backward()
    finalize_model_grads([model])
    if dist.get_rank() == 1:
        next(p for p in model.parameters() if p.grad is not None and p.grad.to_local().numel()).grad.to_local().fill_(
            float("inf")
        )
    assert optimizer.step()[0] is False
    assert optimizer.get_loss_scale().item() == scale / 2
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name
    model.zero_grad_buffer()
    optimizer.scale_loss(loss_of(model, batches(0)[0])).backward()
    finalize_model_grads([model])
    assert optimizer.step()[0] is True


def test_fp16_with_a_loss_scale_skips_an_overflow_on_all_ranks():
    run_distributed(_skips_an_overflow_on_all_ranks, 2)


# ---- offload


def _keeps_shards_on_the_host() -> list[str]:
    torch_fully_sharded_data_parallel._warn_once.cache_clear()  # ranks are reused
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [build("fsdp2", toy(), cpu_offload=offload) for offload in (True, False)]
    norms = []
    for model in models:
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
        step(model, dist.get_rank())
        norms.append(optimizer.step()[1])
    assert norms[0] == norms[1] and norms[0] > 0.01
    for offloaded, kept in zip(*(model.parameters() for model in models), strict=True):
        assert offloaded.device.type == "cpu" and torch.equal(offloaded.to_local(), kept.to_local())
    return [str(warning.message) for warning in caught if "pin_memory" in str(warning.message)]


def test_offloaded_shards_give_the_same_step_and_pinning_without_an_accelerator_is_a_warning():
    said = run_distributed(_keeps_shards_on_the_host, 2)[0]
    assert len(said) == (0 if torch.accelerator.is_available() else 1)


# ---- hybrid


def _clips_alike(num_instances: int) -> float:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=num_instances)
    ddp_config = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=num_instances)
    model = TorchFullyShardedDataParallel(SimpleNamespace(), ddp_config, toy(), _toys.UNITS)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
    step(model, dist.get_rank())
    squares = sum(gradient.double().square().sum() for gradient in gradients(model).values())
    norm = optimizer.step()[1]
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-6)
    return norm


def test_the_norm_on_a_two_dimensional_mesh_counts_every_element_once():
    hybrid, sharded = (run_distributed(_clips_alike, 4, instances) for instances in (2, 1))
    assert len(set(hybrid)) == 1 and hybrid[0] == pytest.approx(sharded[0], rel=1e-6)
