"""State in 8 and 16 bits has the bits of one process under every wrapper, and its checkpoints fit any cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core import parallel_state
from core.base.errors import ConfigError
from core.dist_checkpointing import load
from core.models.gpt import GPTModel
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from core.transformer import TransformerConfig
from tests.unit._gpt import Training
from tests.unit._runs import run_micro_batches, wrapped
from tests.unit._spawn import run_anywhere, run_distributed
from tests.unit._whole import assembled
from tests.unit.dist_checkpointing._pieces import Shapes
from tests.unit.optimizer._squares import (
    OFFLOADED,
    Squares,
    assert_saved,
    build,
    continue_from,
    state_of,
    train,
    write,
)

STEPS = 3
SHAPES: Shapes = {
    "columns.weight": ((44, 150), 0),
    "columns.bias": ((44,), 0),
    "rows.weight": ((60, 130), 1),  # rows of 65: most blocks are on both ranks of tensor parallelism
    "wide.weight": ((9, 1024), 1),
    "cube.weight": ((5, 30, 41), None),
    "norm.weight": ((5003,), None),
    "thin.weight": ((1, 3), None),
}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "dynamic8": {"exp_avg_dtype": "dynamic8", "exp_avg_sq_dtype": "dynamic8"},
    "rest": {"exp_avg_dtype": "dynamic8", "exp_avg_sq_dtype": "linear8", "main_params_dtype": "bf16_with_rest"},
    "weights": {"exp_avg_dtype": "linear8", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "bf16"},
    "sgd": {"optimizer": "sgd", "exp_avg_dtype": "dynamic8"},
    "muon": {"optimizer": "muon", "exp_avg_dtype": "dynamic8", "exp_avg_sq_dtype": "dynamic8"},
    "lion": {
        "optimizer": "muon",
        "muon_scalar_optimizer": "lion",
        "exp_avg_dtype": "bf16",
        "muon_exclude": ("cube*",),
    },
    "muon of rest": {"optimizer": "muon", "exp_avg_dtype": "bf16", "main_params_dtype": "bf16_with_rest"},
}
IN_BF16 = ("rest", "weights", "muon of rest")
LAYOUTS = [(1, "serial", 1), (2, "ddp", 1), (2, "zero1", 1), (2, "zero2", 1), (2, "zero3", 1), (2, "fsdp2", 1)]
CUT_TWICE = [(2, "zero1", 2), (4, "zero1", 2), (4, "fsdp2", 2), (4, "zero3", 1), (4, "hybrid fsdp2", 1)]


def _run(kind: str, average: str, wrapper: str, tp: int, **changes: Any) -> tuple[Any, MegatronOptimizer]:
    dtype = torch.bfloat16 if kind in IN_BF16 else torch.float32
    settings = {"lr": 0.05, "bf16": dtype == torch.bfloat16} | FORMATS.get(kind, {}) | changes
    model, optimizer = build(lambda: Squares(SHAPES, 1.0, dtype), wrapper, tp, settings)
    if average:
        AveragedWeights(optimizer, 0.9, dtype=average)  # type: ignore[arg-type]
    return model, optimizer


def _write(kind: str, average: str, wrapper: str, tp: int, folder: str) -> None:
    write(*_run(kind, average, wrapper, tp), STEPS, folder)


def _continue(kind: str, average: str, wrapper: str, tp: int, source: str, target: str) -> None:
    continue_from(source, *_run(kind, average, wrapper, tp), STEPS, target)


def _pairs() -> list[tuple[str, str, tuple[int, str, int], tuple[int, str, int]]]:
    """Each format is written and read by several layouts, and each layout writes and reads several formats."""
    layouts = [*LAYOUTS, *CUT_TWICE]
    averages = ("", "bf16", "dynamic8", "linear8")
    return [
        (
            kind,
            averages[(row + turn) % 4],
            layouts[(3 * row + 5 * turn + 1) % 11],
            layouts[(2 * row + 4 * turn + 6) % 11],
        )
        for row, kind in enumerate(FORMATS)
        for turn in range(3)
    ]


def _name(case: tuple[str, str, tuple[int, str, int], tuple[int, str, int]]) -> str:
    kind, average, *layouts = case
    names = [f"{ranks}_{wrapper}" + ("_tp2" if tp > 1 else "") for ranks, wrapper, tp in layouts]
    return "-".join([kind, average or "no_average", *names]).replace(" ", "_")


@pytest.mark.parametrize(("kind", "average", "writer", "reader"), _pairs(), ids=map(_name, _pairs()))
def test_bits_are_those_of_one_process_on_any_cut(tmp_path: Path, kind, average, writer, reader) -> None:
    run_anywhere(_write, writer[0], kind, average, *writer[1:], str(tmp_path / "first"))
    run_anywhere(_continue, reader[0], kind, average, *reader[1:], str(tmp_path / "first"), str(tmp_path / "second"))
    assert_saved(tmp_path / "second", *_run(kind, average, "serial", 1), 2 * STEPS)


@pytest.mark.parametrize("wrapper", OFFLOADED)
@pytest.mark.parametrize("kind", ["bf16", "dynamic8", "rest", "muon"])
def test_shards_on_the_host_have_the_same_bits(tmp_path: Path, kind: str, wrapper: str) -> None:
    run_anywhere(_write, 2, kind, "dynamic8", wrapper, 1, str(tmp_path / "first"))
    run_anywhere(_continue, 2, kind, "dynamic8", wrapper, 1, str(tmp_path / "first"), str(tmp_path / "second"))
    assert_saved(tmp_path / "second", *_run(kind, "dynamic8", "serial", 1), 2 * STEPS)


def _tied_stages(wrapper: str) -> list[tuple[str, list[str]]]:
    found = []
    for kind in ("bf16", "dynamic8", "rest"):
        precision = "bf16" if kind in IN_BF16 and wrapper != "fsdp2" else "fp32"
        groups = {"pipeline_model_parallel_size": 2}
        training = Training({}, steps=STEPS, precision=precision, fields={"vocab": 301}, groups=groups)
        models = wrapped(wrapper, training)
        settings = FORMATS[kind] if precision == "bf16" else FORMATS[kind] | {"main_params_dtype": "fp32"}
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, bf16=precision == "bf16", **settings), models)
        AveragedWeights(optimizer, 0.9, dtype="dynamic8")
        for step in range(STEPS):
            run_micro_batches(training, models, step, optimizer.scale_loss)
            optimizer.step()
        tensors = optimizer.state_tensors()
        whole = assembled(tensors)  # raises where copies differ
        kept = [name for name in tensors if name.endswith("word_embeddings.weight") and whole[name].any()]
        found.append((kind, [name.split(".")[0] for name in kept]))
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(("ranks", "wrapper"), [(2, "ddp"), (4, "zero1"), (4, "fsdp2")])
def test_tied_copies_of_two_stages_keep_the_same_bits(ranks: int, wrapper: str) -> None:
    """A stage updates its copy alone, with the random bits that the other one draws."""
    of_ranks = run_distributed(_tied_stages, ranks, wrapper)
    for of_kind in zip(*of_ranks, strict=True):
        masters = ["master"] if of_kind[0][0] == "rest" and wrapper != "fsdp2" else []
        assert [names for _, names in of_kind] == [["exp_avg", "exp_avg_sq", *masters, "average"]] * ranks


@pytest.mark.parametrize(("before", "after"), [("fp32", "dynamic8"), ("dynamic8", "fp32"), ("bf16", "dynamic8")])
def test_a_checkpoint_continues_in_another_precision(tmp_path: Path, before: str, after: str) -> None:
    run_anywhere(_write, 2, before, "", "zero3", 1, str(tmp_path / "first"))
    for number, layout in enumerate([(1, "serial", 1), (2, "zero1", 2)]):
        run_anywhere(
            _continue, layout[0], after, "", *layout[1:], str(tmp_path / "first"), str(tmp_path / f"{number}")
        )
    states = []
    for number in range(2):
        tensors = state_of(*_run(after, "", "serial", 1))
        load(tensors, tmp_path / f"{number}")
        states.append({name: tensor.clone() for name, tensor in tensors.items()})
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_skipped_step_changes_no_bit() -> None:
    for kind in FORMATS:
        model, optimizer = _run(kind, "dynamic8", "serial", 1)
        train(model, optimizer, 2)
        before = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
        optimizer.zero_grad()
        model().backward()
        next(model.parameters()).grad[3, 3] = torch.nan
        assert not optimizer.step()[0]
        after = state_of(model, optimizer)
        assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == [], kind
        train(model, optimizer, 1)
        assert any(not torch.equal(t, before[n]) for n, t in state_of(model, optimizer).items()), kind


def test_bytes_are_those_of_the_formats() -> None:
    """Of tensors with blocks: codes, a scale of four bytes for each 256, and what a parameter in bf16 lacks."""
    _, optimizer = _run("rest", "", "serial", 1, exp_avg_sq_dtype="dynamic8")
    for p in optimizer.main_params:
        n, state = p.param.numel(), optimizer.state[p.main]
        held = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor))
        assert p.main.data_ptr() == p.param.data_ptr()  # no master
        blocks = -(-n // 256)
        assert held == 2 * n + (2 * (n + 4 * blocks) if n >= 4096 else 0)
        if n >= 4096:
            assert (held + 2 * n) / n <= 6.2


def test_what_other_code_writes_is_updated_from() -> None:
    """As with masters in fp32: the next update begins with the written value, without the old one's rest."""
    model, optimizer = _run("rest", "", "serial", 1)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.norm.weight.fill_(1.5)
    master = optimizer.state_tensors()["master.norm.weight"]
    assert torch.equal(master, torch.full_like(master, 1.5))


