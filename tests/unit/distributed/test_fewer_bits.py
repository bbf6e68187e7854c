"""Parameters and gradients that travel in fewer bits: the numbers are those of one process that rounds as stated."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.base.errors import ParallelConfigError
from core.comm.message_formats import format_of_all, has_whole_blocks, message_bytes
from core.distributed import finalize_model_grads, wrap_model
from core.fp8 import use_fp8_products
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer import TransformerConfig
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import full, recorded_collectives, settings, synced_last, toy

STEPS, MICRO_BATCHES = 3, 2


class Block(nn.Module):
    """Matrices of whole blocks, whose rows ranks do not divide, one of other rows, a frozen one, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 67)
        self.down = nn.Linear(67, 256)
        self.mix = nn.Linear(256, 256, bias=False)
        self.frozen = nn.Linear(256, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.mix(x) * self.frozen(x).mean()


class Net(nn.Module):
    """A tied embedding around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 256)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(256, 21, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net() -> Net:
    torch.manual_seed(3)
    return Net()


def _loss(model: nn.Module, step: int, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + number)
    tokens = torch.randint(0, 21, (2, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten().roll(-1))


def _optimizer(model: nn.Module) -> Any:
    return get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])


def _rounded(tensor: Tensor, name: str | None) -> Tensor:
    """Rounds a whole tensor as it would be sent."""
    if name is None or (name != "bf16" and not has_whole_blocks(tensor.shape)):
        return tensor
    format_, arrived = format_of_all(name, tensor.numel(), tensor.dtype), torch.empty_like(tensor)
    format_.decode(format_.encode(tensor.contiguous()), arrived)
    return arrived


def _sum(addends: list[Tensor]) -> Tensor:
    """Adds neighbours, then the sums of neighbours."""
    while len(addends) > 1:
        pairs = [a + b for a, b in zip(addends[::2], addends[1::2], strict=False)]
        addends = pairs + addends[len(addends) & ~1 :]
    return addends[0]


def _expected(ranks: int, params_as: str | None, grads_as: str | None) -> dict[str, Tensor]:
    """Returns weights that one process has trained: it computes with rounded ones, and rounds each rank's gradient."""
    model = _net()
    optimizer = _optimizer(model)
    for step in range(STEPS):
        computed = copy.deepcopy(model)
        with torch.no_grad():
            for p in computed.parameters():
                p.copy_(_rounded(p, params_as))
        addends: dict[str, list[Tensor]] = {n: [] for n, p in model.named_parameters() if p.requires_grad}
        for rank in range(ranks):
            computed.zero_grad()
            for number in range(MICRO_BATCHES):
                _loss(computed, step, rank, number).backward()
            for name, p in computed.named_parameters():
                if p.requires_grad:
                    addends[name].append(_rounded(p.grad, grads_as if ranks > 1 else None).clone())
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.grad = _sum(addends[name]) * (1.0 / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def _wrapped(kind: str, module: nn.Module, config: Any = None, **fields: Any) -> Any:
    instances = 2 if kind.startswith("hybrid") else 1
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    own = settings(kind.removeprefix("hybrid "), num_distributed_optimizer_instances=instances, **fields)
    return wrap_model(module, config or SimpleNamespace(), own, sub_modules_to_wrap=(Block, nn.Embedding))


def _step(model: Any, step: int) -> None:
    model.zero_grad_buffer()
    for number in synced_last(model, range(MICRO_BATCHES)):
        _loss(model, step, dist.get_rank(), number).backward()
    model.finish_grad_sync()


def _trained(kind: str, config: Any = None, **fields: Any) -> dict[str, Tensor]:
    return _train(_wrapped(kind, _net(), config, **fields))


def _train(model: Any) -> dict[str, Tensor]:
    optimizer = _optimizer(model)
    for step in range(STEPS):
        _step(model, step)
        optimizer.step()
    if model.plan.shards_parameters:
        model.engine.parameters.settle()
    return {name: full(p) for name, p in model.module.named_parameters()}


def _check(kind: str, params_as: str | None, grads_as: str | None, fields: dict[str, Any]) -> None:
    given = {"param_comm_dtype": params_as, "grad_comm_dtype": grads_as} | fields
    trained = _trained(kind, **{name: value for name, value in given.items() if value is not None})
    expected = _expected(dist.get_world_size(), params_as, grads_as)
    assert [name for name, tensor in expected.items() if not torch.equal(trained[name], tensor)] == []
    exact = _expected(dist.get_world_size(), None, None)
    assert not torch.equal(trained["blocks.1.mix.weight"], exact["blocks.1.mix.weight"])


@pytest.mark.parametrize("grads_as", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("kind", "ranks", "fields"),
    [
        ("ddp", 2, {}),
        ("ddp_overlap", 3, {}),
        ("zero1", 2, {"bucket_size": 50_000}),
        ("zero1_overlap", 4, {}),
        ("zero2", 3, {}),
        ("zero2_overlap", 2, {}),
        ("hybrid zero1", 4, {}),
        ("zero3", 2, {}),
        ("zero3", 4, {"shard_cut": "tensor"}),
        ("hybrid zero3", 4, {}),
        ("fsdp2", 3, {}),
        ("fsdp2", 4, {}),
    ],
)
def test_gradients_are_sums_of_what_each_rank_sends(kind: str, ranks: int, fields: Any, grads_as: str) -> None:
    run_distributed(_check, ranks, kind, None, grads_as, fields)


@pytest.mark.parametrize("params_as", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("kind", "ranks", "fields"),
    [
        ("zero3", 1, {}),
        ("zero3", 2, {}),
        ("zero3", 2, {"shard_cut": "block:512", "forward_prefetch": 0, "backward_prefetch": 0}),
        ("zero3", 3, {"shard_cut": "rows", "cpu_offload": True}),
        ("zero3", 4, {"reshard_after_forward": 2}),
        ("hybrid zero3", 4, {}),
        ("fsdp2", 2, {}),
        ("fsdp2", 3, {"cpu_offload": True, "keep_gathered_between_micro_batches": "none"}),
        ("fsdp2", 4, {"reshard_after_forward": 2}),
        ("hybrid fsdp2", 4, {}),
    ],
)
def test_forward_computes_with_what_arrives(kind: str, ranks: int, fields: Any, params_as: str) -> None:
    run_distributed(_check, ranks, kind, params_as, None, fields)


@pytest.mark.parametrize(("params_as", "grads_as"), [("int8", "int8"), ("fp8", "bf16")])
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_both_ways_at_once(kind: str, params_as: str, grads_as: str) -> None:
    run_distributed(_check, 2, kind, params_as, grads_as, {})


@pytest.mark.parametrize("fields", [{}, {"grad_reduce_in_fp32": True}, {"reduce_every_micro_batch": True}], ids=str)
@on_ranks(4)
def test_engines_agree_in_low_precision(fields: dict[str, Any]) -> None:
    """A cast comes before the codes, and sums of bf16 are added in fp32 where there are blocks and where not."""
    config, formats = SimpleNamespace(bf16=True), {"param_comm_dtype": "int8", "grad_comm_dtype": "int8"}
    ours, torchs = (_trained(kind, config, **formats, **fields) for kind in ("zero3", "fsdp2"))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, torchs[name])] == []


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_weights_that_a_program_reads_are_exact(kind: str) -> None:
    """Errors of steps do not add up: what is saved, exported and updated was never rounded."""
    model, start = _wrapped(kind, _net(), param_comm_dtype="int8"), _net()
    _step(model, 0)
    with model.whole_parameters() as whole:
        for name, expected in start.named_parameters():
            found = dict(model.module.named_parameters())[name] if whole is None else whole[name]
            assert torch.equal(found.full_tensor() if hasattr(found, "full_tensor") else found, expected), name


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@on_ranks(2)
def test_bytes_are_those_of_the_plan(kind: str) -> None:
    formats: dict[str, str] = {"grad_comm_dtype": "int8"}
    if kind in ("zero3", "fsdp2"):
        formats["param_comm_dtype"] = "int8"
    model = _wrapped(kind, _net(), **formats)
    optimizer = _optimizer(model)
    _step(model, 0)
    optimizer.step()  # what is still gathered is old
    with recorded_collectives("the ") as recorded:
        _step(model, 1)
        if kind in ("zero1", "zero2"):
            model.start_param_sync(force_sync=True)
    found, planned = dict[str, int](), dict[str, int]()
    for what, _, nbytes, _ in recorded:
        found[what] = found.get(what, 0) + nbytes
    for entry in model.plan.traffic(MICRO_BATCHES):
        planned[entry.kind] = planned.get(entry.kind, 0) + entry.calls * entry.nbytes
    assert found == planned, (found, planned)
    pieces = [piece for unit in model.plan.units for piece in unit.pieces if piece.grad_format == "int8"]
    assert sum(piece.sent_grad_bytes for piece in pieces) <= 0.30 * sum(piece.reduced_bytes for piece in pieces)
    for piece in pieces:
        assert piece.sent_grad_bytes == message_bytes("int8", piece.elements, torch.float32)


