"""Scenarios of models and wrappers that are saved or copied whole."""

from __future__ import annotations

import copy
import io

import torch

from tests.unit.distributed import _toys
from tests.unit.distributed._toys import build, loss_of
from tests.unit.distributed.outside_the_loop.scenario import HIDDEN, KINDS, Run, batch, for_kinds, scenario


@scenario(raises=HIDDEN)
def the_model_inside_is_saved_and_trained_again(run: Run) -> None:
    run.train(2)
    if not run.is_plain and isinstance(run.model.ddp_config, _toys.TorchFullyShardedDataParallelConfig):
        return
    file = io.BytesIO()
    torch.save(run.inner, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(hasattr(p, "main_grad") or hasattr(p, "has_buffer") for p in loaded.parameters())
    assert loaded.embedding.weight.partition_dim == 0
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, run.inner.state_dict()[name]), name
    if not run.is_plain:
        build("zero1", loaded)
        loss_of(loaded, batch(0, 0)).backward()


@scenario(raises=for_kinds(KINDS, "cannot be copied or pickled"))
def the_wrapper_is_saved(run: Run) -> None:
    torch.save(run.model, io.BytesIO())


@scenario(raises={"fsdp2": "deepcopy|copied|pickle", **HIDDEN})
def an_average_is_a_copy_of_the_model_inside(run: Run) -> None:
    average = copy.deepcopy(run.inner)
    for step in range(2):
        run.train(1, first=step)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), run.inner.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    run.inner.load_state_dict(average.state_dict())
