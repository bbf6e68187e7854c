"""Weights are read from checkpoints that are laid out as Megatron-LM lays out its own, and nothing else of them is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import model_state_dict
from core.distributed import TorchFullyShardedDataParallelConfig, wrap_model
from core.models.gpt import GPTModel
from core.models.gpt.megatron_layout import find_megatron, load_megatron, save_megatron
from core.transformer.lora import add_lora
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.dist_checkpointing._pieces import Bomb
from tests.unit.models.gpt.test_hugging_face import KINDS, build

EACH_EXPERT = {
    "grouped": "mlp.experts.{name}{expert}",
    "sequential": "mlp.experts.local_experts.{expert}.{name}",
    "singleton": "mlp.experts.experts.{expert}.{name}",
}
"""Names of a tensor of one expert: of Transformer Engine's layers, of one module for each, and in checkpoints."""


def theirs(
    model: GPTModel, *, stacked: bool, fused_norms: bool, halves: bool = False, experts: str = "axis"
) -> dict[str, torch.Tensor]:
    """Returns the same weights under Megatron-LM's names and in its shapes."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    actual: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("decoder.layers."):
            actual[name] = tensor
            continue
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        layer = layers.setdefault(int(number), {})
        if fused_norms:
            rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        parts = {rest: tensor}
        if rest.startswith("mlp.experts."):
            short = rest.removeprefix("mlp.experts.")
            parts = {f"mlp.experts.{rest.removeprefix('mlp.')}": tensor}
            if experts != "axis":
                parts = {EACH_EXPERT[experts].format(name=short, expert=e): one for e, one in enumerate(tensor)}
        for name_there, part in parts.items():
            if "linear_fc1." in rest and "layer_norm" not in name_there and model.config.gated_linear_unit:
                rows = 1 if experts == "axis" and rest.startswith("mlp.experts.") else 0
                gate, up = part.unflatten(rows, (-1, 2)).unbind(rows + 1)
                cut = {f"{name_there}_w": gate, f"{name_there}_v": up}
                layer |= cut if halves else {name_there: torch.cat((gate, up), rows)}
            else:
                layer[name_there] = part
    if stacked:
        for rest in layers[0]:
            actual[f"decoder.layers.{rest}"] = torch.stack([layers[n][rest] for n in sorted(layers)])
    else:
        actual |= {f"decoder.layers.{n}.{rest}": part for n, layer in layers.items() for rest, part in layer.items()}
    return {name: tensor.detach().clone() for name, tensor in actual.items()}


def _write(folder: Path, state: dict[str, Any], bomb: Path) -> Path:
    """Writes as Megatron-LM leaves a run: a pointer, and in the checkpoint more than weights."""
    extras = {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": torch.zeros(3),
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": Bomb(bomb),
        "rng_state/shard_0.0_1.1": Bomb(bomb),
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state | extras, checkpoint_id=folder / "iter_0000020")
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    (folder / "iter_0000020" / "common.pt").write_bytes(pickle.dumps(Bomb(bomb)))
    return folder


BIASED_EXPERTS = {"add_bias_linear": True, "num_moe_experts": 3, "moe_shared_expert_intermediate_size": 8}


IMPORTED = [
    ("mixtral", {}, {"stacked": True, "fused_norms": False}),
    ("mixtral", {}, {"stacked": True, "fused_norms": False, "halves": True}),
    ("glm4_moe", {}, {"stacked": False, "fused_norms": True}),
    ("gpt2", BIASED_EXPERTS | {"moe_shared_expert_gate": True}, {"stacked": True, "fused_norms": False}),
]


def _is_quick(case: tuple[str, Any, Any, str]) -> bool:
    """Experts stacked along an axis for all, and each other name with two of them."""
    *model, experts = case
    return experts == "axis" or (IMPORTED.index(tuple(model)) + [*EACH_EXPERT].index(experts)) % 2 == 0


@pytest.mark.parametrize(
    ("kind", "changes", "details", "experts"),
    quick([(*case, experts) for case in IMPORTED for experts in ("axis", *EACH_EXPERT)], _is_quick),
)
def test_experts_import_under_all_their_names(
    kind: str, changes: dict[str, Any], details: dict[str, bool], experts: str, tmp_path: Path
):
    model = build(kind, **changes)
    state = theirs(model, experts=experts, **details)
    load_megatron(back := build(kind, seed=4, **changes), _write(tmp_path / "theirs", state, tmp_path / "ran"))
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    with pytest.raises(CheckpointError, match=r"(left over|missing) there|is \[.*and the model takes"):
        more = build(kind, **{**changes, "num_moe_experts": model.config.num_moe_experts * 2})
        load_megatron(more, tmp_path / "theirs")


@pytest.mark.parametrize("kind", ["llama", "llama with biases and gelu", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    "details",
    [{"stacked": True, "fused_norms": True}, {"stacked": False, "fused_norms": False, "halves": True}],
    ids=["stacked", "numbered"],
)
def test_import_runs_no_pickled_code(kind: str, details: dict[str, bool], tmp_path: Path):
    bomb = tmp_path / "ran"
    model = build(kind, tied=kind == "llama")
    folder = _write(tmp_path / "theirs", theirs(model, **details), bomb)
    assert find_megatron(folder) == folder / "iter_0000020"
    back = build(kind, tied=kind == "llama", seed=4)
    load_megatron(back, folder)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    assert not bomb.exists()


def test_other_padding_loads_and_other_model_is_refused(tmp_path: Path):
    model = build("llama")
    folder = _write(tmp_path / "theirs", theirs(model, stacked=True, fused_norms=True), tmp_path / "ran")
    back = build("llama", vocab_size=64, seed=4)
    load_megatron(back, folder)
    words = back.embedding.word_embeddings.weight
    assert torch.equal(words[:48], model.embedding.word_embeddings.weight) and not words[48:].any()
    with pytest.raises(CheckpointError, match=r"qkv.weight is \[2, 32, 16\] there, and the model takes \[2, 48, 16\]"):
        load_megatron(build("llama", num_query_groups=4), folder)
    with pytest.raises(CheckpointError, match=r"missing there: .*q_layernorm.weight"):
        load_megatron(build("qwen3", kv_channels=4, hidden_size=16), folder)
    with pytest.raises(CheckpointError, match=r"left over there: .*k_layernorm"):
        other = theirs(build("qwen3", kv_channels=4, hidden_size=16), stacked=True, fused_norms=True)
        load_megatron(build("llama"), _write(tmp_path / "other", other, tmp_path / "ran"))


def test_other_folders_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no torch_dist checkpoint of Megatron-LM's, and none"):
        load_megatron(build("llama"), tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match=r"names '7', and .*iter_0000007 is no checkpoint of the formats"):
        load_megatron(build("llama"), tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="elsewhere is no checkpoint of the formats torch_dist and torch"):
        load_megatron(build("llama"), tmp_path)


def test_megatron_classes_in_index_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys
    import types

    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    base = dcp.metadata.Metadata
    module.MCoreMetadata = type("MCoreMetadata", (base,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    model = build("llama")
    folder = _write(tmp_path / "theirs", theirs(model, stacked=True, fused_norms=True), tmp_path / "ran")
    path = folder / "iter_0000020" / ".metadata"
    actual = pickle.loads(path.read_bytes())
    own = module.MCoreMetadata(**vars(actual))  # type: ignore[attr-defined]
    own.mcore_data = {"optimizer.state": {"nd_reformulated_orig_global_shape": (2, 3)}}
    path.write_bytes(pickle.dumps(own))
    monkeypatch.undo()
    back = build("llama", seed=4)
    load_megatron(back, folder)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_with_its_bits(kind: str, tmp_path: Path):
    model = build(kind)
    save_megatron(model, tmp_path / "theirs", max_shard_bytes=2000)
    assert find_megatron(tmp_path / "theirs") == tmp_path / "theirs" / "release"
    assert len([*(tmp_path / "theirs" / "release").glob("*.distcp")]) > 2
    load_megatron(back := build(kind, seed=4, vocab_size=64), tmp_path / "theirs")
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name][: len(tensor)], tensor), name
    with pytest.raises(CheckpointError, match="theirs exists and is not empty"):
        save_megatron(model, tmp_path / "theirs")


def test_adapters_are_not_written(tmp_path: Path):
    add_lora(model := build("gpt2"), 2)
    with pytest.raises(CheckpointError, match="LoRA adapters, which a checkpoint of Megatron-LM's has no place for"):
        save_megatron(model, tmp_path / "there")


@on_ranks(2)
def test_a_sharded_model_is_written(tmp_path: Path):
    whole, problems = build("mixtral").state_dict(), []
    for tp in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        gpt = build("mixtral", tensor_model_parallel_size=tp)
        load_megatron(gpt, tmp_path / "1") if tp == 2 else None
        save_megatron(wrap_model(gpt, gpt.config, TorchFullyShardedDataParallelConfig()), tmp_path / str(tp))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        load_megatron(back := build("mixtral", seed=4), tmp_path / str(tp))
        problems += [f"tp {tp}: {name}" for name, t in back.state_dict().items() if not torch.equal(t, whole[name])]
    assert problems == [], problems


@on_ranks(2)
def test_sharded_import_into_sharded_model(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    whole = build("llama with biases and gelu", False)
    state = theirs(whole, stacked=True, fused_norms=True)
    cut = {
        name: distribute_tensor(
            tensor, mesh, [Shard(tensor.dim() - 1 - number % 2) if tensor.dim() > 1 else Replicate()]
        )
        for number, (name, tensor) in enumerate(state.items())
    }
    dcp.save(cut, checkpoint_id=tmp_path)
    problems = []
    expected = whole.state_dict()
    for tp in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        gpt = build("llama with biases and gelu", False, seed=9, tensor_model_parallel_size=tp)
        model = wrap_model(gpt, gpt.config, TorchFullyShardedDataParallelConfig())
        load_megatron(model, tmp_path)
        for name, tensor in model_state_dict(gpt).items():
            actual = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not torch.equal(actual, expected[name]):
                problems.append(f"tp {tp}: {name}")
    assert problems == []
