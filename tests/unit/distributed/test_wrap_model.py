"""`wrap_model` takes a model and settings alone, in either order of arguments, on the ranks that there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ConfigError, ParallelConfigError, ParallelStateError
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from tests.unit._spawn import on_ranks

KINDS = {
    DistributedDataParallelConfig: DistributedDataParallel,
    FullyShardedDataParallelConfig: FullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig: TorchFullyShardedDataParallel,
}


class _RecordsReads:
    """A config whose fields are all absent, and which notes what is looked for."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.read.add(name)
        raise AttributeError(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@on_ranks(2)
def test_the_default_group_is_taken(kind: type[DistributedDataParallelConfig]) -> None:
    for arguments in ((kind(),), (None, kind()), (SimpleNamespace(), kind())):
        model = wrap_model(nn.Linear(4, 4), *arguments)
        assert type(model) is KINDS[kind] and model.process_group.size() == 2
    assert type(wrap_model(nn.Linear(4, 4), ddp_config=kind())) is KINDS[kind]
    assert type(wrap_model(nn.Linear(4, 4))) is DistributedDataParallel


@on_ranks(2)
def test_groups_of_parallel_state_decide() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert wrap_model(nn.Linear(4, 4), DistributedDataParallelConfig()).process_group.size() == 1


@on_ranks(4)
def test_instances_are_rows_of_the_default_group() -> None:
    settings = FullyShardedDataParallelConfig(num_distributed_optimizer_instances=2)
    groups = wrap_model(nn.Linear(4, 4), settings).plan.groups
    assert (groups.whole.size(), groups.shard.size(), groups.num_replicas) == (4, 2, 2)
    assert dist.get_process_group_ranks(groups.shard) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
    settings = FullyShardedDataParallelConfig(num_distributed_optimizer_instances=3)
    with pytest.raises(ParallelConfigError, match="is 3, which does not divide the 4 ranks"):
        wrap_model(nn.Linear(4, 4), settings)


def test_one_line_names_what_is_missing() -> None:
    with pytest.raises(ParallelStateError, match=r"torch\.distributed is not initialised; call .*init_process_group"):
        wrap_model(nn.Linear(4, 4), DistributedDataParallelConfig())
    split = SimpleNamespace(context_parallel_size=2)
    with pytest.raises(ParallelStateError, match=r"config\.context_parallel_size is 2; call .*initialize_model_paral"):
        wrap_model(nn.Linear(4, 4), split, DistributedDataParallelConfig())


@pytest.mark.parametrize(
    "arguments",
    [
        (nn.Linear(1, 1), SimpleNamespace()),
        (nn.Linear(1, 1), FullyShardedDataParallelConfig),
        (nn.Linear(1, 1), None, SimpleNamespace()),
        (DistributedDataParallelConfig(), nn.Linear(1, 1)),
        ("a model",),
    ],
    ids=["a model's config alone", "a class", "settings of another kind", "model second", "no model"],
)
def test_other_arguments_are_one_line(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"wrap_model was given a \w+ as the model and a \w+ as the wrapper's sett"):
        wrap_model(*arguments)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@on_ranks(1)
def test_what_is_read_of_a_config_is_said(kind: type[DistributedDataParallelConfig]) -> None:
    config = _RecordsReads()
    assert "read of the model's config: nothing, it has no field that is read" in wrap_model(
        nn.Linear(4, 4), config, kind()
    ).describe().replace("\n", " ")
    assert wrap_model.__doc__ is not None
    assert [name for name in sorted(config.read) if f"``{name}``" not in wrap_model.__doc__] == []
    read = wrap_model(nn.Linear(4, 4), SimpleNamespace(calculate_per_token_loss=True, hidden_size=4), kind())
    assert "read of the model's config: calculate_per_token_loss=True" in read.describe()


@on_ranks(1)
def test_a_models_own_config_is_read() -> None:
    model = nn.Linear(4, 4)
    model.config = SimpleNamespace(calculate_per_token_loss=True)
    assert wrap_model(model, DistributedDataParallelConfig()).plan.sums_gradients
    stranger = nn.Linear(4, 4)
    stranger.config = SimpleNamespace(bf16=True)  # of another library, where it may mean autocast
    assert wrap_model(stranger, FullyShardedDataParallelConfig()).plan.root.precision.param_dtype in (
        None,
        torch.float32,
    )