@on_ranks(2)
def test_a_gradient_that_overflows_is_seen() -> None:
    for kind in ("ddp", "zero3", "fsdp2"):
        model = _wrapped(kind, _net(), grad_comm_dtype="int8")
        optimizer = _optimizer(model)
        _step(model, 0)
        model.zero_grad_buffer()
        factor = torch.inf if dist.get_rank() == 1 else 1.0
        (_loss(model, 0, 0, 0) * factor).backward()
        model.finish_grad_sync()
        is_taken, norm, _ = optimizer.step()
        assert not is_taken or not torch.isfinite(torch.tensor(norm)), kind


def _wrong(kind: str, module: nn.Module, message: str, config: Any = None, **fields: Any) -> None:
    with pytest.raises(ParallelConfigError, match=message) as error:
        _wrapped(kind, module, config, **fields)
    assert "\n" not in str(error.value)


def _refusals() -> None:
    int8 = {"param_comm_dtype": "int8"}
    _wrong("zero3", _net(), "param_comm_dtype is 'int4'", param_comm_dtype="int4")
    _wrong("ddp", _net(), "grad_comm_dtype is 'fp8'", grad_comm_dtype="fp8")
    _wrong("zero3", _net(), "shard_cut 'flat' cuts inside of the blocks", **int8, shard_cut="flat")
    _wrong("zero3", _net(), "shard_cut 'block:64' cuts inside", grad_comm_dtype="int8", shard_cut="block:64")
    _wrong("fsdp2", _net(), "collectives is 'torch', which leaves messages to FSDP2", **int8, collectives="torch")
    _wrong("zero3", _net(), "grad_comm_dtype rounds", grad_comm_dtype="bf16", reproducible_across_ranks=True)
    _wrong("zero3", toy(), "this model has none; drop them", **int8)
    _wrong("ddp", toy(), "this model has none; drop them", grad_comm_dtype="int8")
    if dist.get_world_size() == 1:
        _wrong("fsdp2", _net(), "one rank has all of .*FSDP2 then does not gather", **int8)


