"""The base of language models: their loss."""

from __future__ import annotations

import torch

from ... import tensor_parallel
from ...process_groups_config import ProcessGroupCollection, check_same_groups
from ...tensor_parallel.groups import Group, resolve_group
from ...transformer.module import MegatronModule
from ...transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """A module with a vocabulary split over tensor-parallel ranks.

    Args:
        pg_collection: process groups; must be those of `core.parallel_state`, the default.

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
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, tp_group=self.tp_group)
        return transposed(loss)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes `[s, b, ...]` to `[b, s, ...]` by a contiguous copy: FSDP2 warns of outputs that are views."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)
