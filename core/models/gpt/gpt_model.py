"""GPT: embeddings, a stack of causal transformer layers, and a projection to the vocabulary."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from ... import parallel_state
from ...base import device
from ...base.errors import ConfigError, DataError, check_choices, check_positive, warn_once
from ...base.initialization import draw_init_seed, initialize_parameters
from ...base.megatron_names import checks_arguments
from ...comm.collectives import broadcast_by_backend
from ...fp8 import use_fp8_products
from ...process_groups_config import ProcessGroupCollection
from ...tensor_parallel.cross_entropy import IGNORE_INDEX
from ...tensor_parallel.groups import check_degrees
from ...tensor_parallel.initialization import deferred_initialization, mark_parameter
from ...tensor_parallel.layers import ColumnParallelLinear
from ...tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from ...transformer.moe.load_balancing import ForwardNote, add_pending, begin_forward, keep, pop_balance_losses
from ...transformer.pipeline_stages import pipeline_stage
from ...transformer.sequences import PackedDocuments, own_positions
from ...transformer.spec_utils import Builder, ModuleSpec
from ...transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from ...transformer.transformer_config import TransformerConfig
from ..common.embeddings.language_model_embedding import LanguageModelEmbedding, PositionEmbeddingType
from ..common.embeddings.rotary_pos_embedding import RotaryEmbedding
from ..common.language_module import LanguageModule, LinearCrossEntropyModule, batch_first
from .checks import check_batch, check_ends, check_fused_loss, check_shared_weight


class GPTModel(LanguageModule):
    """A decoder-only language model.

    One draw from torch's default CPU generator decides every initial value, so that it suffices to call
    `torch.manual_seed` before the constructor; values are equal under any parallelism. Built on the meta device, the
    model keeps that draw (`init_seed`) for :func:`shardstack.transformer.materialize`.

    Args:
        transformer_layer_spec: classes of the model's layers; None means `get_gpt_layer_local_spec()`.
        vocab_size: rows of the embedding, a multiple of the tensor-parallel size; see
            :func:`shardstack.tensor_parallel.pad_vocab_size`.
        max_sequence_length: longest sequence; rows of the position table for "learned_absolute".
        pre_process: whether the model embeds tokens, as the first pipeline stage; else its forward starts from
            `decoder_input`, or from what `set_input_tensor` was given.
        post_process: whether the model ends with the final norm and the projection to the vocabulary, as the last
            pipeline stage; else its forward returns hidden states `[s, b, h]`.
        parallel_output: logits stay split over the vocabulary by tensor-parallel rank; False gathers them.
        share_embeddings_and_output_weights: the projection to the vocabulary is the embedding's weight. There is no
            `output_layer.weight` then, and the embedding's carries `shared_embedding`: it is read outside its module.
            The last pipeline stage has a copy of the weight under the same name, which also carries `shared`.
        position_embedding_type: "rope" (rotary) or "learned_absolute".
        rotary_percent, rotary_base: None means the config's fields, whose defaults are Megatron-LM's.
        rope_scaling_factor: read only with `rope_scaling`.
        pg_collection: the groups of `shardstack.parallel_state`.
        vp_stage: which of the rank's virtual pipeline stages this is; None where a rank has one stage. Build them in
            order: one draw of the seed serves all.
        fp16_lm_cross_entropy, logit_dtype, rope_scaling, scatter_embedding_sequence_parallel,
            seq_len_interpolation_factor, mtp_block_spec: Megatron-LM's arguments; refused unless at their defaults.

    Attributes:
        stage: its place in the pipeline, and its layers.

    Raises:
        ParallelConfigError: a parallel size that is not the process groups'; `pre_process` or `post_process` that is
            not that of the pipeline stage; a vocabulary that does not divide; or an argument that is refused.
        ConfigError: a size below one, or an unknown kind of position embedding.
    """

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec | Builder | None = None,
        vocab_size: int = 0,
        max_sequence_length: int = 0,
        pre_process: bool = True,
        post_process: bool = True,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        rotary_percent: float | None = None,
        rotary_base: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        if isinstance(transformer_layer_spec, int):
            raise ConfigError(
                f"transformer_layer_spec is {transformer_layer_spec}; as in Megatron-LM the second argument says what "
                "layers are made of: give None or get_gpt_layer_local_spec(), and vocab_size after it"
            )
        config.check_sizes_given()
        check_degrees(
            config,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        )
        check_positive({"vocab_size": vocab_size, "max_sequence_length": max_sequence_length})
        stage = pipeline_stage(config, vp_stage)
        check_ends(stage, pre_process, post_process)
        if share_embeddings_and_output_weights:
            check_shared_weight(config.pipeline_schedule, stage, pre_process, post_process)
        super().__init__(config, pg_collection)
        self.pre_process, self.post_process = pre_process, post_process
        # The seed of all initial values. `share_init_seeds` replaces it by the first rank's if a wrapper draws values.
        self.init_seed = _stage_seed(config, vp_stage)
        self.stage, self.vp_stage = stage, vp_stage
        # The auxiliary losses of earlier pipeline stages, 0-dim. `set_input_tensor` sets it, `forward` takes it.
        self._earlier_losses: Tensor | None = None
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type: PositionEmbeddingType = position_embedding_type
        check_choices(self, position_embedding_type=get_args(PositionEmbeddingType))
        self.parallel_output = parallel_output
        self.fuse_linear_cross_entropy = config.fuses_linear_cross_entropy
        check_fused_loss(self)
        self.rotary_percent = config.rotary_percent if rotary_percent is None else rotary_percent
        self.rotary_base = config.rotary_base if rotary_base is None else float(rotary_base)
        with deferred_initialization():
            self._make_layers(transformer_layer_spec)
        if share_embeddings_and_output_weights and self.embedding is not None:
            mark_parameter(self.embedding.word_embeddings, shared_embedding=True)
            if not pre_process:
                mark_parameter(self.embedding.word_embeddings, shared=True)
        if config.perform_initialization and not any(parameter.is_meta for parameter in self.parameters()):
            initialize_parameters(self, self.init_seed)

    def _make_layers(self, spec: TransformerBlockSubmodules | ModuleSpec | Builder | None) -> None:
        config, self.embedding = self.config, None
        if self.pre_process or (self.post_process and self.share_embeddings_and_output_weights):
            positions = self.position_embedding_type if self.pre_process else "rope"  # the last stage embeds nothing
            self.embedding = LanguageModelEmbedding(config, self.vocab_size, self.max_sequence_length, positions)
        self.rotary_pos_emb = None
        if self.position_embedding_type == "rope":
            percent, base = self.rotary_percent, self.rotary_base
            self.rotary_pos_emb = RotaryEmbedding(config.kv_channels, percent, rotary_base=base)
        self.decoder = TransformerBlock(
            config, spec, pre_process=self.pre_process, post_process=self.post_process, vp_stage=self.vp_stage
        )
        if config.fp8 is not None:
            use_fp8_products(self.decoder, config.fp8_products)
            if config.num_moe_experts is not None:
                warn_once("fp8 is for linear layers: grouped products of experts stay in the model's precision")
        self.output_layer = None
        if self.post_process:
            head = LinearCrossEntropyModule if self.fuse_linear_cross_entropy else ColumnParallelLinear
            self.output_layer = head(
                config.hidden_size,
                self.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=self.share_embeddings_and_output_weights,
            )
            mark_parameter(self.output_layer, is_embedding_or_output_parameter=True)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Sets the hidden states of the next forward, `[s, b, h]` or in a list, for a model without `pre_process`.

        In a list the sum of the auxiliary losses of earlier pipeline stages may follow, 0-dim.
        """
        if isinstance(input_tensor, list):
            input_tensor, self._earlier_losses = [*input_tensor, None][:2]
        self.decoder.set_input_tensor(input_tensor)

    @checks_arguments
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        document_starts: Tensor | None = None,
        documents: PackedDocuments | None = None,
    ) -> Tensor:
        """Returns the loss of each token, `[b, s]` in fp32, or the logits if there are no labels.

        With context parallelism s is the length of this rank's part: split all tensors by
        :func:`shardstack.transformer.own_chunks` before the call.

        Args:
            input_ids: `[b, s]`; the same on every tensor-parallel rank.
            position_ids: `[b, s]`; None counts from 0 in every row.
            attention_mask: `[b or 1, 1, s, s]`, True where a token must not see another one, in addition to later
                tokens; None is only causal, and faster. Not with context parallelism.
            decoder_input: `[s, b, h]` (`[s / tp, b, h]` with sequence parallelism), instead of embedded tokens.
            labels: `[b, s]`, the next token of each; a token with label -100 has loss zero. As in Megatron-LM the
                caller masks other tokens by multiplying the losses.
            runtime_gather_output: whether logits are gathered over tensor-parallel ranks in this call; None means
                `parallel_output`.
            loss_mask: `[b, s]`; as in Megatron-LM not applied here: the caller multiplies the losses by it.
            document_starts: `[b, s]`, for each token the position in the whole sequence at which its document begins;
                no token sees another document. Needs no mask. Read on the host: give a CPU tensor, or under FSDP2,
                which moves it to the GPU, `documents` in its place.
            documents: `document_starts` as :class:`shardstack.transformer.sequences.PackedDocuments`.
            inference_context, packed_seq_params, extra_block_kwargs, inference_params, padding_mask: Megatron-LM's
                arguments; only None is allowed.

        Returns:
            Losses `[b, s]`, or logits `[b, s, v / tp]` (`[b, s, v]` without `parallel_output`); without
            `post_process` hidden states `[s, b, h]`.

        Raises:
            DataError: shapes disagree, or the sequence is longer than `max_sequence_length`.
            ParallelConfigError: an argument is refused.
        """
        check_batch(self.max_sequence_length, input_ids, position_ids, attention_mask, labels, document_starts)
        if self.config.num_moe_experts is not None and torch.is_grad_enabled():
            begin_forward()
        earlier, self._earlier_losses = self._earlier_losses, None
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        if document_starts is not None:
            documents = PackedDocuments(document_starts, rank, size)
        if position_ids is None and size > 1:
            position_ids = own_positions(input_ids.shape[1], input_ids.device).unsqueeze(0)  # [1, s]
        hidden_states = decoder_input
        if decoder_input is not None and decoder_input.shape[-1:] != (self.config.hidden_size,):
            raise DataError(
                f"decoder_input has shape {list(decoder_input.shape)}; as in Megatron-LM the fourth argument is "
                f"hidden states [s, b, {self.config.hidden_size}], and labels are the fifth: give labels by name"
            )
        if hidden_states is None and self.pre_process and self.embedding is not None:
            hidden_states = self.embedding(input_ids, position_ids)  # [s, b, h]
        elif hidden_states is not None and not self.pre_process:
            self.decoder.set_input_tensor(hidden_states)
        rotation = None
        if self.rotary_pos_emb is not None:
            rotation = self.rotary_pos_emb(input_ids.shape[1], device=input_ids.device, position_ids=position_ids)
        output: Tensor = self.decoder(hidden_states, attention_mask, rotary_pos_emb=rotation, documents=documents)
        if earlier is not None and output.requires_grad:
            keep(self.decoder, output, ForwardNote(earlier), lambda: None)
        if self.output_layer is None:
            return output
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if labels is not None and self.fuse_linear_cross_entropy:
            losses: Tensor = self.output_layer(output, weight=weight, output_cross_entropy_loss=True, labels=labels)
            return self._with_expert_losses(losses, labels)
        logits: Tensor = self.output_layer(output, weight=weight)[0]  # [s, b, v / tp]
        if labels is not None:
            return self._with_expert_losses(self.compute_language_model_loss(labels, logits), labels)
        if runtime_gather_output or (runtime_gather_output is None and not self.parallel_output):
            logits = gather_from_tensor_model_parallel_region(logits)
        return batch_first(logits)

    def _with_expert_losses(self, losses: Tensor, labels: Tensor) -> Tensor:
        if self.config.num_moe_experts is None or not torch.is_grad_enabled():
            return losses
        return add_pending(losses, pop_balance_losses(self.decoder), labels != IGNORE_INDEX)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the weight of the output projection, `[v / tp, h]`: the embedding's if they are shared.

        None if the model has neither embedding nor output projection.
        """
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        return None if self.embedding is None else self.embedding.word_embeddings.weight


def _stage_seed(config: TransformerConfig, vp_stage: int | None) -> int:
    """Draws the seed of all initial values: one for all stages, drawn on the first rank of the pipeline."""
    if config.pipeline_model_parallel_size == 1:
        return draw_init_seed()
    before = torch.get_rng_state()
    seed = torch.tensor(draw_init_seed(), device=device.current_device())
    if vp_stage is not None and vp_stage + 1 < (config.virtual_pipeline_model_parallel_size or 1):
        torch.set_rng_state(before)  # the rank's next virtual stage draws the same
    broadcast_by_backend(seed, parallel_state.get_pipeline_model_parallel_group(), what="the seed of initial values")
    return int(seed)
