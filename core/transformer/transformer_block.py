"""The stack of layers, with the norm at its end and whole-layer recomputation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import ConfigError
from ..base.recomputation import recompute
from ..parallel_state import check_same_groups
from ..process_groups_config import ProcessGroupCollection
from .attention import Rotation, packing
from .module import MegatronModule
from .norms import build_norm
from .pipeline_stages import StageLayers, pipeline_stage
from .sequences import PackedDocuments
from .spec_utils import Builder, ModuleSpec, build_module
from .transformer_config import TransformerConfig
from .transformer_layer import TransformerLayer


@dataclass
class TransformerBlockSubmodules:
    """The modules of a stack."""

    layer_specs: list[ModuleSpec | Builder] | None = None
    """Specs of the layers, one for each. None means layers of this package."""

    layer_norm: ModuleSpec | Builder | None = None
    """The norm at the end, or None for the norm that the config names."""


class TransformerBlock(MegatronModule):
    """This pipeline stage's layers of `config.num_layers`, all with one stage, and `final_layernorm` on the last.

    `layers` has them under their numbers in the whole model, as in ``decoder.layers.7``.

    Args:
        spec: spec of every layer, or :class:`TransformerBlockSubmodules` of the whole model, itself or in a spec; by
            default layers of this package.
        post_layer_norm: if False, there is no `final_layernorm`: it is None.
        pre_process: use the hidden states given to `forward`; else those of `set_input_tensor`, as on a later pipeline
            stage.
        post_process: this is the last stage; else there is no `final_layernorm`.
        pg_collection: must be the groups of `shardstack.parallel_state`.
        vp_stage: which of the rank's virtual pipeline stages; None where it has one stage.

    Raises:
        ConfigError: the config leaves a size at 0, or there is not one spec for each layer.
        ParallelConfigError: other groups are given, or a `vp_stage` that the config does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec | Builder | None = None,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        config.check_sizes_given()
        check_same_groups("TransformerBlock", pg_collection, ("tp", "cp", "pp"))
        super().__init__(config)
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self.input_tensor: torch.Tensor | None = None  # `set_input_tensor` sets it; read only without `pre_process`
        if isinstance(spec, ModuleSpec) and isinstance(spec.submodules, TransformerBlockSubmodules):
            spec = spec.submodules
        if not isinstance(spec, TransformerBlockSubmodules):
            spec = TransformerBlockSubmodules([spec or TransformerLayer] * config.num_layers)
        specs = spec.layer_specs or [TransformerLayer] * config.num_layers
        if len(specs) != config.num_layers:
            raise ConfigError(f"layer_specs has {len(specs)} entries, num_layers is {config.num_layers}; give as many")
        self.stage = pipeline_stage(config, vp_stage)
        self.layers = StageLayers(
            (build_module(specs[number], config=config, layer_number=number + 1) for number in self.stage.layers),
            self.stage.layers.start,
        )
        self.final_layernorm = None
        if post_process and post_layer_norm:
            norm, width, eps = spec.layer_norm or build_norm, config.hidden_size, config.layernorm_epsilon
            self.final_layernorm = build_module(norm, config=config, hidden_size=width, eps=eps)

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Sets the hidden states of the next forward, `[s, b, h]`, without `pre_process`."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: Rotation | None = None,
        documents: PackedDocuments | None = None,
    ) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`, or this rank's `[s / tp, b, h]` each with sequence parallelism."""
        if not self.pre_process:
            hidden_states = self.input_tensor
        if hidden_states is None:
            raise ConfigError("a TransformerBlock without pre_process has no input; call set_input_tensor first")
        for first, last, recomputes in self._chunks():
            run = self._run_layers
            if recomputes:
                run = functools.partial(recompute, run, modules=self.layers[first:last])
            hidden_states = run(first, last, hidden_states, attention_mask, rotary_pos_emb, documents)
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def _chunks(self) -> Iterator[tuple[int, int, bool]]:
        """Yields consecutive runs of layers `[first, last)`, and whether each is recomputed."""
        config, layers = self.config, len(self.layers)
        number = config.recompute_num_layers
        if config.recompute_granularity != "full" or number is None or not self.training:
            yield 0, layers, False
        elif config.recompute_method == "uniform":
            for first in range(0, layers, number):
                yield first, min(first + number, layers), True
        else:
            number = min(number, layers)  # of each stage, as in Megatron-LM
            for layer in range(number):
                yield layer, layer + 1, True
            yield number, layers, False

    def _run_layers(self, first: int, last: int, hidden_states: torch.Tensor, *inputs: Any) -> torch.Tensor:
        attention_mask, rotary_pos_emb, documents = inputs
        for layer in self.layers[first:last]:
            hidden_states = layer(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **packing(documents))
        return hidden_states
