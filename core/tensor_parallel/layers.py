"""Linear layers and embeddings split over tensor-parallel ranks (Shoeybi et al., 2019).

A column-parallel layer followed by a row-parallel one needs one all-reduce in forward and one in backward. With
sequence parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al., 2022), and layers between
such pairs have only a part of the sequence.

Activations are `[s, b, h]`. With one rank in the group the layers call torch's own functions. If a data-parallel
wrapper lends memory for a weight's gradient, it is computed there (`weight_gradients`).
"""

from __future__ import annotations

import torch
from torch import nn

from ..base.errors import ConfigError, ParallelConfigError
from ..base.initialization import Initializer
from ..base.megatron_names import absent_names, checks_arguments
from ..model_parallel_config import ModelParallelConfig
from . import mappings
from .groups import Group, check_degrees, check_ids, group_rank, group_size, per_rank
from .initialization import ParameterOwner, initialize_unless_deferred, mark_parameter
from .weight_gradients import TORCH, Arithmetic, embedding, linear

Output = tuple[torch.Tensor, torch.Tensor | None]


class _ParallelLayer(ParameterOwner):
    """Has the config that it was built by, and a tensor-parallel group of as many ranks as the config says.

    A config of 1, the default, takes any group, because Megatron-LM's scripts may leave the degree out: layers are
    split over their group in any case.

    Attributes:
        arithmetic: how products are computed; `shardstack.fp8.use_fp8_products` sets it.
    """

    arithmetic: Arithmetic = TORCH

    def __init__(self, config: ModelParallelConfig, tp_group: Group) -> None:
        super().__init__(tp_group)
        self.config = config
        if config.tensor_model_parallel_size != 1:
            check_degrees(config, tensor_model_parallel_size=group_size(self.tp_group))


class ColumnParallelLinear(_ParallelLayer):
    """`y = x A^T + b` with split output features: each rank has `A` `[output_size / tp, input_size]`.

    The backward overlaps the input gradient's all-reduce (or reduce-scatter) with the weight gradient's product.

    Args:
        input_size: features of the input, which is replicated, or with `config.sequence_parallel` split along the
            sequence.
        output_size: features of the output over all ranks.
        init_method: fills the whole `[output_size, input_size]` weight; biases start at zero.
        gather_output: return all output features on every rank instead of its own.
        skip_bias_add: return the bias next to the output, for a caller that fuses the addition.
        skip_weight_param_allocation: own no weight; pass one to each forward.
        tp_group: default is that of `shardstack.parallel_state`.
        stride, keep_master_weight_for_test, embedding_activation_buffer, grad_output_buffer, is_expert,
            disable_grad_reduce: Megatron-LM's arguments; refused unless at their defaults.
        tp_comm_buffer_name: Megatron-LM's argument; ignored.

    Raises:
        ParallelConfigError: tp does not divide `output_size`, or is not the group's size; or an argument is refused.
    """

    is_unit = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @checks_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_group: Group = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.output_size_per_partition = per_rank(output_size, self.tp_group, "output_size of a ColumnParallelLinear")
        self.sequence_parallel = config.sequence_parallel
        rows = self.output_size_per_partition
        self.borrows_shared_weight = skip_weight_param_allocation
        shape = None if skip_weight_param_allocation else (rows, input_size)
        self.add_parameter("weight", shape, init_method, config=config, partition_dim=0)
        self.add_parameter("bias", (rows,) if bias else None, nn.init.zeros_, config=config, partition_dim=0)
        initialize_unless_deferred(self, config)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Output:
        """Maps `[s, b, input_size]` to `[s, b, output_size / tp]` (whole with `gather_output`), and the bias if
        skipped.

        With sequence parallelism the input is `[s / tp, b, input_size]`.

        Args:
            weight: `[output_size / tp, input_size]`, used instead of the layer's own.
            runtime_gather_output: replaces `gather_output` in this call.

        Raises:
            ConfigError: there is no weight, or it has another shape.
        """
        weight = self.weight if weight is None else weight
        if weight is None:
            raise ConfigError(
                "this ColumnParallelLinear was built with skip_weight_param_allocation and owns no weight; "
                "pass one: forward(input_, weight=...)"
            )
        shape = (self.output_size_per_partition, self.input_size)
        if weight.shape != shape:
            raise ConfigError(f"the weight given to a ColumnParallelLinear is {tuple(weight.shape)}, not {shape}")
        bias = None if self.skip_bias_add else self.bias
        output = mappings.column_parallel_linear(
            input_, weight, bias, self.tp_group, self.sequence_parallel, self.arithmetic
        )
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers and group_size(self.tp_group) > 1:
            output = mappings.gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={group_size(self.tp_group)}"


