"""Each piece of our tensors gets the values that the whole tensor has there, for any recipe of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import flat_range_view
from core.dist_checkpointing.foreign_layout import Recipe, Run, foreign_shapes, load_foreign, make_foreign
from core.dist_checkpointing.safetensors_io import read_safetensors_index

library = pytest.importorskip("safetensors.torch")

RECIPES = [
    Recipe("fused", tuple(Run(name, 2, start, 1, 2 * (start // 6)) for start in (0, 6) for name in ("q",))
           + tuple(Run(name, 2, start + shift, 1, 2 * (start // 6))
                   for start in (0, 6) for shift, name in ((2, "k"), (4, "v")))),
    Recipe("gated", (Run("gate", 5, 0, 2), Run("up", 5, 1, 2))),
    Recipe("turned", (Run("columns", 3, transposed=True), Run("columns", 4, 3, 1, 3, transposed=True))),
    Recipe("stacked", (Run("stack", 2, 0, 2, 0, source_index=(1,)), Run("stack", 2, 1, 2, 2, source_index=(1,)))),
    Recipe("below", (Run("stack", 4, source_index=(0,)),)),
    Recipe("experts", tuple(Run(f"{name}{e}", 2, first, 2, index=e)
                            for e in range(3) for first, name in enumerate(("even", "odd")))),
    Recipe("stacks", tuple(Run("deep", 4, source_index=(1, e), index=e) for e in range(2))),
    Recipe("shallow", tuple(Run("deep", 4, source_index=(0, e), index=e) for e in range(2))),
    Recipe("words", (Run("rows", 6),), padded=True),
    Recipe("vector", (Run("one", 5),)),
]  # fmt: skip
SHAPES = {
    "fused": (12, 3),
    "gated": (10, 4),
    "turned": (7, 5),
    "stacked": (4, 3),
    "below": (4, 3),
    "experts": (3, 4, 2),
    "stacks": (2, 4, 3),
    "shallow": (2, 4, 3),
    "words": (8, 2),
    "vector": (5,),
}
OURS = {
    name: torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * number + 1
    for number, (name, shape) in enumerate(SHAPES.items())
}
OURS["words"][6:] = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes their tensors, made of ours."""
    folder = tmp_path_factory.mktemp("theirs")
    shapes = foreign_shapes(RECIPES, SHAPES)
    theirs = {name: make_foreign(name, shape, RECIPES, OURS).contiguous() for name, shape in shapes.items()}
    library.save_file(theirs, folder / "model.safetensors")
    return folder


def _load(targets: dict[str, torch.Tensor], folder: Path, recipes: list[Recipe] = RECIPES) -> None:
    load_foreign(targets, recipes, read_safetensors_index(folder), folder)


def test_shapes_of_theirs_follow():
    assert foreign_shapes(RECIPES, SHAPES) == {
        **dict.fromkeys("qkv", (4, 3)),
        **dict.fromkeys(("gate", "up"), (5, 4)),
        "columns": (5, 7),
        "stack": (2, 4, 3),
        **{f"{name}{e}": (2, 2) for e in range(3) for name in ("even", "odd")},
        "deep": (2, 2, 4, 3),
        "rows": (6, 2),
        "one": (5,),
    }


def test_what_is_made_of_ours_is_read_back(folder: Path):
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in OURS.items()}
    _load(found, folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in OURS.items())


def test_any_run_of_elements_gets_its_own(folder: Path):
    for name, whole in OURS.items():
        recipes = [recipe for recipe in RECIPES if recipe.name == name]
        sources = {run.source for recipe in recipes for run in recipe.runs}
        index = read_safetensors_index(folder)
        for pair in (("stacked", "below"), ("stacks", "shallow")):
            if name in pair:
                recipes = [recipe for recipe in RECIPES if recipe.name in pair]
        for start, end in itertools.combinations(range(0, whole.numel() + 1, 5), 2):
            values = torch.full((end - start,), torch.nan)
            targets = {recipe.name: torch.zeros(SHAPES[recipe.name]) for recipe in recipes}
            targets[name] = flat_range_view(whole, values, start)
            load_foreign(targets, recipes, index, folder, ignored_names=index.tensors.keys() - sources)
            assert torch.equal(values, whole.flatten()[start:end]), (name, start, end)


def test_all_misfits_are_one_error_and_nothing_is_loaded(folder: Path):
    found = {name: torch.zeros_like(tensor) for name, tensor in OURS.items()}
    del found["vector"]
    found |= {"gated": torch.zeros(10, 3), "more": torch.zeros(1), "words": torch.zeros(5, 2, dtype=torch.int64)}
    found["turned"] = torch.zeros(8, 5)
    with pytest.raises(CheckpointError, match="nothing was loaded") as caught:
        _load(found, folder)
    for message in (
        "the model has no vector",
        "nothing there makes up more",
        "left over there: one",
        "gate is [5, 4] there, and the model takes [5, 3]",
        "rows is float32 there, and int64 in the model",
        "words has 5 rows here, and 6 there",
        "turned has 8 rows here, and 7 there",
    ):
        assert message in str(caught.value)
    assert not any(tensor.any() for tensor in found.values())


def test_values_are_rounded_to_our_dtype(folder: Path):
    found = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in OURS.items()}
    _load(found, folder)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in OURS.items())
