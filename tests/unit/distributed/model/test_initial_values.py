"""Initial values of a wrapped model: the first rank's, broadcast by it or drawn equally by all."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base import foreign_initialization
from core.base.errors import ConfigError, WrapError
from core.base.foreign_initialization import reset
from core.base.module_protocol import ModuleToFill
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from core.distributed.groups import DataParallelGroups
from core.distributed.model.initial_values import InitialValues, apply_to_buffers
from core.transformer.moe.router import TopKRouter
from core.transformer.transformer_config import TransformerConfig
from core.weights import WeightStream
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import Toy, batches, build, full, loss_of, toy

KINDS = ("ddp", "zero1", "zero3", "fsdp2")


class Start(Toy):
    """A model with what torch's modules keep in buffers, and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.own = Own()
        self.offset = torch.linspace(0, 1, 7, device="cpu")
        self.frozen = nn.Parameter(torch.full((3,), 0.5, device="cpu"), requires_grad=False)
        for block in self.blocks:
            block.gain = nn.Parameter(torch.ones(1, device="cpu"))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 7))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=4.0)
        nn.init.uniform_(self.table)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def on_meta() -> Start:
    with torch.device("meta"):
        return Start()


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def _starts_on_meta(kind: str) -> dict[str, torch.Tensor]:
    module = on_meta()
    torch.manual_seed(40 + dist.get_rank())  # the first rank's stream counts
    model = build(kind, module)
    assert module.head.weight is module.embedding.weight
    assert module.embedding.weight.partition_dim == 0
    assert not module.frozen.requires_grad
    loss_of(model, batches(0)[0]).backward()
    model.finish_grad_sync()
    return values(module)


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_meta_model_starts_equally_at_every_world_size(kind):
    module = on_meta()
    torch.manual_seed(40)
    run = [run_distributed(_starts_on_meta, world_size, kind) for world_size in (1, 2)]
    expected = run[0][0]
    assert all(not different(found, expected) for found in run[1])
    assert expected["own.weight"].mean().item() == pytest.approx(4.0, abs=0.6)
    assert torch.equal(expected["frozen"], module.frozen)


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("zero1", 2), ("zero3", 2), ("fsdp2", 2), ("fsdp2", 3)])
@on_ranks("world_size")
def test_others_receive_what_the_first_rank_alone_holds(kind, world_size):
    first = dist.get_rank() == 0
    torch.manual_seed(7)
    direct = Start()
    module = Start() if first else on_meta()
    if first:
        module.load_state_dict(direct.state_dict())
        module.own.table = direct.own.table.clone()
    expected = values(direct)
    if not first:
        with torch.no_grad():  # what a rank has of its own is the first one's, too
            module.frozen.add_(1.0)
    model = build(kind, module)
    assert not different(values(module), expected)
    assert module.head.weight is module.embedding.weight
    if kind == "fsdp2":
        for parameter in module.parameters():
            assert parameter.to_local().untyped_storage().nbytes() <= 4 * parameter.numel() // 2 + 4 * 11
    loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()


@on_ranks(2)
def test_what_the_first_rank_has_on_meta_all_draw() -> None:
    module = on_meta() if dist.get_rank() == 0 else Start()
    torch.manual_seed(40)
    build("fsdp2", module)
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, values(module))
    assert not different(*everywhere)


@on_ranks(2)
def test_without_sync_module_states_ranks_use_their_own_seeds() -> None:
    module = on_meta()
    torch.manual_seed(40 + dist.get_rank())
    build("fsdp2", module, sync_module_states=False)
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, module.own.table)
    assert not torch.equal(*everywhere)


@pytest.mark.long
@on_ranks(4)
def test_hybrid_sharding_receives_the_same() -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp_config = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2)
    module = Start() if dist.get_rank() == 0 else on_meta()
    expected: list = [values(module) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    TorchFullyShardedDataParallel(SimpleNamespace(), ddp_config, module, _toys.UNITS)
    assert not different(values(module), expected[0])


@on_ranks(2)
def test_unfilled_tensors_are_named() -> None:
    module = toy().to("meta")  # `offset` and the gains have no owner that could fill them
    with pytest.raises(ConfigError, match="nothing says how to"):
        build("fsdp2", module)
    module = nn.BatchNorm1d(3).to("meta")
    start = InitialValues(module, DataParallelGroups(dist.group.WORLD, dist.group.WORLD))
    start.equalize()
    start.allocate()
    start.fill()
    assert torch.equal(module.running_var, torch.ones(3))


def _wraps_a_model_of_transformers() -> dict[str, torch.Tensor]:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes)
        )
    torch.manual_seed(6)
    model = build("fsdp2", module, unit_classes=(LlamaDecoderLayer,), activation_checkpointing="full")
    assert module.lm_head.weight is module.model.embed_tokens.weight
    found = values(module)
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.finish_grad_sync()
    return found | {f"grad {name}": full(p.grad) for name, p in module.named_parameters()}


