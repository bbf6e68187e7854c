"""Units by parameter count, and by the class of a layer."""

import pytest
from torch import nn

from core.adapters.bridge.units import units_by_class, units_by_size
from core.base.errors import WrapError
from tests.unit.adapters._adapters import Net


def test_units_by_size_are_found_from_the_inside_out():
    model = Net()
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
    assert sizes["layers.0"] == 83 and sizes["layers"] == 166
    named = {module: name for name, module in model.named_modules()}
    assert [named[m] for m in units_by_size(model, 70)] == ["embedding", "layers.0", "layers.1", "head"]
    assert [named[m] for m in units_by_size(model, 78)] == ["layers.0", "layers.1"]
    assert units_by_size(model, 100) == []  # no container is a unit, and the model itself is one anyway


def test_units_by_class():
    model = Net()
    assert [c.__name__ for c in units_by_class(model, "Block, torch.nn.Embedding", "x")] == ["Block", "Embedding"]
    assert [c.__name__ for c in units_by_class(model, None, "x")] == ["Block"]
    with pytest.raises(WrapError, match=r"x names the class 'Blok'.*did you mean 'Block'"):
        units_by_class(model, "Blok", "x")
    with pytest.raises(WrapError, match="has no list of layers"):
        units_by_class(nn.Linear(2, 2), None, "x")
