"""AdamW in one pass over memory: on a GPU one compiled kernel reads and writes each tensor of an update once.

It reads gradients in any dtype, multiplies them, and writes parameters in low precision next to their masters: 28
bytes a parameter where gradients and weights are in bf16. torch's fused kernel takes one dtype, so that casts, the
multiplication and the copy of weights pass over memory too: 48 bytes. Each element's update depends on that element
alone, so that results do not depend on how a tensor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.fused import Fused

_WIDTH, _GRADIENT = 16, 1
"""The width that rows are viewed by, and the column that is not written."""


def update_in_one_pass(
    rows: Sequence[list[Tensor]], group: Mapping[str, Any], count: int, found_inf: Tensor | None, factor: Tensor | None
) -> list[list[Tensor]]:
    """Updates what a compiled kernel can update here, and returns the other rows.

    Args:
        rows: parameter, gradient, both moments, and where there is one the weight in low precision. On one device.
        group: the settings of the update.
        count: of the step, from 1.
        found_inf: see `SkippableRule`.
        factor: see `SkippableRule`.
    """
    device = rows[0][0].device
    if not _adamw.compiles_on(device):
        return list(rows)
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    parts: list[Tensor | float] = [
        *(0.0 if found_inf is None else found_inf, 1.0 if factor is None else factor),
        *(1.0 - lr * group["weight_decay"], lr / (1.0 - beta1**count), math.sqrt(1.0 - beta2**count)),
        *(1.0 - beta1, beta2, 1.0 - beta2, group["eps"]),
    ]
    numbers = torch.stack(  # of fills, which do not wait for the device
        [
            part.to(device, torch.float64)
            if isinstance(part, Tensor)
            else torch.full((), part, dtype=torch.float64, device=device)
            for part in parts
        ]
    )
    left = []
    for row in rows:
        if not _adamw.compiles_on(device):
            left.append(row)
            continue
        # A width that is known lets kernels read whole words. One row would be a function of its own.
        has_rows = row[0].numel() % _WIDTH == 0 and row[0].numel() > _WIDTH
        shape = (-1, _WIDTH) if has_rows else (-1,)
        whole = [tensor.contiguous() for tensor in row]
        param, grad, exp_avg, exp_avg_sq, *weight = [tensor.view(shape) for tensor in whole]
        _adamw(param, grad, exp_avg, exp_avg_sq, numbers, *weight)
        for index, tensor in enumerate(row):
            if index != _GRADIENT and tensor is not whole[index]:
                tensor.copy_(whole[index])
    return left


@Fused
def _adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: Tensor, weight: Tensor | None = None
) -> None:
    """Makes AdamW's step, with the operations of torch's fused kernel.

    Args:
        numbers: `[9]` in double, so that a new learning rate is no new function: whether to skip the update, the
            gradients' factor, what decay leaves, the learning rate over the first bias correction, the root of the
            second one, ``1 - beta1``, ``beta2``, ``1 - beta2``, and epsilon.
    """
    is_skipped, factor, left, step_size, root, one_less_beta1, beta2, one_less_beta2, eps = numbers.to(
        param.dtype
    ).unbind()
    gradient = grad.to(param.dtype) * factor
    first = torch.lerp(exp_avg, gradient, one_less_beta1)
    second = exp_avg_sq * beta2 + one_less_beta2 * gradient * gradient
    updated = param * left - step_size * first / (second.sqrt() / root + eps)
    for tensor, value in ((exp_avg, first), (exp_avg_sq, second), (param, updated)):
        tensor.copy_(torch.where(is_skipped > 0.0, tensor, value))
    if weight is not None:
        weight.copy_(param)
