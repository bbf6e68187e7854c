"""Rejects what `GPTModel` cannot do: degrees of parallelism that it does not have, and batches that do not fit."""

from __future__ import annotations

import torch

from ... import parallel_state
from ...errors import ConfigError, DataError, ParallelConfigError
from ...transformer.transformer_config import TransformerConfig
from ..common.language_module import LanguageModule


def check_degrees(config: TransformerConfig) -> None:
    """Refuses unsupported degrees in the config and in the process groups, and degrees that disagree.

    Raises:
        ParallelConfigError: names the degree.
    """
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


def check_fused_loss(model: LanguageModule) -> None:
    """Refuses a loss of the model's own class if the loss is fused with the projection.

    Raises:
        ConfigError: names the class.
    """
    kind = type(model)
    replaced = kind.compute_language_model_loss is not LanguageModule.compute_language_model_loss
    if model.config.fuses_linear_cross_entropy and replaced:
        raise ConfigError(
            f'cross_entropy_fusion_impl is "linear", but {kind.__name__} has a compute_language_model_loss of its '
            "own, which takes whole logits; drop one of them"
        )


def check_batch(
    max_sequence_length: int,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    document_starts: torch.Tensor | None,
) -> None:
    """Refuses tensors of a forward whose shapes or dtypes disagree, and sequences longer than the model's.

    Raises:
        DataError: names the tensor.
    """
    if input_ids.dim() != 2:
        raise DataError(f"input_ids has shape {list(input_ids.shape)}; it takes [batch, sequence]")
    batch, length = input_ids.shape
    whole = length * parallel_state.get_context_parallel_world_size()
    if whole > max_sequence_length:
        raise DataError(
            f"a sequence of {whole} tokens is longer than the model's max_sequence_length of "
            f"{max_sequence_length}; cut it, or build the model for longer ones"
        )
    given = {"position_ids": position_ids, "labels": labels, "document_starts": document_starts}
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise DataError(f"{name} has shape {list(tensor.shape)}, but input_ids {[batch, length]}; they must agree")
    if attention_mask is None:
        return
    if attention_mask.shape not in ((batch, 1, length, length), (1, 1, length, length)):
        raise DataError(
            f"attention_mask has shape {list(attention_mask.shape)}; for input_ids {[batch, length]} it takes "
            f"{[batch, 1, length, length]} or {[1, 1, length, length]}"
        )
    if attention_mask.dtype != torch.bool:
        raise DataError(f"attention_mask is {attention_mask.dtype}; it takes torch.bool, True where a token is hidden")