def test_settings_that_cannot_be_kept_are_refused() -> None:
    run_distributed(_refusals, 1)
    run_distributed(_refusals, 2)


@on_ranks(2)
def test_codes_next_to_another_dtype_are_refused_by_fsdp2() -> None:
    net = _net()
    net.blocks[1].frozen.to(torch.bfloat16)
    with pytest.raises(
        ParallelConfigError, match=r"unit blocks.1 has parameters in bfloat16 and float32, .* as bytes"
    ):
        _wrapped("fsdp2", net, param_comm_dtype="int8")
    _wrapped("zero3", net, param_comm_dtype="int8")


def _cut_by_tensor_parallelism() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    module: Any = nn.Sequential(nn.Linear(128, 8), nn.Linear(256, 8))
    module[0].weight.tensor_model_parallel, module[0].weight.partition_dim = True, 1
    config = SimpleNamespace(tensor_model_parallel_size=2)
    with pytest.raises(ParallelConfigError, match=r"\(8, 256\) to \(8, 128\), inside of the blocks of 256"):
        wrap_model(module, config, settings("zero3", param_comm_dtype="int8"), sub_modules_to_wrap=(nn.Linear,))


def test_tensor_parallelism_inside_of_blocks_is_refused() -> None:
    run_distributed(_cut_by_tensor_parallelism, 2)


