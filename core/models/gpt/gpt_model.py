"""GPT: embeddings, a stack of causal transformer layers, and a projection to the vocabulary."""

from __future__ import annotations

from typing import get_args

import torch

from ... import parallel_state
from ...errors import ConfigError, DataError, ParallelConfigError
from ...tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ...tensor_parallel.initialization import deferred_initialization, draw_init_seed, initialize_parameters
from ...tensor_parallel.layers import ColumnParallelLinear
from ...tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from ...transformer.context_parallel import own_positions
from ...transformer.module import MegatronModule
from ...transformer.sequence_pieces import document_pieces
from ...transformer.transformer_block import TransformerBlock
from ...transformer.transformer_config import TransformerConfig
from ..common.embeddings.language_model_embedding import LanguageModelEmbedding, PositionEmbeddingType
from ..common.embeddings.rotary_pos_embedding import RotaryEmbedding


class GPTModel(MegatronModule):
    """A decoder-only language model.

    One draw from torch's default CPU generator decides every initial value, so that `torch.manual_seed` before the
    constructor is all it takes, and the values are those of the same seed under any parallelism. Built on the meta
    device it keeps that draw (`init_seed`) for :func:`core.transformer.materialize`.

    Args:
        vocab_size: rows of the embedding; a multiple of the tensor-parallel size, see
            :func:`core.tensor_parallel.pad_vocab_size`.
        max_sequence_length: longest sequence; rows of the position table for "learned_absolute".
        share_embeddings_and_output_weights: the projection to the vocabulary is the embedding's weight. There is no
            `output_layer.weight` then, and the embedding's carries `shared_embedding`: it is read outside its module.
        position_embedding_type: "rope" (rotary) or "learned_absolute".
        parallel_output: logits stay cut over the vocabulary by tensor-parallel rank; False gathers them.

    Raises:
        ParallelConfigError: pipeline or expert parallelism, which models here do not have; a context-parallel size
            that is not the process groups'; or a vocabulary that does not divide.
        ConfigError: a size below one, or an unknown kind of position embedding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "rope",
        parallel_output: bool = True,
    ) -> None:
        _check_degrees(config)
        for name, size in (("vocab_size", vocab_size), ("max_sequence_length", max_sequence_length)):
            if size < 1:
                raise ConfigError(f"{name} is {size}; it takes a positive number")
        if position_embedding_type not in get_args(PositionEmbeddingType):
            raise ConfigError(
                f'position_embedding_type is {position_embedding_type!r}; it takes "rope" or "learned_absolute"'
            )
        super().__init__(config)
        self.init_seed = draw_init_seed()
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type: PositionEmbeddingType = position_embedding_type
        self.parallel_output = parallel_output
        with deferred_initialization():
            self.embedding = LanguageModelEmbedding(config, vocab_size, max_sequence_length, position_embedding_type)
            self.rotary_pos_emb = None
            if position_embedding_type == "rope":
                self.rotary_pos_emb = RotaryEmbedding(
                    config.kv_channels, rotary_percent=config.rotary_percent, rotary_base=config.rotary_base
                )
            self.decoder = TransformerBlock(config)
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=share_embeddings_and_output_weights,
            )
        if share_embeddings_and_output_weights:
            words = self.embedding.word_embeddings
            words.parameter_marks["weight"].update(shared_embedding=True)
            words.restore_parameter_marks()
        if config.perform_initialization and not any(parameter.is_meta for parameter in self.parameters()):
            initialize_parameters(self, self.init_seed)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of each token, `[b, s]` in fp32, with labels; the logits without.

        With context parallelism s is what a rank has of each sequence: the caller gives all tensors cut by
        :func:`core.transformer.own_chunks`.

        Args:
            input_ids: `[b, s]`; every tensor-parallel rank is given the same.
            position_ids: `[b, s]`; None counts from 0 in every row.
            attention_mask: `[b or 1, 1, s, s]`, True where a token must not see another one, in addition to those
                after it; None is causal alone, at less cost. Not with context parallelism.
            labels: `[b, s]`, the token after each; a token with label -100 has loss zero. Other tokens are left out
                by a loss mask, as in Megatron-LM: the caller multiplies.
            document_starts: `[b, s]`, for each token the position, in the whole sequence, at which its document
                begins: no token sees one of another document. Costs no mask; read on the host, best given there.

        Returns:
            Losses `[b, s]`, or logits `[b, s, v / tp]` (`[b, s, v]` without `parallel_output`).

        Raises:
            DataError: shapes that disagree, or a sequence beyond `max_sequence_length`.
        """
        self._check_batch(input_ids, position_ids, attention_mask, labels, document_starts)
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        pieces = None if document_starts is None else document_pieces(document_starts, rank, size)
        if position_ids is None and size > 1:
            position_ids = own_positions(input_ids.shape[1], input_ids.device).unsqueeze(0)  # [1, s]
        hidden_states = self.embedding(input_ids, position_ids)  # [s, b, h]
        rotation = None
        if self.rotary_pos_emb is not None:
            rotation = self.rotary_pos_emb(input_ids.shape[1], hidden_states.device, position_ids)
        hidden_states = self.decoder(hidden_states, attention_mask, rotation, pieces)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(hidden_states, weight=weight)[0]  # [s, b, v / tp]
        if labels is not None:
            return _transposed(vocab_parallel_cross_entropy(logits, labels.t().contiguous()))
        if not self.parallel_output:
            logits = gather_from_tensor_model_parallel_region(logits)
        return _transposed(logits)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """The weight that projects to the vocabulary, `[v / tp, h]`: the embedding's where they are shared."""
        if self.share_embeddings_and_output_weights:
            return self.embedding.word_embeddings.weight
        weight = self.output_layer.weight
        return self.embedding.word_embeddings.weight if weight is None else weight

    def _check_batch(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        document_starts: torch.Tensor | None,
    ) -> None:
        if input_ids.dim() != 2:
            raise DataError(f"input_ids has shape {list(input_ids.shape)}; it takes [batch, sequence]")
        batch, length = input_ids.shape
        whole = length * parallel_state.get_context_parallel_world_size()
        if whole > self.max_sequence_length:
            raise DataError(
                f"a sequence of {whole} tokens is longer than the model's max_sequence_length of "
                f"{self.max_sequence_length}; cut it, or build the model for longer ones"
            )
        given = {"position_ids": position_ids, "labels": labels, "document_starts": document_starts}
        for name, tensor in given.items():
            if tensor is not None and tensor.shape != input_ids.shape:
                raise DataError(
                    f"{name} has shape {list(tensor.shape)}, but input_ids {[batch, length]}; they must agree"
                )
        if attention_mask is None:
            return
        if attention_mask.shape not in ((batch, 1, length, length), (1, 1, length, length)):
            raise DataError(
                f"attention_mask has shape {list(attention_mask.shape)}; for input_ids {[batch, length]} it takes "
                f"{[batch, 1, length, length]} or {[1, 1, length, length]}"
            )
        if attention_mask.dtype != torch.bool:
            raise DataError(
                f"attention_mask is {attention_mask.dtype}; it takes torch.bool, True where a token is hidden"
            )


def _check_degrees(config: TransformerConfig) -> None:
    """Refuses what the model cannot do, in its config and in the process groups, which must not disagree with it."""
    asked, cp = config.context_parallel_size, parallel_state.get_context_parallel_world_size()
    if asked != cp:
        raise ParallelConfigError(
            f"config.context_parallel_size is {asked}, but core.parallel_state has context-parallel groups of {cp}; "
            "call initialize_model_parallel with the same size first"
        )
    found = {
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, group_size in found.items():
        degree = getattr(config, name)
        if degree > 1:
            raise ParallelConfigError(f"{name} is {degree}, but GPTModel supports only 1; set it to 1")
        if group_size > 1:
            raise ParallelConfigError(
                f"core.parallel_state was initialised with {name} {group_size}, but GPTModel supports only 1; "
                "initialise it with 1"
            )


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """`[s, b, ...]` to `[b, s, ...]`, contiguous and never a view, of which FSDP2 warns: nobody may write into one."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)
