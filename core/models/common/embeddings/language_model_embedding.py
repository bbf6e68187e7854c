"""Embeds token ids into the first hidden states."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....base.errors import DataError
from ....base.megatron_names import checks_arguments, refuse
from ....parallel_state import check_same_groups
from ....process_groups_config import ProcessGroupCollection
from ....tensor_parallel.groups import Group
from ....tensor_parallel.initialization import ParameterOwner, initialize_unless_deferred, mark_parameter
from ....tensor_parallel.layers import VocabParallelEmbedding
from ....tensor_parallel.mappings import scatter_to_sequence_parallel_region
from ....transformer.module import MegatronModule
from ....transformer.transformer_config import TransformerConfig
from ....transformer.transformer_layer import hidden_dropout

PositionEmbeddingType = Literal["rope", "learned_absolute"]


class PositionEmbedding(ParameterOwner):
    """A learned vector for each position, whole on every rank."""

    weight: nn.Parameter

    def __init__(self, config: TransformerConfig, max_sequence_length: int) -> None:
        super().__init__()
        shape = (max_sequence_length, config.hidden_size)
        self.add_parameter("weight", shape, config.embedding_init_method, config=config)
        mark_parameter(self, is_embedding_or_output_parameter=True)
        initialize_unless_deferred(self, config)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Maps positions `[s, b or 1]` to `[s, b or 1, h]`.

        Raises:
            DataError: a position beyond the table. On a GPU torch's kernel asserts.
        """
        try:
            return F.embedding(position_ids, self.weight)
        except IndexError as error:
            raise DataError(
                f"position_ids has positions outside 0 to {self.weight.shape[0] - 1}, the model's "
                "max_sequence_length; build the model for longer sequences"
            ) from error


class LanguageModelEmbedding(MegatronModule):
    """Word embeddings with the vocabulary split over tensor-parallel ranks, optional learned positions, dropout.

    Args:
        position_embedding_type: "learned_absolute" adds a table of positions; "rope" none.
        num_tokentypes, scatter_to_sequence_parallel: Megatron-LM's arguments; refused unless at their defaults.
        tp_group: the tensor-parallel group of `shardstack.parallel_state`.

    Raises:
        ConfigError: the config leaves a size at 0.
        ParallelConfigError: another group is given, or an argument is refused.
    """

    is_unit = True
    weights_used_in_backward = False
    """Read by fully sharded wrappers: the backward of a look-up needs ids only, so that the table may be resharded."""

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        tp_group: Group = None,
    ) -> None:
        check_same_groups("LanguageModelEmbedding", ProcessGroupCollection(tp=tp_group), ("tp",))
        config.check_sizes_given("num_layers", "hidden_size")
        super().__init__(config)
        has_positions = position_embedding_type == "learned_absolute"
        # Positions are added before the sequence is split; without them the reduce-scatter of the look-up splits it.
        self.scatters_sequence = config.sequence_parallel and has_positions
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            config=config,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel and not has_positions,
        )
        self.position_embeddings = PositionEmbedding(config, max_sequence_length) if has_positions else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Maps ids `[b, s]` to `[s, b, h]`, or to this rank's `[s / tp, b, h]` with sequence parallelism.

        Args:
            position_ids: `[b, s]`, for learned positions; None is 0 to s - 1 in every row.
            tokentype_ids: Megatron-LM's argument; only None is allowed.
        """
        refuse("LanguageModelEmbedding", tokentype_ids=(tokentype_ids, None, "tokens have one type"))
        if self.word_embeddings.reduce_scatter_embeddings:
            embeddings = self.word_embeddings(input_ids)  # [s / tp, b, h]
        else:
            embeddings = self.word_embeddings(input_ids.t())  # [s, b, h]; transposing ids is cheaper
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)  # [1, s]
            embeddings = embeddings + self.position_embeddings(position_ids.t())
        if self.scatters_sequence:
            embeddings = scatter_to_sequence_parallel_region(embeddings)
        p, is_split = self.config.hidden_dropout, self.config.sequence_parallel
        return hidden_dropout(embeddings, p, training=self.training, sequence_parallel=is_split)
