"""An embedding whose rows are split over tensor-parallel ranks (Shoeybi et al., 2019)."""

from __future__ import annotations

import torch
from torch import nn

from ..model_parallel_config import ModelParallelConfig
from .degrees import check_degree, per_rank
from .groups import Group, group_rank, group_size
from .initialization import Initializer, ParameterOwner, initialize_unless_deferred
from .mappings import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from .vocab import check_ids
from .weight_gradients import embedding


class VocabParallelEmbedding(ParameterOwner):
    """A table split by rows of consecutive tokens, `[num_embeddings / tp, embedding_dim]` on each rank.

    Args:
        num_embeddings: rows over all ranks; see :func:`~core.tensor_parallel.pad_vocab_size`.
        init_method: fills the whole table.
        reduce_scatter_embeddings: return this rank's part of the sequence, `[s / tp, b, h]`, instead of `[b, s, h]`.
        tp_group: default is that of `core.parallel_state`.

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
        super().__init__(tp_group)
        check_degree(config, self.tp_group)
        self.config = config
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        rows = per_rank(num_embeddings, self.tp_group, "vocabulary (num_embeddings) of a VocabParallelEmbedding")
        self.vocab_start_index = rows * group_rank(self.tp_group)
        self.vocab_end_index = self.vocab_start_index + rows
        self.add_parameter("weight", (rows, embedding_dim), init_method, config=config, partition_dim=0)
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
            return reduce_scatter_to_sequence_parallel_region(output.transpose(0, 1).contiguous(), self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={group_size(self.tp_group)}"
