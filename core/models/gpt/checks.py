"""Checks of a GPT: its place in the pipeline, its loss, and the tensors of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import parallel_state
from ...base.errors import ConfigError, DataError, ParallelConfigError
from ...transformer.pipeline_stages import PipelineStage
from ..common.language_module import LanguageModule


def check_ends(stage: PipelineStage, pre_process: bool, post_process: bool) -> None:
    """Refuses a model that embeds or computes the loss on another pipeline stage than that which does.

    Raises:
        ParallelConfigError: names the argument.
    """
    ends = {"pre_process": (pre_process, stage.is_first), "post_process": (post_process, stage.is_last)}
    for name, (actual, by_stage) in ends.items():
        if stage.count > 1 and actual != by_stage:
            raise ParallelConfigError(
                f"{name} is {actual} on {stage}; give pre_process=stage.is_first and post_process=stage.is_last of "
                "shardstack.transformer.pipeline_stages.pipeline_stage(config, vp_stage)"
            )


def check_shared_weight(schedule: str, stage: PipelineStage, pre_process: bool, post_process: bool) -> None:
    """Refuses a weight of both ends where a model has one end alone, or a rank the first and the last stage.

    Raises:
        ParallelConfigError: names the settings.
    """
    if stage.count == 1 and not (pre_process and post_process):
        raise ParallelConfigError(
            "share_embeddings_and_output_weights is set for a model without "
            f"{'post_process' if pre_process else 'pre_process'}; both ends of a shared weight are in one model"
        )
    if stage.count > 1 and schedule == "ZBVZeroBubble":
        raise ParallelConfigError(
            "share_embeddings_and_output_weights is set, and pipeline_parallel_schedule 'ZBVZeroBubble' has the first "
            "and the last stage on one rank, where they cannot share a weight; leave one of them out"
        )


def check_fused_loss(model: LanguageModule) -> None:
    """Refuses a loss of the model's own class if the loss is fused with the projection.

    Raises:
        ConfigError: names the class.
    """
    kind = type(model)
    has_own_loss = kind.compute_language_model_loss is not LanguageModule.compute_language_model_loss
    if model.config.fuses_linear_cross_entropy and has_own_loss:
        raise ConfigError(
            f'cross_entropy_fusion_impl is "linear", but {kind.__name__} has a compute_language_model_loss of its '
            "own, which takes whole logits; drop one of them"
        )


def check_batch(
    max_sequence_length: int,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    document_starts: Tensor | None,
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
    inputs = {"position_ids": position_ids, "labels": labels, "document_starts": document_starts}
    for name, tensor in inputs.items():
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