class RowParallelLinear(_ParallelLayer):
    """`y = x A^T + b` with split input features: each rank has `A` `[output_size, input_size / tp]`.

    The ranks' products are summed by an all-reduce, or with `config.sequence_parallel` by a reduce-scatter over the
    sequence; the replicated bias is added after that.

    Args:
        input_size: features of the input over all ranks.
        output_size: features of the output.
        init_method: fills the whole `[output_size, input_size]` weight; biases start at zero.
        input_is_parallel: the input is already split, as the output of a column-parallel layer.
        skip_bias_add: return the bias next to the output, for a caller that fuses the addition.
        tp_group: default is that of `shardstack.parallel_state`.
        stride, keep_master_weight_for_test, is_expert, tp_comm_buffer_name: see `ColumnParallelLinear`.

    Raises:
        ParallelConfigError: tp does not divide `input_size`, or is not the group's size; a whole input is combined
            with sequence parallelism, whose inputs are parts of the sequence; or an argument is refused.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @checks_arguments
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_group: Group = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.input_size_per_partition = per_rank(input_size, self.tp_group, "input_size of a RowParallelLinear")
        self.sequence_parallel = config.sequence_parallel
        if self.sequence_parallel and not input_is_parallel:
            raise ParallelConfigError(
                "RowParallelLinear(input_is_parallel=False) cannot be used with sequence_parallel; "
                "give it the output of a ColumnParallelLinear, or turn sequence_parallel off"
            )
        shape = (output_size, self.input_size_per_partition)
        self.add_parameter("weight", shape, init_method, config=config, partition_dim=1)
        partial, shape_of_bias = config.sequence_parallel, (output_size,) if bias else None
        self.add_parameter("bias", shape_of_bias, nn.init.zeros_, config=config, sequence_parallel=partial)
        initialize_unless_deferred(self, config)

    def forward(self, input_: torch.Tensor) -> Output:
        """Maps `[s, b, input_size / tp]` (whole without `input_is_parallel`) to `[s, b, output_size]`, and a
        skipped bias.

        With sequence parallelism the output is `[s / tp, b, output_size]`.
        """
        bias = None if self.skip_bias_add else self.bias
        separate_bias = self.bias if self.skip_bias_add else None
        if group_size(self.tp_group) == 1:
            return linear(input_, self.weight, bias, self.arithmetic), separate_bias
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        partial = linear(input_, self.weight, None, self.arithmetic)  # [s, b, output_size], this rank's addend
        if self.sequence_parallel:
            output = mappings.reduce_scatter_to_sequence_parallel_region(partial, self.tp_group)
        else:
            output = mappings.reduce_from_tensor_model_parallel_region(partial, self.tp_group)
        return output if bias is None else output + bias, separate_bias

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, tp={group_size(self.tp_group)}"


class VocabParallelEmbedding(_ParallelLayer):
    """A table split by rows of consecutive tokens, `[num_embeddings / tp, embedding_dim]` on each rank.

    Args:
        num_embeddings: rows over all ranks; see :func:`~shardstack.tensor_parallel.pad_vocab_size`.
        init_method: fills the whole table.
        reduce_scatter_embeddings: return this rank's part of the sequence, `[s / tp, b, h]`, instead of `[b, s, h]`.
        tp_group: default is that of `shardstack.parallel_state`.

    Raises:
        ParallelConfigError: tp does not divide `num_embeddings`, or is not the group's size.

    Attributes:
        adds_gradient_rows: add only the rows in use to ``weight.grad``; set by a wrapper that accumulates there.
    """

    weight: nn.Parameter
    adds_gradient_rows = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        reduce_scatter_embeddings: bool = False,
        tp_group: Group = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        rows = per_rank(num_embeddings, self.tp_group, "vocabulary (num_embeddings) of a VocabParallelEmbedding")
        self.vocab_start_index = rows * group_rank(self.tp_group)
        self.vocab_end_index = self.vocab_start_index + rows
        self.add_parameter("weight", (rows, embedding_dim), init_method, config=config, partition_dim=0)
        mark_parameter(self, is_embedding_or_output_parameter=True)
        initialize_unless_deferred(self, config)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Maps ids `[b, s]` to `[b, s, h]`, or to `[s / tp, b, h]` with `reduce_scatter_embeddings`.

        Raises:
            DataError: an id is outside of the vocabulary. Not checked on a GPU, where the check would synchronize:
                torch's kernel asserts there, and under tensor parallelism the token's embedding is zero.
        """
        check_ids(input_, self.num_embeddings, "token")
        if group_size(self.tp_group) == 1:
            whole = embedding(input_, self.weight, self.adds_gradient_rows)
            return whole.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else whole
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill_(elsewhere, 0)
        output = embedding(local, self.weight, self.adds_gradient_rows).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:  # [s, b, h], to split dim 0
            return mappings.reduce_scatter_to_sequence_parallel_region(
                output.transpose(0, 1).contiguous(), self.tp_group
            )
        return mappings.reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={group_size(self.tp_group)}"


__getattr__ = absent_names(__package__)
