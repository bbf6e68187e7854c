"""Plans of Hugging Face's models, of both generations, and their styles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from core.adapters.nemo import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from core.adapters.nemo.tensor_parallel_plan import cut_as_planned
from core.base.errors import ParallelConfigError, WrapError
from tests.unit._spawn import on_ranks
from tests.unit.distributed._hugging_face import hugging_face_model
from tests.unit.distributed._toys import toy


def test_styles_are_torchs_and_cached():
    kinds = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": ColwiseParallel,
        "rowwise_rep": RowwiseParallel,
        "sequence_parallel": SequenceParallel,
        "colwise_gather_output": ColwiseParallel,
        "rowwise_split_input": RowwiseParallel,
        "embedding_rowwise": RowwiseParallel,
        "embedding_colwise": ColwiseParallel,
    }
    for name, kind in kinds.items():
        assert type(translate_to_torch_parallel_style(name)) is kind
        assert translate_to_torch_parallel_style(name) is translate_to_torch_parallel_style(name)
    assert translate_to_torch_parallel_style("colwise").output_layouts == (Shard(-1),)
    assert translate_to_torch_parallel_style("colwise_rep").output_layouts == (Replicate(),)
    assert translate_to_torch_parallel_style("rowwise_rep").input_layouts == (Replicate(),)


def test_styles_without_a_counterpart_are_refused():
    with pytest.raises(
        ValueError,
        match=r"'colwize' has no counterpart.*did you mean 'colwise'.*sequence_parallel.*replicated_with_grad",
    ):
        translate_to_torch_parallel_style("colwize")
    with pytest.raises(ValueError, match=r"'packed_colwise' has no counterpart.*Leave its modules out"):
        translate_to_torch_parallel_style("packed_colwise")


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self._tp_plan = {"layers.*": "rowwise", "layers.*.of_another_variant": "colwise"}


class _Planned(nn.Module):
    _tp_plan = {"head": "colwise", "model.layers.*": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = _Inner(), nn.Linear(2, 2)


def test_plans_of_class_instance_and_inner_model_are_joined():
    plan = get_hf_tp_shard_plan(_Planned())
    assert {name: type(style) for name, style in plan.items()} == {
        "head": ColwiseParallel,
        "model.layers.*": RowwiseParallel,
    }
    model = _Planned()
    model._tp_plan = {"head": "colwise_rep"}
    assert get_hf_tp_shard_plan(model)["head"] is translate_to_torch_parallel_style("colwise_rep")
    with pytest.raises(ParallelConfigError, match="Linear brings no tensor-parallel plan"):
        get_hf_tp_shard_plan(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_real_models_bring_a_plan(kind):
    pytest.importorskip("transformers")
    plan = get_hf_tp_shard_plan(hugging_face_model(kind))
    assert isinstance(plan["model.layers.*.self_attn.q_proj"], ColwiseParallel)
    assert plan["lm_head"].output_layouts == (Replicate(),)
    assert ("model.layers.*.self_attn.q_norm" in plan) == (kind == "qwen3")


@on_ranks(2)
def test_a_shared_weight_stays_one_whichever_module_is_planned() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    colwise, embedding = (translate_to_torch_parallel_style(n) for n in ("colwise_rep", "embedding_rowwise"))
    tokens = torch.arange(8).view(2, 4)
    for plan in ({"head": colwise}, {"embedding": embedding}):  # as transformers 4.5x and 5.x have it
        model = toy(tied=True)
        expected = toy(tied=True)(tokens)
        cut_as_planned(model, mesh, plan, mesh)
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.placements == (Shard(0),) and model.head.weight.partition_dim == 0
        torch.testing.assert_close(model(tokens), expected)
    with pytest.raises(WrapError, match=r"embedding\.weight and head.weight are one parameter"):
        cut_as_planned(toy(tied=True), mesh, {"head": colwise, "embedding": ColwiseParallel()}, mesh)
