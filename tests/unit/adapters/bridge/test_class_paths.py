"""Classes by dotted paths, and the errors for those that do not exist."""

import pytest
from torch import nn

from core.adapters.bridge.units import check_classes_are_in
from core.adapters.nemo import import_classes_from_paths
from core.base.errors import WrapError


def test_paths_and_classes_give_classes():
    assert import_classes_from_paths(["torch.nn.Linear", nn.Embedding]) == [nn.Linear, nn.Embedding]
    assert import_classes_from_paths([]) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.nn.Linaer", r"'torch.nn.Linaer' does not import.*did you mean 'Linear'"),
        ("torch.optin.Adam", "there is no module torch.optin; correct its name"),
        ("no_such_package.Layer", "there is no module no_such_package; .*install its package"),
        ("Linear", "not a dotted one"),
        ("torch.nn.init", "has init as a module, not a module class"),
        ("torch.nn.functional.linear", "not a module class"),
    ],
)
def test_a_path_that_does_not_import_is_named_with_the_nearest(path, message):
    with pytest.raises(WrapError, match=message):
        import_classes_from_paths([path])


def test_one_string_is_not_a_list():
    with pytest.raises(WrapError, match="list of dotted paths"):
        import_classes_from_paths("torch.nn.Linear")


def test_an_absent_class_is_named_with_the_models_classes():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    check_classes_are_in(model, [nn.Linear], "units")
    with pytest.raises(WrapError, match=r"units names the class torch\.nn.*Bilinear.*takes one of Linear, Lay"):
        check_classes_are_in(model, [nn.Bilinear], "units")
