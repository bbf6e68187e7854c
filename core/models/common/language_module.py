"""The base of language models with their loss, and the projection to the vocabulary that can compute it."""

from __future__ import annotations

import torch

from ... import tensor_parallel
from ...base.errors import ConfigError
from ...base.megatron_names import refuse
from ...parallel_state import check_same_groups
from ...process_groups_config import ProcessGroupCollection
from ...tensor_parallel.cross_entropy import linear_cross_entropy
from ...tensor_parallel.groups import Group, resolve_group
from ...tensor_parallel.layers import ColumnParallelLinear, Output
from ...transformer.lora import Adapter
from ...transformer.module import MegatronModule
from ...transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """A module with a vocabulary split over tensor-parallel ranks.

    Args:
        pg_collection: process groups; must be those of `shardstack.parallel_state`, the default.

    Attributes:
        tp_group: the ranks that share the vocabulary.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        check_same_groups(type(self).__name__, pg_collection, ("tp", "cp", "pp"))
        self.pg_collection = pg_collection
        self.tp_group: Group = resolve_group(None)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each token, `[b, s]` in fp32, from labels `[b, s]` and logits `[s, b, v / tp]`.

        A token with label -100 has loss zero.
        """
        labels = labels.transpose(0, 1).contiguous()
        return batch_first(tensor_parallel.vocab_parallel_cross_entropy(logits, labels, tp_group=self.tp_group))


class LinearCrossEntropyModule(ColumnParallelLinear):
    """A `ColumnParallelLinear` that returns losses instead of logits on request, as Megatron-LM's class of this name.

    One call is one use of the weight in each direction: a sharded wrapper gathers it as for any other layer.
    """

    config: TransformerConfig

    def forward(  # type: ignore[override]
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: torch.Tensor | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
    ) -> Output | torch.Tensor:
        """Returns what a `ColumnParallelLinear` does, or the loss of each token, `[b, s]` in fp32.

        Args:
            output_cross_entropy_loss: return losses.
            labels: `[b, s]`; needed for losses.
            reduction, ignore_index: Megatron-LM's arguments; refused unless at their defaults.

        Raises:
            ConfigError: losses are requested without labels or without a weight.
        """
        if not output_cross_entropy_loss:
            return super().forward(input_, weight, runtime_gather_output)
        refuse(
            type(self).__name__,
            ConfigError,
            reduction=(reduction, "none", "reduce the losses that are returned"),
            ignore_index=(ignore_index, -100, "give such tokens the label -100"),
        )
        weight = self.weight if weight is None else weight
        if weight is None or labels is None or self.bias is not None:
            missing = "a weight" if weight is None else "labels" if labels is None else "bias=False"
            raise ConfigError(f"losses of a {type(self).__name__} need {missing}; give it, or take the logits")
        target = labels.transpose(0, 1).contiguous()
        if isinstance(adapter := getattr(self, "adapter", None), Adapter):  # whose update needs whole logits
            logits = super().forward(input_, weight)[0] + adapter(input_)
            return batch_first(tensor_parallel.vocab_parallel_cross_entropy(logits, target, tp_group=self.tp_group))
        loss = linear_cross_entropy(
            input_,
            weight,
            target,
            vocab_chunk_size=self.config.cross_entropy_fusion_vocab_chunk_size,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
        )
        return batch_first(loss)


def batch_first(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes `[s, b, ...]` to `[b, s, ...]` by a contiguous copy: FSDP2 warns of outputs that are views."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)
