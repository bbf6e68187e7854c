"""Loads whole and sharded tensors into any module, in place; or raises one error with all problems, changing
nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import load_model_state_dict, local_slices, local_tensor, model_state_dict
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import SHAPES, Toy, toy, whole


def _full() -> dict[str, torch.Tensor]:
    return {name: whole(name) for name in SHAPES} | {"steps": torch.tensor(11)}


def _check(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for name, param in model.named_parameters():
        assert torch.equal(local_tensor(param), whole(name).to(dtype)[local_slices(param)]), name
    assert model.steps.item() == 11


def _loads_full(layout: str) -> None:
    model = toy(layout, filled=False)
    params = dict(model.named_parameters())
    pointers = {name: local_tensor(param).data_ptr() for name, param in params.items()}
    keys = load_model_state_dict(model, _full())
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    _check(model)
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert {name: local_tensor(param).data_ptr() for name, param in params.items()} == pointers
    low = toy(layout, filled=False, dtype=torch.bfloat16)
    load_model_state_dict(low, _full())
    _check(low, torch.bfloat16)


def test_a_full_dict_fills_a_plain_module_in_place():
    _loads_full("plain")


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "fsdp"), (2, "tp2"), *(pytest.param(4, name, marks=pytest.mark.long) for name in ("tp2 fsdp", "hybrid"))],
)
def test_a_full_dict_fills_a_cut_module_in_place(world, layout):
    run_distributed(_loads_full, world, layout)


def _loads_on_one_rank_only() -> None:
    model = toy("fsdp", filled=False)
    if dist.get_rank() == 0:
        load_model_state_dict(model, _full())  # plain values need no other rank
        _check(model)


def test_a_full_dict_needs_no_other_rank():
    run_distributed(_loads_on_one_rank_only, 2)


def _loads_sharded(layout: str) -> None:
    source = toy(layout, filled=True)
    views = model_state_dict(source)
    own = {name: value.detach() for name, value in source.state_dict().items()}
    for given in [views] if layout == "tp2" else [views, own]:
        model = Toy(filled=False)
        if "fsdp" in layout:
            model.shard(parallel_state.get_data_parallel_mesh())
        load_model_state_dict(model, given)
        _check(model)
    if layout == "fsdp":  # pieces of another mesh are gathered, one tensor at a time
        plain = Toy(filled=False)
        assert isinstance(views["norm.weight"], DTensor)
        load_model_state_dict(plain, views)
        _check(plain)


@pytest.mark.parametrize(
    ("world", "layout"), [(2, "fsdp"), (2, "tp2"), pytest.param(4, "tp2 fsdp", marks=pytest.mark.long)]
)
def test_sharded_dicts_fill_a_module_in_place(world, layout):
    run_distributed(_loads_sharded, world, layout)


def _fails_on_rank_1() -> str:
    model = toy("fsdp", filled=False)
    given = model_state_dict(toy("fsdp", filled=True))
    if dist.get_rank() == 1:
        del given["norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        load_model_state_dict(model, given)
    assert not any(local_tensor(param).any() for param in model.parameters())
    return str(caught.value)


def test_what_one_rank_lacks_is_raised_on_all():
    first, second = run_distributed(_fails_on_rank_1, 2)
    assert first == second
    assert "missing: norm.weight" in first


def test_all_problems_are_in_one_error_and_nothing_is_loaded():
    model = Toy(filled=False)
    given = _full() | {"rows.weight": torch.ones(5, 5), "steps": torch.tensor(1.5), "extra": torch.ones(1), "n": 3}
    del given["columns.bias"]
    for strict in (True, False):
        with pytest.raises(CheckpointError) as caught:
            load_model_state_dict(model, given, strict=strict)
        message = str(caught.value)
        assert "rows.weight has shape [5, 5] where the whole model's tensor has [5, 4]" in message
        assert "steps is float32 where the module has int64" in message
        for part in ("missing: columns.bias", "unexpected: extra", "unexpected: n"):
            assert (part in message) == strict
        assert not any(value.any() for value in model.state_dict().values())


def test_without_strict_the_difference_is_returned_as_torch_does():
    model = Toy(filled=False)
    given = _full() | {"extra": torch.ones(1)}
    del given["columns.bias"]
    keys = load_model_state_dict(model, given, strict=False)
    expected = Toy(filled=False).load_state_dict(given, strict=False)
    assert keys == expected
    assert type(keys) is type(expected)
    assert torch.equal(model.norm.weight, whole("norm.weight"))
    with pytest.raises(CheckpointError, match="no name in common"):
        load_model_state_dict(model, {"other": torch.ones(1)}, strict=False)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_one_tensor_under_either_name():
    value = torch.arange(8.0).view(4, 2)
    assert list(model_state_dict(_Tied())) == ["embedding.weight"]
    for names in (["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]):
        model = _Tied()
        load_model_state_dict(model, {name: value.clone() for name in names})
        assert torch.equal(model.embedding.weight, value)
        assert model.head.weight is model.embedding.weight
    with pytest.raises(CheckpointError, match=r"embedding\.weight and head\.weight are one tensor in the module"):
        load_model_state_dict(_Tied(), {"embedding.weight": value, "head.weight": value + 1})
    with pytest.raises(CheckpointError, match=r"missing: embedding\.weight; missing: head\.weight"):
        load_model_state_dict(_Tied(), {})


def test_a_module_without_values_or_with_other_state_is_refused():
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="meta device"):
        load_model_state_dict(empty, nn.Linear(2, 2).state_dict())

    class _Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    with pytest.raises(CheckpointError, match="_extra_state"):
        model_state_dict(_Extra(1, 1))
