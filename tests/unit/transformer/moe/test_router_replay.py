"""Recorded and replayed experts: the bits of the run itself, over ranks and recomputations, and other libraries'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.base.errors import ConfigError, DataError
from core.base.module_protocol import counting_modules
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.moe.router_replay import RouterReplay, RouterReplayAction, collect, record, replay
from tests.unit._gpt import Training, ddp_config, loss_of, micro_batches
from tests.unit._runs import gradients, run_micro_batches, wrapped
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._hugging_face import hugging_face_model, token_batches
from tests.unit.distributed._hugging_face import loss_of as hf_loss_of
from tests.unit.transformer.moe._layers import layer_of

EXPERTS = 4
_GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 4,
    "num_moe_experts": EXPERTS,
    "moe_layer_freq": [0, 1, 1, 1],
    "vocab": 62,
}
_BALANCING: dict[str, dict[str, Any]] = {
    "aux": {
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
        "moe_aux_loss_coeff": (0.05, 0.05),
        "moe_z_loss_coeff": 0.01,
    },
    "global": {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (0.05,)},
    "bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # each run begins with the same bias
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "pre": {"moe_router_pre_softmax": True, "moe_expert_capacity_factor": 1.0, "moe_input_jitter_eps": 0.01},
}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SELECTIVE = {"recompute_granularity": "selective"}


def _training(balancing: str = "aux", groups: dict[str, int] | None = None, **fields: Any) -> Training:
    settings = {**_GPT, **_BALANCING[balancing], **fields}
    cut = {"sequence_parallel": True} if groups and "tensor_model_parallel_size" in groups else {}
    return Training({}, steps=1, tied=False, fields=settings, groups=groups or {}, cut=cut, length=12)


def _others(recorded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns other experts than those."""
    return [(experts + 1) % EXPERTS for experts in recorded]


def _equal(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    (totals, grads), (expected_totals, expected_grads) = found, expected
    assert grads.keys() == expected_grads.keys()
    return torch.equal(totals, expected_totals) and all(torch.equal(grads[n], expected_grads[n]) for n in grads)


def _replays_itself(wrapper: str, training: Training) -> list[torch.Tensor]:
    """Returns what was recorded, collected, once all ways to replay it gave the bits of the run."""
    models = wrapped(wrapper, training)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), models)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        totals = run_micro_batches(training, models, 0, optimizer.scale_loss)
        return totals, {name: gradient.clone() for name, gradient in gradients(optimizer).items()}

    expected = run()
    with record(models) as recorded:
        assert _equal(run(), expected)
    collected = collect(recorded, models)
    assert [len(experts) for experts in collected] == [2 * training.length] * training.micro_batches
    for indices in (recorded, collected, [experts.to(torch.uint8) for experts in collected]):
        with replay(models, indices):
            assert _equal(run(), expected)
    with replay(models, _others(collected)):
        changed = run()
    routers = [name for name in changed[1] if name.endswith("router.weight")]
    assert not _equal(changed, expected)
    assert routers and all(changed[1][name].abs().max() > 0 for name in routers)
    with replay(models, [torch.full_like(experts, -1) for experts in collected]):
        assert _equal(run(), expected)
    assert _equal(run(), expected)
    return collected


def _in_one_process(training: Training) -> list[torch.Tensor]:
    (model,) = training.alone.build()
    with record(model) as recorded:
        for batch in micro_batches(0, 0, length=training.length):
            loss_of(model, batch)
    return [experts.flatten(0, 1) for experts in recorded]


def _check_ranks(wrapper: str, training: Training, ranks: int = 2) -> None:
    collected = run_distributed(_replays_itself, ranks, wrapper, training)[0]
    expected = _in_one_process(training)
    assert all(torch.equal(*pair) for pair in zip(collected, expected, strict=True))


@pytest.mark.parametrize(
    ("wrapper", "fields"),
    [("ddp", {}), ("zero1, overlapped", _SELECTIVE), ("zero2", {}), ("zero3", _FULL), ("fsdp2", _FULL)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_wrapper_replays_its_own_bits(wrapper, fields):
    _check_ranks(wrapper, _training(**fields))


_PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("groups", "fields"),
    [
        ({"expert_model_parallel_size": 2}, {"moe_token_dispatcher_type": "alltoall"}),
        ({"tensor_model_parallel_size": 2}, _FULL),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, _SELECTIVE),
        ({"context_parallel_size": 2}, {}),
        (_PIPELINE, _FULL),
        (_PIPELINE | {"virtual_pipeline_model_parallel_size": 2}, _FULL),
    ],
    ids=["ep", "tp", "tp, tokens split", "cp", "pp", "interleaved"],
)
def test_ranks_of_one_model_replay_its_bits(groups, fields):
    _check_ranks("ddp", _training(groups=groups, **fields))


