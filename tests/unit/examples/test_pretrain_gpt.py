"""What the training example does before the first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from core import parallel_state
from tests.functional._program import load_program
from tests.unit._spawn import run_distributed
from tests.unit.training._configs import small_config


def _dtypes_that_were_moved() -> list[str]:
    parallel_state.initialize_model_parallel()
    moved: set[str] = set()
    to = nn.Module.to

    def note(module: nn.Module, *args: Any) -> nn.Module:
        moved.update(str(parameter.dtype) for parameter in module.parameters())
        return to(module, *args)

    with mock.patch.object(nn.Module, "to", note):
        load_program("pretrain_gpt").build_model(small_config(bf16=True), 128)
    return sorted(moved)


def test_a_model_in_low_precision_is_cast_before_it_moves_to_its_device() -> None:
    assert run_distributed(_dtypes_that_were_moved, 1) == [[str(torch.bfloat16)]]
