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
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.dist_checkpointing._pieces import SHAPES, Toy, toy, whole
from tests.unit.distributed._toys import build


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


@on_ranks(2)
def test_a_full_dict_needs_no_other_rank():
    model = toy("fsdp", filled=False)
    if dist.get_rank() == 0:
        load_model_state_dict(model, _full())  # plain values need no other rank
        _check(model)


@pytest.mark.parametrize(
    ("world", "layout"), [(2, "fsdp"), (2, "tp2"), pytest.param(4, "tp2 fsdp", marks=pytest.mark.long)]
)
@on_ranks("world")
def test_sharded_dicts_fill_a_module_in_place(world, layout):
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


class _Converted(nn.Module):
    """Loads a weight that older checkpoints have under another name and a tenth of its size, and keeps its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 3))
        self.register_load_state_dict_pre_hook(self._convert)
        self.register_load_state_dict_post_hook(self._sum_up)
        self.total: torch.Tensor | None = None
        self.reported: list[str] = []

    @staticmethod
    def _convert(module: nn.Module, state_dict: dict, prefix: str, *unused: object) -> None:
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}weight"] = 10 * state_dict.pop(f"{prefix}old")

    @staticmethod
    def _sum_up(module: nn.Module, keys: tuple[list[str], list[str]]) -> None:
        module.total, module.reported = local_tensor(module.weight).sum(), list(keys[0])


def _old_checkpoint() -> dict[str, torch.Tensor]:
    return {"0.old": torch.arange(24.0).view(8, 3), "1.weight": torch.ones(2, 3), "1.bias": torch.ones(2)}


def _loads_through_hooks(kind: str) -> None:
    if kind == "plain":
        module = nn.Sequential(_Converted(), nn.Linear(3, 2))
    else:
        module = build(kind, nn.Sequential(_Converted(), nn.Linear(3, 2)), unit_classes=(nn.Linear,)).module
    given = _old_checkpoint()
    load_model_state_dict(module, given)
    weight, expected = module[0].weight, 10 * torch.arange(24.0).view(8, 3)
    mine = expected if kind == "plain" else expected.chunk(dist.get_world_size())[dist.get_rank()]
    assert torch.equal(local_tensor(weight), mine) and module[0].total == mine.sum()
    assert list(given) == ["0.old", "1.weight", "1.bias"]  # the caller's dict stays as it is
    keys = load_model_state_dict(module, {"1.bias": torch.zeros(2)}, strict=False)
    assert keys.missing_keys == ["0.weight", "1.weight"] == module[0].reported
    hook = module[1].register_load_state_dict_pre_hook(lambda *arguments: arguments[-1].append("too old"))
    with pytest.raises(CheckpointError, match=r"hooks of the module refuse the state dict, and nothing .*: too old"):
        load_model_state_dict(module, given)
    hook.remove()


def test_load_hooks_run_on_a_plain_module() -> None:
    _loads_through_hooks("plain")


def test_load_hooks_run_under_fsdp2() -> None:
    run_distributed(_loads_through_hooks, 2, "fsdp2")


class _LoadsByItself(nn.Linear):
    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments: object) -> None:
        state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_a_module_that_loads_by_itself_is_refused() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), _LoadsByItself(3, 2))
    before = module[1].weight.clone()
    with pytest.raises(CheckpointError, match=r"1 \(_LoadsByItself\) has a _load_from_state_dict of its own"):
        load_model_state_dict(module, module.state_dict())
    assert torch.equal(module[1].weight, before)
    whole_model = nn.Linear(3, 2)
    whole_model.load_state_dict = lambda *unused, **ignored: None
    with pytest.raises(CheckpointError, match=r"the module \(Linear\) has a load_state_dict of its own"):
        load_model_state_dict(whole_model, whole_model.state_dict())
    load_model_state_dict(nn.BatchNorm1d(3), nn.BatchNorm1d(3).state_dict())