@pytest.mark.long
def test_a_model_of_transformers_starts_on_meta_and_trains():
    pytest.importorskip("transformers")
    alone, *others = (found for size in (1, 2) for found in run_distributed(_wraps_a_model_of_transformers, size))
    for found in others:
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert torch.equal(found[name], expected) or (name.startswith("grad") and found[name].allclose(expected))


class Outer(nn.Module):
    """A module that fills a weight of its child: wholly, or by adding to it."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.inner, self.gain, self.reads = nn.Linear(6, 6), nn.Parameter(torch.empty(6)), reads
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        if self.reads:
            self.inner.bias.data.add_(1.0)
        else:
            self.inner.bias.data.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


@on_ranks(2)
def test_a_module_may_overwrite_what_ranks_keep_a_range_of() -> None:
    for reads in (False, True):
        with torch.device("meta"):
            module = nn.Sequential(Outer(reads))
        if reads:
            with pytest.raises(ConfigError, match=r"initialisation of 0 reads a sharded parameter.*reset_parameters"):
                build("zero3", module, unit_classes=(nn.Linear,))
            continue
        build("zero3", module, unit_classes=(nn.Linear,))
        assert torch.equal(full(module[0].inner.bias), torch.full((6,), 0.25))
        assert torch.equal(full(module[0].gain), torch.ones(6))


@on_ranks(2)
def test_from_the_meta_device_one_tensor_is_whole_at_a_time() -> None:
    most = 0  # elements of memory that parameters have while any module is initialised
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])

    def measured(foreign: ModuleToFill, seed: int) -> None:
        nonlocal most
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() // 4 for p in module.parameters()}
        most = max(most, sum(held.values()))
        reset(foreign, seed)

    with mock.patch.object(foreign_initialization, "reset", measured):
        build("zero3", module, unit_classes=(nn.Linear,))
    assert most == 16  # of each parameter one element


class _OddTensors(nn.Module):
    """Tensors whose memory is not one row of elements, or of a dtype that gloo does not know."""

    def __init__(self, with_strided_weight: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        if with_strided_weight:
            self.weight = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.frozen8 = nn.Parameter(torch.randn(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.frozen16 = nn.Parameter(torch.randint(99, (6, 6), dtype=torch.int16), requires_grad=False)
        self.register_buffer("strided", torch.randn(6, 8)[:, ::2])
        self.register_buffer("turned", torch.randn(3, 4).t() if dist.get_rank() else torch.randn(4, 3))
        self.register_buffer("expanded", torch.randn(6).expand(4, 6))
        self.register_buffer("number", torch.randn(()))
        self.register_buffer("unsigned", torch.randint(99, (5,)).to(torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.expanded + x @ self.frozen8.to(x.dtype) + x @ self.frozen16.to(x.dtype)


@on_ranks(2)
def test_a_buffer_that_overlaps_on_one_rank_is_refused_on_all() -> None:
    module = nn.Linear(6, 6)
    module.register_buffer("table", torch.ones(6).expand(4, 6) if dist.get_rank() else torch.rand(4, 6))
    with pytest.raises(WrapError, match=r"^table has one memory for several elements .* on some ranks"):
        build("ddp", module)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_every_layout_and_dtype_starts_as_on_rank_0(kind: str) -> None:
    torch.manual_seed(7 + dist.get_rank())
    module = _OddTensors(with_strided_weight=kind != "fsdp2")  # which refuses them: contract.md, Models
    expected = {name: _bytes(tensor) for name, tensor in module.state_dict().items()}
    for tensor in expected.values():
        dist.broadcast(tensor, 0)
    model = build(kind, module)
    for _ in range(2):  # a second time by hand, as after a load on one rank
        assert not different({name: _bytes(tensor) for name, tensor in WeightStream(model, "module")}, expected)
        model.broadcast_params()
    model(torch.ones(4, 6)).sum().backward()
    model.finish_grad_sync()


def test_buffers_of_a_module_that_keeps_them_stay():
    """A router's bias moves by steps that bf16 would round away."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=3,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    router = TopKRouter(config)
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    for cast in (router.bfloat16, router.double):
        cast()
        for name, buffer in router.named_buffers():
            assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    apply_to_buffers(router, lambda buffer: buffer.to("meta", torch.bfloat16))
    assert router.expert_bias.is_meta and router.expert_bias.dtype == torch.float32
