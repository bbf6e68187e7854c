"""A wrapper asks every guard of the list at each moment."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from core.base.errors import WrapError
from core.distributed import data_parallel_base, finalize_model_grads
from core.distributed.guards import GUARDS, Guard, PlainModel
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import WRAPPERS, batches, build, loss_of, toy

MOMENTS = [name for name in vars(Guard) if not name.startswith("_")]
BEFORE_A_STEP = {"on_gradients", "before_reduction", "before_step"}


def _recorder(moments: list[str]) -> type[Guard]:
    def note(name: str) -> Any:
        return lambda self, *args, **kwargs: moments.append(name)

    return type("Recorder", (Guard,), {name: note(name) for name in MOMENTS})


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(1)
def test_a_guard_in_the_list_is_asked_at_each_moment(kind: str) -> None:
    moments: list[str] = []
    with mock.patch.object(data_parallel_base, "GUARDS", (*GUARDS, _recorder(moments))):
        model = build(kind, toy())
    assert moments == ["at_wrap", "at_plan", "once_wrapped"]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    loss_of(model, batches(0)[0]).backward()
    finalize_model_grads([model])
    model.check_step("SGD")
    assert set(moments[3:]) == BEFORE_A_STEP and moments[-1] == "before_step"
    with (
        mock.patch.object(model.engine.gradients, "finish", side_effect=RuntimeError("shapes")),
        pytest.raises(RuntimeError, match="shapes"),
    ):
        model.finish_grad_sync()
    assert moments[-1] == "on_failure"
    num_moments = len(moments)
    if kind == "fsdp2" or model.plan.is_replicated:
        optimizer.step()
        assert moments[num_moments:] == ["before_step"]


@on_ranks(1)
def test_a_guard_refuses_before_the_model_is_changed() -> None:
    class Refuses(Guard):
        def at_wrap(self, model: PlainModel) -> None:
            raise WrapError("no")

    module = toy()
    before = [(name, type(value), value.data_ptr()) for name, value in module.named_parameters()]
    for kind in WRAPPERS:
        with mock.patch.object(data_parallel_base, "GUARDS", (*GUARDS, Refuses)), pytest.raises(WrapError, match="no"):
            build(kind, module)
    assert [(name, type(value), value.data_ptr()) for name, value in module.named_parameters()] == before


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(1)
def test_every_guard_reads_all_gradients(kind: str) -> None:
    names: dict[int, list[str]] = {}

    class Reads(Guard):
        def on_gradients(self, gradients: Any, are_reduced: bool) -> None:
            names.setdefault(id(self), []).extend(name for name, _ in gradients)

    with mock.patch.object(data_parallel_base, "GUARDS", (Reads, *GUARDS, Reads)):
        model = build(kind, toy())
    loss_of(model, batches(0)[0]).backward()
    finalize_model_grads([model])
    first, second = names.values()
    assert first == second and len(first) > 1