_SPLIT = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("wrapper", "groups", "fields"),
    [
        ("hybrid fsdp2", {}, _FULL),
        ("ddp", _SPLIT | _PIPELINE | {"virtual_pipeline_model_parallel_size": 2}, _FULL),
        ("zero3", _SPLIT | {"context_parallel_size": 2}, {}),
    ],
    ids=["hybrid", "tp and pp", "tp and cp"],
)
def test_four_ranks_replay_their_bits(wrapper, groups, fields):
    _check_ranks(wrapper, _training(groups=groups, **fields), ranks=4)


@pytest.mark.parametrize("recompute", [{}, _FULL, _SELECTIVE], ids=["kept", "full", "selective"])
@pytest.mark.parametrize("balancing", _BALANCING)
def test_every_kind_of_router_replays_its_bits(balancing, recompute):
    (model,) = _training(balancing, **recompute).build()
    _replays_in_flight(model, micro_batches(0, 0), loss_of)


def _replays_in_flight(model: nn.Module, batches: Sequence[Any], loss_of: Callable[..., torch.Tensor]) -> None:
    """Checks bits where the backwards of all micro-batches come after their forwards."""

    def run(context: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        for layer in counting_modules(model):
            layer.clear_step_sums()
        with context or nullcontext():
            losses = [loss_of(model, batch) for batch in batches]
        for loss in losses:  # after the context: what is recomputed has what its forward had
            loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return torch.stack(losses).detach(), grads

    expected = run()
    with record(model) as recorded:
        assert _equal(run(), expected)
    assert len(recorded) == len(batches)
    assert _equal(run(replay(model, recorded)), expected)
    others = _others(recorded)
    changed = run(replay(model, others))
    assert not _equal(changed, expected)
    with replay(model, others):
        assert _equal(run(), changed)
    with replay(model, [torch.full_like(experts, -1) for experts in recorded]):
        assert _equal(run(), expected)


def test_a_recomputation_equals_what_is_kept():
    gradients = []
    for fields in ({}, _FULL):
        (model,) = _training(**fields).build()
        with record(model) as recorded:
            loss_of(model, micro_batches(0, 0)[0])
        batches = micro_batches(0, 0)
        with replay(model, _others(recorded * len(batches))):
            losses = [loss_of(model, batch) for batch in batches]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_probabilities_are_the_routers_own():
    layer, x = layer_of(moe_aux_loss_coeff=0.1), torch.randn(3, 2, 8)
    experts = torch.tensor([[3, 0], [1, 2], [-1, -1], [2, 3], [0, -1], [0, 1]]).view(2, 3, 1, 2)  # [b, s, layers, k]
    logits = (x @ layer.router.weight.t()).flatten(0, 1)  # position by position
    own = logits.topk(2).indices
    rows = experts.transpose(0, 1).flatten(0, 2)
    expected = torch.where((rows < 0).any(-1, keepdim=True), own, rows)
    with replay(layer, experts):
        probs, chosen = layer.router(x)
    assert torch.equal(chosen, expected)
    assert torch.equal(probs, logits.gather(1, expected).softmax(-1))
    probs[:, 0].sum().backward()
    assert layer.router.weight.grad.abs().max() > 0
    assert torch.equal(layer.router.step_sums[:4], torch.bincount(expected.flatten(), minlength=4).double())


# ---- Megatron-LM's form


@pytest.fixture
def instances():
    RouterReplay.clear_global_router_replay_instances()
    yield RouterReplay.global_router_replay_instances
    RouterReplay.clear_global_router_replay_instances()


def test_megatrons_names_record_and_replay(instances):
    (model,) = _training(moe_enable_routing_replay=True, **_FULL).build()
    assert len(instances) == 3
    first, second = micro_batches(0, 0)[:2]
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    expected = loss_of(model, first)
    expected.backward()
    recorded = RouterReplay.get_recorded_data()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    assert [experts.shape for experts in recorded] == [(26, 2)] * 3
    model.zero_grad()
    RouterReplay.set_replay_data(recorded)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    found = loss_of(model, first)
    RouterReplay.set_replay_data(_others(recorded))
    other = loss_of(model, second)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    found.backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    assert torch.equal(loss_of(model, first), expected) and torch.equal(loss_of(model, second), other)
    with pytest.raises(
        DataError, match=r"REPLAY_BACKWARD found no indices for a router; call RouterReplay.set_replay_data"
    ):
        loss_of(model, second)
    RouterReplay.clear_global_router_replay_action()
    own = loss_of(model, second)
    assert not torch.equal(own, other)
    RouterReplay.clear_global_indices()
    assert RouterReplay.get_recorded_data() == [None] * 3
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(DataError, match="REPLAY_FORWARD found no indices"):
        loss_of(model, second)
    with pytest.raises(DataError, match="got indices of 2 layers, and this rank has 3 routers"):
        RouterReplay.set_replay_data(recorded[:2])


def test_torchs_checkpoint_takes_megatrons_list(instances):
    layer = layer_of(moe_enable_routing_replay=True)
    inputs = [torch.randn(3, 2, 8, requires_grad=True) for _ in range(2)]
    targets = [torch.tensor([[0, 1]] * 6), torch.tensor([[2, 3]] * 6)]

    def grads(call: Callable[..., torch.Tensor], replays_backward: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        outputs = []
        for x, target in zip(inputs, targets, strict=True):
            RouterReplay.set_replay_data([target])
            outputs.append(call(x))
        if replays_backward:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        for output in outputs:
            output.square().sum().backward()
        RouterReplay.clear_global_indices()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    expected = grads(layer, False)
    found = grads(lambda x: checkpoint(layer, x, use_reentrant=False), True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_megatrons_form_works_after_a_context(instances):
    (model,) = _training(moe_enable_routing_replay=True).build()
    first = micro_batches(0, 0)[0]
    with record(model) as recorded:
        loss_of(model, first)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    loss_of(model, first)
    by_layer = recorded[0].transpose(0, 1).flatten(0, 1).unbind(1)
    assert all(map(torch.equal, map(torch.Tensor.int, RouterReplay.get_recorded_data()), by_layer))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(DataError, match="set_replay_data first"):
        loss_of(model, first)


def test_routers_are_listed_only_if_the_config_says_so(instances):
    assert layer_of().router.router_replay is None and instances == []
    assert layer_of(moe_enable_routing_replay=True).router.router_replay is instances[0]


# ---- models of transformers


def _of_transformers(kind: str) -> nn.Module:
    pytest.importorskip("transformers")
    if kind == "mixtral":
        return hugging_face_model(kind, num_local_experts=EXPERTS, num_experts_per_tok=2)
    if kind == "qwen3_moe":
        sizes = {"moe_intermediate_size": 12, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        return hugging_face_model(kind, **sizes, norm_topk_prob=True)
    if kind == "gpt_oss":
        return hugging_face_model(kind, num_local_experts=EXPERTS, num_experts_per_tok=2)
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **sizes, **heads, **experts, vocab_size=13, first_k_dense_replace=1, moe_intermediate_size=12
        )
    )


_KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("kind", _KINDS)
def test_models_of_transformers_replay_their_bits(kind):
    model = _of_transformers(kind).train()
    _replays_in_flight(model, token_batches(3), hf_loss_of)


def test_other_routers_have_probabilities_of_what_is_replayed():
    router, x = _of_transformers("qwen3_moe").model.layers[0].mlp.gate, torch.randn(6, 16)
    with replay(router, _ROWS):
        logits, probabilities, experts = router(x)
    scores = logits.softmax(-1).gather(1, _ROWS[:, 0])
    assert torch.equal(experts, _ROWS[:, 0])
    assert torch.equal(probabilities, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("wrapper", ["zero2", "zero3", "fsdp2"])
@on_ranks(2)
def test_wrapped_models_of_transformers_replay(wrapper):
    """The wrapper recomputes units, whose forwards have their experts once."""
    model = wrap_model(_of_transformers("mixtral").train(), ddp_config(wrapper, activation_checkpointing="full"))
    batches = token_batches(4)[dist.get_rank() :: 2]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad_buffer()
        losses = []
        for index, batch in enumerate(batches):
            with nullcontext() if index else model.no_sync():
                losses.append(hf_loss_of(model, batch))
                losses[-1].backward()
        finalize_model_grads([model])
        return torch.stack(losses).detach(), {name: grad.clone() for name, grad in gradients(optimizer).items()}

    expected = run()
    with record(model) as recorded:
        assert _equal(run(), expected)
    assert [experts.shape for experts in recorded] == [(12, 2, 2)] * 2
    with replay(model, collect(recorded, model)):
        assert _equal(run(), expected)
    with replay(model, _others(recorded)):
        changed = run()
    assert not torch.equal(changed[0], expected[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_checkpoint_finds_its_forward(use_reentrant):
    model = _of_transformers("qwen3_moe").train()
    batches = token_batches(3)
    with record(model) as recorded:
        for batch in batches:
            hf_loss_of(model, batch)
    grads = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        with replay(model, _others(recorded)):
            losses = [hf_loss_of(model, batch) for batch in batches]
        for loss in reversed(losses):
            loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_torchs_checkpoint_of_equal_tokens_is_refused():
    model = _of_transformers("qwen3_moe").train()
    model.gradient_checkpointing_enable()
    (batch,) = token_batches(1)
    with record(model) as recorded:
        hf_loss_of(model, batch)
    with replay(model, [*recorded, *_others(recorded)]):
        losses = [hf_loss_of(model, batch) for _ in range(2)]
        with pytest.raises(
            ConfigError, match=r"torch's checkpoint recomputes a forward of model.layers.0.mlp.gate, and"
        ):
            sum(losses).backward()


class _TwiceRouter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.topk(2).indices + x.topk(2).indices


class _SilentRouter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def test_routers_without_one_topk_are_named():
    x = torch.randn(3, 4)
    twice = _TwiceRouter()
    with pytest.raises(ConfigError, match="_TwiceRouter calls topk over its experts twice"), record(twice):
        twice(x)
    with (
        pytest.raises(
            DataError, match=r"^0 chose experts for 0 of 1 micro-batches.*uncompiled, and name with routers="
        ),
        record(nn.Sequential(_SilentRouter())),
    ):
        pass


def test_other_routers_are_named_by_the_caller():
    class Chooser(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.topk(input=x, k=2, dim=1)[1]

    model, x = nn.Sequential(Chooser()), torch.randn(3, 4)
    with pytest.raises(ConfigError, match="Sequential has no routers whose experts could be recorded"), record(model):
        pass
    with record(model, lambda module: isinstance(module, Chooser)) as recorded:
        own = model(x)
    assert torch.equal(recorded[0][:, 0], own.int())
    with replay(model, _others(recorded), lambda module: isinstance(module, Chooser)):
        assert torch.equal(model(x), (own + 1) % 4)


# ---- errors


_ROWS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])[:, None]  # [tokens, layers, k]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (_ROWS[:, 0], r"micro-batch 0 are \[6, 2\], and the model has 1 layers with routers; give \[tokens, 1, k\]"),
        (_ROWS.expand(6, 2, 2), r"micro-batch 0 are \[6, 2, 2\], and the model has 1 layers with routers"),
        (_ROWS[:5], r"router in micro-batch 0 replays are \[5, 2\], not \[6, 2\], \[tokens, k\]"),
        (_ROWS[:4], r"router in micro-batch 0 replays are \[4, 2\], not \[6, 2\]"),
        (_ROWS[..., :1], r"replays are \[6, 1\], not \[6, 2\]"),
        (_ROWS + 1, r"replays go from 1 to 4; it has 4 experts, from 0, and -1 leaves a token to it"),
        (_ROWS - 2, r"replays go from -2 to 1; it has 4 experts"),
        (_ROWS * 0, r"replays name an expert twice: \[0, 0\]; give -1 where none is known"),
        (_ROWS.float(), r"replays are torch.float32; give integers"),
        ([_ROWS, _ROWS], r"router chose experts for 1 of 2 micro-batches; run all that are recorded or replayed"),
        ([], r"router runs micro-batch 0, and 0 are replayed; give indices of each"),
    ],
)
def test_wrong_indices_are_one_line(indices, message):
    layer = layer_of()
    with pytest.raises(DataError, match=message) as caught, replay(layer, indices):
        layer(torch.randn(3, 2, 8))
    assert "\n" not in str(caught.value)
    with replay(layer, _ROWS):  # nothing is left of it
        layer(torch.randn(3, 2, 8))


def test_contexts_of_one_model_do_not_nest():
    layer, other = layer_of(), layer_of()
    with record(layer), record(other):
        layer(torch.randn(3, 2, 8)), other(torch.randn(3, 2, 8))
        for inner in (record(layer), replay(layer, _ROWS)):
            with pytest.raises(ConfigError, match="is called for a model inside of another for it"), inner:
                pass


def test_an_error_inside_is_the_one_that_is_raised():
    layer = layer_of()
    with pytest.raises(ZeroDivisionError), replay(layer, [_ROWS, _ROWS]):
        layer(torch.randn(3, 2, 8))
        _ = 1 / 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_width_are_replayed(dtype):
    layer = layer_of()
    for rows in (_ROWS.to(dtype), _ROWS.to(dtype).numpy(), [_ROWS.tolist()]):
        with replay(layer, rows):
            experts = layer.router(torch.randn(3, 2, 8))[1]
    assert experts.dtype == torch.int64 and torch.equal(experts.view(3, 2, 2), _ROWS.view(2, 3, 2).transpose(0, 1))