@pytest.mark.parametrize(
    ("settings", "dtype", "said"),
    [
        ({"main_params_dtype": "bf16"}, torch.float32, "no parameter is in bf16"),
        ({"main_params_dtype": "bf16_with_rest", "fp16": True}, torch.float16, "takes bfloat16"),
        ({"exp_avg_dtype": "bf16"}, torch.float64, "is in float64"),
    ],
)
def test_a_dtype_that_does_not_fit_is_one_line(settings: dict[str, Any], dtype: torch.dtype, said: str) -> None:
    model = Squares(SHAPES, 1.0, torch.float32).to(dtype)
    with pytest.raises(ConfigError, match=said) as error:
        get_megatron_optimizer(OptimizerConfig(lr=0.1, **settings), [model])
    assert "\n" not in str(error.value)


def test_an_unknown_format_is_one_line() -> None:
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        with pytest.raises(ConfigError, match=f"{field} is 'fp8'"):
            OptimizerConfig(**{field: "fp8"})
    assert OptimizerConfig(exp_avg_dtype=torch.bfloat16, main_params_dtype=torch.float32).exp_avg_dtype == "bf16"
    with pytest.raises(ConfigError, match="muon_momentum_holder"):
        OptimizerConfig(optimizer="muon", muon_momentum_holder="owners", exp_avg_dtype="bf16")
    _, optimizer = _run("bf16", "", "serial", 1)
    with pytest.raises(ConfigError, match="dtype is 'fp8'"):
        AveragedWeights(optimizer, dtype="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_an_average_that_cannot_be_kept_leaves_nothing(masters: str) -> None:
    """A parameter in double comes after others whose average could be kept."""

    def make() -> MegatronOptimizer:
        model = Squares(SHAPES, 1.0, torch.float32 if masters == "fp32" else torch.bfloat16)
        model.cube.double()
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, main_params_dtype=masters), [model])
        models.append(model)
        return optimizer

    models: list[Any] = []
    optimizer, other = make(), make()
    params, kept = {p.param for p in optimizer.main_params}, optimizer.rule.stored
    held = [tensor.data_ptr() for tensor in optimizer.held(params)]
    with pytest.raises(
        ConfigError, match=r"average is to be kept in dynamic8, and parameter cube\.weight is in float64"
    ):
        AveragedWeights(optimizer, dtype="dynamic8")
    assert optimizer.average is None and optimizer.rule.stored is kept
    assert [tensor.data_ptr() for tensor in optimizer.held(params)] == held
    AveragedWeights(optimizer, 0.9)
    AveragedWeights(other, 0.9)
    for model, trained in zip(models, (optimizer, other), strict=True):
        train(model, trained, 2)
    assert _differing(_values(models[0], optimizer), _values(models[1], other)) == []


