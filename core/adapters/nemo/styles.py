"""Hugging Face's names of tensor-parallel styles, as torch's `ParallelStyle`s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ...errors import ParallelConfigError
from ...text import choices

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence_parallel": SequenceParallel,
    # transformers 4.5x: `_rep` has a replicated end where the plain style has a sharded one
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    # transformers 5.x
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "all_reduce": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: ReplicatedWithGradAllReduce(),
    "replicate": lambda: Untouched(),
}

_WITHOUT_COUNTERPART = (
    "packed_colwise",
    "packed_rowwise",
    "local",
    "local_colwise",
    "local_rowwise",
    "local_packed_rowwise",
    "local_params",
    "gather",
    "isolate",
    "grouped_gemm",
    "moe_tp_experts",
    "moe_identity_expert",
    "ep_router",
    "ep_dispatch_experts",
    "mla_kv_a_proj",
)
"""Styles of transformers that cut fused weights, or experts, in ways that torch's styles do not know."""


@functools.cache
def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Returns torch's style for one of Hugging Face's names; the same object each time.

    Raises:
        ParallelConfigError: (a ValueError) an unknown name, listing the known ones; or one that torch has no means
            for.
    """
    if style in _STYLES:
        return _STYLES[style]()
    if style in _WITHOUT_COUNTERPART:
        raise ParallelConfigError(
            f"the tensor-parallel style {style!r} of transformers has no counterpart among torch's styles; leave its "
            "modules out of the plan, or shard this model without tensor parallelism"
        )
    raise ParallelConfigError(f"unknown tensor-parallel style {style!r}; {choices(str(style), _STYLES)}")


class ReplicatedWithGradAllReduce(ParallelStyle):
    """Replicates a module's parameters; ranks use them on their own part of the activations, as Qwen3's q_norm.

    Inputs and outputs are plain, and stay as they are. The gradients of its parameters are sums over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
                owner.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        forward = module.forward

        @functools.wraps(forward)
        def computed_on_a_part(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module):
                return forward(*args, **kwargs)

        module.forward = computed_on_a_part  # on the instance; never restored
        return module


class Untouched(ParallelStyle):
    """Leaves a module whole on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Replaces the module's DTensor parameters by local tensors inside, and puts them back on exit.

    Each rank's gradient is then one addend of the sum over ranks (`Partial`).
    """
    owners = [(owner, dict(owner._parameters)) for owner in module.modules()]
    for owner, parameters in owners:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                owner._parameters[name] = parameter.to_local(grad_placements=[Partial()])
    try:
        yield
    finally:
        for owner, parameters in owners:
            owner._parameters.update(parameters)
