"""Detects parameters that were moved, replaced, added or removed after the model was wrapped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...errors import WrapError


class ParamPlacement:
    """Remembers the memory of each parameter at wrapping, and compares it later.

    Args:
        params: names and parameters.
    """

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        # Name, address and dtype of each; fixed, because buffers never move their parameters.
        self._places: dict[nn.Parameter, tuple[str, int, torch.dtype]] = {
            param: (name, param.data_ptr(), param.dtype) for name, param in params
        }

    def check(self, module: nn.Module) -> None:
        """Compares the module's parameters with those at wrapping.

        Raises:
            WrapError: a parameter was moved, replaced, added, removed or made trainable since.
        """
        missing = dict(self._places)
        for name, param in module.named_parameters():
            place = missing.pop(param, None)
            if place is None:
                if param.requires_grad:
                    raise WrapError(
                        f"parameter {name} was replaced, added or made trainable after the model was wrapped, so that "
                        "its gradient is never reduced; wrap the finished model"
                    )
            elif place[1:] != (param.data_ptr(), param.dtype):
                raise WrapError(
                    f"the storage of parameter {name} was replaced after the model was wrapped (a move to another "
                    "device or dtype, or a load with assign=True); wrap it afterwards, or load in place"
                )
        for name, _, _ in missing.values():
            raise WrapError(f"parameter {name} was removed after the model was wrapped; wrap the finished model")
