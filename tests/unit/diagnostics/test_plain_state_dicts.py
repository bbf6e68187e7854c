"""A plain state dict given to a sharded module names the function that loads it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from core.dist_checkpointing import load_model_state_dict
from core.errors import CheckpointError
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, full, loss_of, toy


def _loads() -> None:
    plain = toy(seed=2).state_dict()
    model = build("fsdp2", toy(seed=1))
    says = r"given frozen as a plain tensor of shape \[3\].*core\.dist_checkpointing\.load_model_state_dict"
    for assign in (False, True):
        with pytest.raises(CheckpointError, match=says):
            model.module.load_state_dict(plain, assign=assign)
    with pytest.raises(CheckpointError, match=r"given gain as a plain tensor"):
        model.module.blocks[0].load_state_dict(toy(seed=2).blocks[0].state_dict())
    loss_of(model, batches(0)[0])  # the last unit and the root stay gathered
    with pytest.raises(CheckpointError, match=r"core\.dist_checkpointing\.load_model_state_dict"):
        model.module.load_state_dict(plain)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=1).parameters(), strict=True))

    model.zero_grad_buffer()  # torch would take the gathered parameters of the root for those to load
    options = StateDictOptions(full_state_dict=True)  # torch's own way, which cuts what it is given first
    set_model_state_dict(model.module, toy(seed=3).state_dict(), options=options)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=3).parameters(), strict=True))
    load_model_state_dict(model.module, plain)
    model.module.load_state_dict(model.module.state_dict())  # its own shards are taken
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=2).parameters(), strict=True))


def test_a_plain_state_dict_names_the_function_that_loads_it():
    run_distributed(_loads, 2)