def _gpt_trained(kind: str, sizes: dict[str, int], formats: dict[str, str]) -> dict[str, Tensor]:
    """Trains a small GPT on ranks that share its layers or experts, and returns this rank's parts of its weights."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    experts = {"num_moe_experts": 2, "moe_router_topk": 2} if "expert_model_parallel_size" in sizes else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=512,
        num_attention_heads=4,
        ffn_hidden_size=512,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **sizes,
        **experts,
    )
    torch.manual_seed(3)
    gpt = GPTModel(config, vocab_size=64, max_sequence_length=16)
    model = wrap_model(gpt, config, settings(kind, **formats))
    optimizer = _optimizer(model)
    replica = parallel_state.get_data_parallel_rank()
    for step in range(2):
        model.zero_grad_buffer()
        for number in synced_last(model, range(MICRO_BATCHES)):
            generator = torch.Generator().manual_seed(100 * step + 10 * replica + number)
            tokens = torch.randint(0, 64, (2, 9), generator=generator)
            model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
    with model.whole_parameters():
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.module.named_parameters()
        }


@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}], ids=str)
@on_ranks(4)
def test_engines_agree_where_layers_are_cut(sizes: dict[str, int]) -> None:
    grads = {"grad_comm_dtype": "int8"}
    of_ddp = _gpt_trained("ddp", sizes, grads)
    for kind in ("zero2_overlap", "zero3", "fsdp2"):
        found = _gpt_trained(kind, sizes, grads)
        assert [name for name, tensor in of_ddp.items() if not torch.equal(found[name], tensor)] == [], kind
    both = grads | {"param_comm_dtype": "int8"}
    ours, torchs = (_gpt_trained(kind, sizes, both) for kind in ("zero3", "fsdp2"))
    assert [name for name, tensor in ours.items() if not torch.equal(torchs[name], tensor)] == []
    assert any(not torch.equal(of_ddp[name], tensor) for name, tensor in ours.items())


@on_ranks(2)
def test_products_and_gathers_in_fp8_go_together() -> None:
    """A product rounds what a gather has rounded, the same under both engines."""
    results = []
    for kind in ("zero3", "fsdp2"):
        net = _net()
        assert use_fp8_products(net, layers=("blocks.*.mix",)) == [f"blocks.{i}.mix" for i in range(3)]
        results.append(_train(_wrapped(kind, net, param_comm_dtype="fp8")))
    assert [name for name, tensor in results[0].items() if not torch.equal(results[1][name], tensor)] == []
    apart = _trained("zero3", param_comm_dtype="fp8")
    assert not torch.equal(results[0]["blocks.0.mix.weight"], apart["blocks.0.mix.weight"])


def _losses(fields: dict[str, str]) -> list[float]:
    model = _wrapped("zero3", _net(), **fields)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4), [model])
    losses = []
    for _ in range(20):
        model.zero_grad_buffer()
        loss = _loss(model, 0, dist.get_rank(), 0)
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_losses_are_near_those_of_whole_messages() -> None:
    expected = _losses({})
    assert expected[-1] < 0.85 * expected[0]
    for fields in ({"param_comm_dtype": "int8"}, {"param_comm_dtype": "fp8"}, {"grad_comm_dtype": "int8"}):
        found = _losses(fields)
        assert found != expected
        far = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        assert far <= 0.005, (fields, far, found, expected)
