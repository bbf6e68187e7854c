"""The experts of a layer, as one parameter for each matrix: `[experts, out, in]`. Those that take every token.

Experts of stock models are cut over ranks: transformers 5 has one module for all experts of a layer, with
`num_experts` and parameters `[experts, ...]`. It maps tokens, the experts of each and their weights to outputs
(Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and others).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import parallel_state
from ...base.dtypes import LOW_PRECISION
from ...base.errors import ParallelConfigError, WrapError
from ...base.initialization import Initializer, call_initializer
from ...tensor_parallel.groups import expert_tensor_group, group_rank, group_size, per_rank, resolve_group
from ...tensor_parallel.initialization import ParameterOwner, initialize_unless_deferred, mark_parameter
from ...tensor_parallel.weight_gradients import linear
from ..mlp import GATE_AND_UP, MLP, activate
from ..module import MegatronModule
from ..moe_config import MoEConfig
from ..transformer_config import TransformerConfig, activation_function
from .dispatch import Permutation, dispatch

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16  # of each row of a matrix that `grouped_mm` takes
_SEED_BOUND = 2**63


@dataclass(frozen=True)
class EachExpert:
    """Fills `[experts, out, in]` one expert after the other, each from a seed of its own: an expert's values do not
    depend on how many there are, and a function that reads the shape reads that of one matrix."""

    initializer: Initializer

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        """Fills in place. The generator gives the first seed."""
        for index, matrix in enumerate(whole):
            call_initializer(self.initializer, matrix, (generator.initial_seed() + index) % _SEED_BOUND)


class GroupedLinear(ParameterOwner):
    """`y = x A_e^T + b_e` for rows sorted by expert, with `A` `[experts, out, in]`, those of this rank.

    Args:
        partition_dim: dim of `A` that is split over experts' tensor-parallel ranks: 1, out, as in
            `ColumnParallelLinear`; or 2, in, as in `RowParallelLinear`, whose results are partial sums.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Initializer,
        partition_dim: int,
    ) -> None:
        super().__init__(expert_tensor_group())
        if parallel_state.experts_are_apart():
            self.ep_group = parallel_state.get_expert_model_parallel_group()
        experts = (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        self.splits_output = partition_dim == 1
        split_size = output_size if self.splits_output else input_size
        size = per_rank(split_size, self.tp_group, "ffn_hidden_size of an expert", "expert_tensor_parallel_size")
        rows, columns = (size, input_size) if self.splits_output else (output_size, size)
        options: dict[str, Any] = {"config": config, "is_expert": parallel_state.experts_are_apart()}
        shape_of_weight, fill = (experts, rows, columns), EachExpert(init_method)
        self.add_parameter("weight", shape_of_weight, fill, partition_dim=partition_dim, **options)
        shape, split_dim = (experts, rows) if config.add_bias_linear else None, 1 if self.splits_output else None
        self.add_parameter("bias", shape, nn.init.zeros_, partition_dim=split_dim, **options)
        self._multiply = _PRODUCTS[config.moe_grouped_gemm]
        initialize_unless_deferred(self, config)

    def forward(self, rows: Tensor, permutation: Permutation) -> Tensor:
        """Maps `[rows, in]` to `[rows, out]`. Dropped rows become zero, but for the bias."""
        output = self._multiply(rows, self.weight, permutation)
        if self.bias is None:
            return output
        ranks = group_size(self.tp_group)
        bias: Tensor = self.bias
        if not self.splits_output and ranks > 1:
            # Each rank adds its share of the bias to its partial sum. All have the gradient of the sum, so that the
            # whole gradient of the bias needs no communication.
            bias = bias / ranks
            if bias.requires_grad:
                bias.register_hook(lambda grad: grad * ranks)
        return output + rows_of_experts(bias, permutation.row_experts, output.dtype)


class GroupedMLP(MegatronModule):
    """The MLPs of all experts, each as `shardstack.transformer.mlp.MLP`: rows of gate and up alternate, g0 u0 g1 u1
    ..."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.activation = activation_function(config.activation_func)
        self.is_gated = config.gated_linear_unit
        width, inner = config.hidden_size, config.expert_ffn_size
        self.linear_fc1 = GroupedLinear(
            width, inner * (2 if self.is_gated else 1), config=config, init_method=config.init_method, partition_dim=1
        )
        if self.is_gated:
            mark_parameter(self.linear_fc1, fused_rows=GATE_AND_UP)
        self.linear_fc2 = GroupedLinear(
            inner, width, config=config, init_method=config.output_layer_init_method, partition_dim=2
        )

    def forward(self, rows: Tensor, permutation: Permutation) -> Tensor:
        """Maps `[rows, h]`, sorted by expert, to `[rows, h]`: this tensor-parallel rank's partial sums."""
        hidden = self.linear_fc1(rows, permutation)  # [rows, ffn / tp], twice that when gated
        output: Tensor = self.linear_fc2(activate(hidden, self.activation, self.is_gated), permutation)
        return output


class SharedExpertMLP(MLP, ParameterOwner):
    """An MLP of `moe_shared_expert_intermediate_size`, multiplied by sigmoid(x g^T) with `moe_shared_expert_gate`."""

    gate_weight: torch.nn.Parameter | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
        shape, partial = (1, config.hidden_size) if config.moe_shared_expert_gate else None, config.sequence_parallel
        self.add_parameter("gate_weight", shape, config.init_method, config=config, sequence_parallel=partial)
        mark_parameter(self, "gate_weight", use_muon=False)
        initialize_unless_deferred(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`. With sequence parallelism both are this rank's `[s / tp, b, h]`."""
        output = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        return output * linear(hidden_states, self.gate_weight).sigmoid()


def cut_experts(model: nn.Module) -> nn.Module:
    """Leaves each expert-parallel rank its part of a model's experts, in place. Call it before `wrap_model`.

    Parameters keep their names. Dispatches tokens by ``alltoall``, so that ranks may have micro-batches of any shapes.
    Outputs and gradients equal those of all experts on each rank up to rounding. With one expert-parallel rank nothing
    changes.

    Args:
        model: a model of transformers 5, not wrapped yet, with equal values on all ranks.

    Returns:
        the model.

    Raises:
        WrapError: no module has experts as 3-D parameters.
        ParallelConfigError: ranks do not divide the experts, or the ranks that share experts' matrices are not the
            tensor-parallel ones.
    """
    group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    modules = {name: module for name, module in model.named_modules() if _has_stacked_experts(module)}
    if not modules:
        raise WrapError(
            f"{type(model).__name__} has no module with num_experts and 3-D parameters of experts, as transformers 5 "
            "builds them; call cut_experts on such a model, before it is wrapped"
        )
    if expert_tensor_group() is not resolve_group(None):
        raise ParallelConfigError(
            "experts of a stock model have no tensor-parallel ranks of their own; drop expert_tensor_parallel_size"
        )
    ranks, rank = group_size(group), group_rank(group)
    for name, module in modules.items():
        if module.num_experts % ranks:
            raise ParallelConfigError(
                f"{name} has {module.num_experts} experts, which expert_model_parallel_size {ranks} does not divide; "
                "take a divisor"
            )
    for module in modules.values() if ranks > 1 else ():
        _cut(module, ranks, rank)
    return model


def rows_of_experts(vectors: Tensor, row_experts: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns each row's vector, `[experts, n]` to `[rows, n]` in `dtype`. The gradient of a vector is the sum of its
    rows', rounded once, with the same bits each time: `index_select` adds on a GPU in the dtype of the vectors, in any
    order.
    """
    output: Tensor = _RowsOfExperts.apply(vectors, row_experts, dtype)
    return output


class _RowsOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, row_experts: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(row_experts)
        ctx.num_experts, ctx.dtype = len(vectors), vectors.dtype
        return vectors.index_select(0, row_experts).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_experts,) = ctx.saved_tensors
        # Products with ones are exact in fp32, in TF32 too, of numbers in low precision; others need fp64.
        wide = torch.float32 if grad.dtype in LOW_PRECISION else torch.float64
        with torch.autocast(grad.device.type, enabled=False):
            is_row_of = torch.stack([row_experts == expert for expert in range(ctx.num_experts)]).to(wide)
            return (is_row_of @ grad.to(wide)).to(ctx.dtype), None, None


def looped_matmul(rows: Tensor, weight: Tensor, permutation: Permutation) -> Tensor:
    """Multiplies each expert's rows `[rows, in]` by its matrix of `[experts, out, in]`. The host waits for the
    device."""
    ends = permutation.host_ends
    parts = [
        F.linear(rows[begin:end], matrix)
        for begin, end, matrix in zip([0, *ends], ends, weight.unbind(0), strict=False)
    ]
    if permutation.has_dropped:
        parts.append(parts[0].new_zeros(len(rows) - ends[-1], weight.shape[1]))
    return torch.cat(parts)


def grouped_matmul(rows: Tensor, weight: Tensor, permutation: Permutation) -> Tensor:
    """Computes :func:`looped_matmul` in one call. Falls back to it where torch has no call for it.

    Nothing waits in bf16 on GPUs of capability 9.0 and later. In fp32 and fp16, and on older ones, torch's own loop
    reads the ends for each expert, forward and backward.
    """
    if not _has_grouped_kernel(rows, weight):
        return looped_matmul(rows, weight, permutation)
    # torch computes nothing past the last end, neither in forward nor of the input's gradient: what was in memory
    # stays there, NaN included. Filling, unlike multiplying by zero, removes it, and in backward that of the gradient.
    is_dropped = permutation.dropped_rows if permutation.has_dropped else None
    if is_dropped is not None:
        rows = rows.masked_fill(is_dropped, 0.0)
    output = F.grouped_mm(rows, weight.transpose(-2, -1), offs=permutation.ends)
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)  # its backward refuses an expanded gradient
    return output if is_dropped is None else output.masked_fill(is_dropped, 0.0)


def grouped_where_fast(rows: Tensor, weight: Tensor, permutation: Permutation) -> Tensor:
    """Computes :func:`grouped_matmul` where torch has a kernel of its own for it, and else :func:`looped_matmul`."""
    has_kernel = rows.is_cuda and rows.dtype == torch.bfloat16 and _capability(rows.device) >= (9, 0)
    return (grouped_matmul if has_kernel else looped_matmul)(rows, weight, permutation)


_PRODUCTS = {True: grouped_matmul, False: looped_matmul, None: grouped_where_fast}
"""By `moe_grouped_gemm`."""


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    is_aligned = all(size * rows.element_size() % _STRIDE_BYTES == 0 for size in weight.shape[1:])
    casts = rows.dtype != weight.dtype or torch.is_autocast_enabled(rows.device.type)  # which grouped_mm does not
    if rows.dtype not in _GROUPED_DTYPES or casts or not is_aligned:
        return False
    return rows.device.type == "cpu" or _capability(rows.device) >= (8, 0)


def _has_stacked_experts(module: nn.Module) -> bool:
    experts = getattr(module, "num_experts", None)
    own = [*module.parameters(recurse=False)]
    return (
        any(p.ndim == 3 for p in own) and all(len(p) == experts for p in own) and not isinstance(module, _CutExperts)
    )


def _cut(module: Any, ranks: int, rank: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        part = parameter.detach().chunk(ranks)[rank].clone()  # a copy, so that the rest is freed
        replacement = nn.Parameter(part, parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__, allreduce=False, expert_model_parallel=True)
        setattr(module, name, replacement)
    module.experts_config = MoEConfig(num_moe_experts=module.num_experts, moe_token_dispatcher_type="alltoall")
    module.num_experts //= ranks
    kind = type(module)
    module.__class__ = type(f"Cut{kind.__name__}", (_CutExperts, kind), {})


class _CutExperts:
    """Goes in front of the class of a module that `cut_experts` has cut."""

    # Both are set by `_cut` and fixed: of all ranks' experts, and the number of this rank's.
    experts_config: MoEConfig
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Maps `[tokens, h]`, and `[tokens, k]` experts of all ranks with their weights, to `[tokens, h]`."""
        compute: Callable[..., Tensor] = super().forward  # type: ignore[misc]

        def of_rank(rows: Tensor, permutation: Permutation) -> Tensor:
            if not len(rows):  # the module would return a tensor without a graph, and other ranks wait in backward
                own: list[Tensor] = [*self.parameters(recurse=False)]  # type: ignore[attr-defined]
                return rows + torch.cat([parameter.flatten()[:0] for parameter in own]).sum()
            return compute(rows, permutation.row_experts.unsqueeze(1), rows.new_ones(len(rows), 1))

        return dispatch(hidden_states, top_k_weights, top_k_index, of_rank, self.experts_config)