def _sleeps(kind: str, wrapper: str, releases: bool) -> list[float]:
    model, optimizer = _run(kind, "dynamic8", wrapper, 1)
    train(model, optimizer, 2)
    if releases:
        assert model.release("optimizer") > 0
        model.restore()
    train(model, optimizer, 1)
    return [
        tensor.double().sum().item()
        for tensor in optimizer.state[optimizer.main_params[0].main].values()
        if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize("kind", ["dynamic8", "rest"])
def test_state_sleeps_and_wakes(kind: str) -> None:
    expected = run_anywhere(_sleeps, 2, kind, "zero3", False)
    assert run_anywhere(_sleeps, 2, kind, "zero3", True) == expected


def _losses(settings: dict[str, Any]) -> list[float]:
    """Twenty steps of a small GPT on sequences that count upwards."""
    torch.manual_seed(4)
    dtype = torch.bfloat16 if "main_params_dtype" in settings else torch.float32
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    model = GPTModel(config, vocab_size=96, max_sequence_length=32).to(dtype)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=2e-3, bf16=dtype == torch.bfloat16, **settings), [model])
    losses = []
    for step in range(20):
        starts = torch.randint(96, (8, 1), generator=torch.Generator().manual_seed(step))
        tokens = (starts + torch.arange(33)) % 96
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).float().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_bf16", [False, True])
def test_losses_are_near_those_of_fp32(is_bf16: bool) -> None:
    masters = {"main_params_dtype": "fp32"} if is_bf16 else {}
    expected = _losses(masters)
    assert expected[-1] < 0.85 * expected[0]
    kept = [{"exp_avg_dtype": name, "exp_avg_sq_dtype": name} for name in ("bf16", "dynamic8")]
    kept += [{"main_params_dtype": name} for name in ("bf16", "bf16_with_rest")] if is_bf16 else []
    for formats in kept:
        found = _losses(masters | formats)
        assert found != expected
        assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) <= 0.005, formats


