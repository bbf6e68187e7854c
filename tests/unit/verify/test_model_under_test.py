"""The user's function is imported, called and checked; each mistake is one line that names it."""

from __future__ import annotations

import pytest
import torch

from core.base.errors import ConfigError
from core.verify import load_model_under_test
from core.verify.model_under_test import scalar_loss

MODELS = "tests.unit.verify._models"


def one_line(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_is_built_equally_each_time():
    tested = load_model_under_test(f"{MODELS}:build")
    model = tested.check()
    assert model.training
    first, loss = tested.build()
    torch.manual_seed(5)
    second, _ = tested.build()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    values = [scalar_loss(tested, loss, first, index) for index in (0, 0, 1)]  # dropout is drawn by number too
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_a_model_of_tokens_needs_no_loss():
    tested = load_model_under_test(f"{MODELS}:Tokens")
    model, loss = tested.build()
    assert loss(model, 0) > 0
    assert loss(model, 0) != loss(model, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_module", "'my_module' names no function; write module:function"),
        ("my_module:", "'my_module:' names no function"),
        ("no_such_module:build", "no_such_module does not import (ModuleNotFoundError: No module named"),
        (f"{MODELS}:bild", f"{MODELS} has no bild; write module:function"),
        (f"{MODELS}:NUMBER", f"{MODELS}:NUMBER is of type int; it has to be a function"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused(name: str, said: str):
    assert said in one_line(load_model_under_test, name)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("build_nothing", "returned None; let it return a model and a function loss(model, index)"),
        ("build_without_parameters", "built a Sequential with no parameters; there is nothing to train"),
        ("build_frozen", "built a Net with only frozen parameters"),
        ("build_on_meta", "first.weight is on the meta device"),
        ("build_without_loss", "returned a Net alone, whose forward does not take input_ids and labels"),
        ("build_that_raises", "build_that_raises raised KeyError: 'width'"),
        ("build_with_new_values_each_time", "is not the same from one build to the next: layers.2.2.bias differs"),
        ("build_another_each_time", "is not the same from one build to the next: scale"),
    ],
)
def test_what_builds_no_model_is_refused(function: str, said: str):
    tested = load_model_under_test(f"{MODELS}:{function}")
    line = one_line(tested.check)
    assert said in line and line.startswith(f"{MODELS}:{function} ")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("build_with_many_losses", "is a tensor of shape [7]; let loss(model, index) return a scalar"),
        ("build_with_a_loss_of_nothing", "is a tensor of shape [] without a gradient"),
    ],
)
def test_a_loss_that_is_none_is_refused(function: str, said: str):
    tested = load_model_under_test(f"{MODELS}:{function}")
    assert said in one_line(scalar_loss, tested, *reversed(tested.build()), 0)
