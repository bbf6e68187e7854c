"""A vocabulary: its padded size, checks of token ids, and an embedding whose rows are split over tensor-parallel ranks
(Shoeybi et al., 2019)."""

from __future__ import annotations

import torch
from torch import nn

from ..base.errors import ConfigError, DataError
from ..model_parallel_config import ModelParallelConfig
from .groups import Group, check_degree, group_rank, group_size, per_rank
from .initialization import Initializer, ParameterOwner, initialize_unless_deferred, mark_parameter
from .mappings import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from .weight_gradients import embedding


def pad_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Returns the smallest multiple of `multiple` that holds `vocab_size` tokens.

    It does not depend on the degrees of parallelism, so that one checkpoint fits all of them. 128 is a multiple of
    every power of two up to it as a tensor-parallel size, and keeps the logits' matrix aligned for GPU kernels.

    Raises:
        ConfigError: either number is below one.
    """
    if vocab_size < 1 or multiple < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} padded to a multiple of {multiple}: both must be positive")
    return -(-vocab_size // multiple) * multiple


def check_ids(ids: torch.Tensor, vocab_size: int, what: str, *, allowed: int | None = None) -> None:
    """Checks that ids are in the vocabulary, for tensors on the CPU, where the check costs almost nothing.

    Args:
        what: name of the ids in the message.
        allowed: one value outside of the vocabulary that is allowed.

    Raises:
        DataError: an id is below zero or beyond the vocabulary; the message names it.
    """
    # Subclasses (fake tensors, DTensors) and traced tensors have no values to check.
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < vocab_size:
        return
    outside = (ids < 0) | (ids >= vocab_size)
    if allowed is not None:
        outside &= ids != allowed
    if outside.any():
        raise DataError(
            f"{what} id {int(ids[outside][0])} is outside the vocabulary of {vocab_size} tokens "
            f"(0 to {vocab_size - 1}); use the tokenizer that the model was made for, or raise the vocabulary size"
        )


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
            return reduce_scatter_to_sequence_parallel_region(output.transpose(0, 1).contiguous(), self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={group_size(self.tp_group)}"