@pytest.mark.parametrize("kind", FORMATS)
def test_state_moves_through_memory(kind: str) -> None:
    """`state_dict` of an optimizer, as torch's: copied, and loaded into another one, by its methods alone."""
    first, second = (_run(kind, average, "serial", 1) for average in ("dynamic8", "dynamic8"))
    train(*first, 2)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    assert _differing(_values(*second), _values(*first)) == []
    for run in (first, second):
        train(*run, 1)
    assert _differing(_values(*second), _values(*first)) == []


def _values(model: Any, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}


def _differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize("average", ["fp32", "bf16", "dynamic8"])
def test_an_evaluation_of_averages_changes_nothing(average: str) -> None:
    for kind in FORMATS:
        model, optimizer = _run(kind, average, "serial", 1)
        train(model, optimizer, 2)
        before = _values(model, optimizer)
        with optimizer.average.swapped():  # type: ignore[union-attr]
            model()
        assert _differing(_values(model, optimizer), before) == [], kind


def test_copies_are_those_of_the_next_load_and_end_with_a_step() -> None:
    for kind in ("lion", "sgd", "rest"):
        model, optimizer = _run(kind, "bf16", "serial", 1)
        train(model, optimizer, 1)
        first, second = optimizer.state_tensors(), optimizer.state_tensors()
        name = next(name for name in first if name.startswith("average."))
        first[name].fill_(0.5)
        optimizer.load_state_scalars(optimizer.state_scalars())
        assert (optimizer.state_tensors()[name] == 0.5).all() and second.keys() == first.keys()
        train(model, optimizer, 1)
        assert optimizer.rule.stored._copies == {}


def test_a_write_of_other_code_drops_the_rest_near_it() -> None:
    model = Squares(SHAPES, 1.0, torch.bfloat16)
    wide = torch.nn.Parameter(torch.randn(300, 400, generator=torch.Generator().manual_seed(1)).bfloat16())
    model.wide.weight = wide
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, clip_grad=0.0, main_params_dtype="bf16_with_rest"), [model]
    )
    train(model, optimizer, 2)
    before = optimizer.state_tensors()["master.wide.weight"].clone()
    wide.data[7, 9] = 3.0
    after = optimizer.state_tensors()["master.wide.weight"]
    changed = (after != before).nonzero()
    assert after[7, 9] == 3.0 and 0 < len(changed) <= 500
    assert (changed[:, 0] * 400 + changed[:, 1] - (7 * 400 + 9)).abs().max() <= 500


def _stage_of_frozen_weights() -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = Squares(SHAPES, 1.0, torch.bfloat16)
    is_first = parallel_state.is_pipeline_first_stage()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_first or name == "norm.weight")
    if is_first:
        model.norm.float()
    config = OptimizerConfig(lr=0.1, bf16=True, main_params_dtype="bf16_with_rest")
    try:
        optimizer = get_megatron_optimizer(config, [model])
    except ConfigError as error:
        return str(error)
    return str(sum(p.rest is not None for p in optimizer.main_params))


def test_a_pipeline_stage_may_have_no_masters() -> None:
    first, second = run_distributed(_stage_of_frozen_weights, 2)
    assert (first, int(second)) == ("0", len(SHAPES))


def test_a_parameter_without_rows_in_order_is_one_line() -> None:
    model = Squares(SHAPES, 1.0, torch.bfloat16)
    model.wide.weight = torch.nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16).t())
    with pytest.raises(ConfigError, match=r"wide\.weight is not contiguous"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True, main_params_dtype="bf16"), [model])


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "exp_avg_sq_dtype": "bf16"},
        {"optimizer": "sgd", "sgd_momentum": 0.0, "exp_avg_dtype": "bf16"},
        {"optimizer": "muon", "muon_scalar_optimizer": "lion", "exp_avg_sq_dtype": "dynamic8"},
    ],
)
def test_moments_that_are_not_kept_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave it at fp32"):
        OptimizerConfig(lr=0.1, **settings)
