"""The GPT of a composition: of two or four layers, with grouped queries, and what the composition does to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from core.transformer.lora import add_lora
from core.transformer.pipeline_stages import pipeline_stage
from tests.compositions.composition import Composition, Layout
from tests.compositions.data import SEQUENCE
from tests.unit._gpt import gpt_of
from tests.unit.distributed._toys import Codes

FIRST_LAYER = "decoder.layers.0."


class Gated(nn.Module):
    """An MLP with a path around it, whose weight is used in some micro-batches only."""

    def __init__(self, inner: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.linspace(-0.2, 0.3, config.hidden_size))
        self.gain.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output + x * self.gain.to(x.dtype) if self.is_used else output


class Adapted(nn.Module):
    """An MLP with a frozen product of packed codes around it."""

    def __init__(self, inner: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.inner = inner
        same_on_any_stage = torch.Generator().manual_seed(torch.initial_seed())
        codes = torch.randint(0, 256, (config.hidden_size**2, 1), generator=same_on_any_stage, dtype=torch.uint8)
        self.codes = Codes(codes, SimpleNamespace(scale=torch.linspace(0.0, 0.002, config.hidden_size)))

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.codes.detach().view(x.shape[-1], x.shape[-1]).float() - 128
        output: Tensor = self.inner(x)
        return output + x @ (numbers * self.codes.quant_state.scale).to(x.dtype)


class Counted(nn.Module):
    """An MLP that keeps a running mean of what it is given in training, which nothing reads.

    Attributes:
        mean: `[h]` in fp32.
        is_counting: whether a forward changes it.
    """

    buffers_keep_dtype = True
    mean: Tensor

    def __init__(self, inner: nn.Module, config: TransformerConfig, assigns: bool) -> None:
        super().__init__()
        self.inner, self.assigns = inner, assigns
        self.register_buffer("mean", torch.zeros(config.hidden_size, dtype=torch.float32))
        self.is_counting = True

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_counting:
            seen = x.detach().float().flatten(0, -2).mean(0)
            if self.assigns:
                self.mean = 0.75 * self.mean + 0.25 * seen
            else:
                self.mean.lerp_(seen, 0.25)
        output: Tensor = self.inner(x)
        return output


class Strided(nn.Module):
    """An MLP with a path around it, of a weight that is a part of a larger matrix and a buffer that repeats one
    number."""

    shift: Tensor

    def __init__(self, inner: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.inner = inner
        same_on_any_stage = torch.Generator().manual_seed(torch.initial_seed())
        size = config.hidden_size
        large = torch.randn(size, 2 * size, generator=same_on_any_stage, dtype=torch.float32) * 0.1
        self.weight = nn.Parameter(large[:, ::2])
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        shift = torch.rand(1, generator=same_on_any_stage, dtype=torch.float32)
        self.register_buffer("shift", shift.expand(size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output + (x + self.shift.to(x.dtype)) @ self.weight.to(x.dtype)


class Held:
    """A plain object, in which pytree finds no tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Table(nn.Module):
    """A unit whose weight the model uses by another way than through a tensor that its forward returns."""

    def __init__(self, config: TransformerConfig, shows: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.hidden_size) * 0.1)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.shows = shows

    def forward(self, x: Tensor) -> Tensor | Held:
        if self.shows == "views":
            return self.weight.view(1, 1, -1)
        if self.shows == "objects":
            return Held(self.weight * self.weight)
        self.value = self.weight * self.weight
        return x


class WithTables(nn.Module):
    """A module after which activations are scaled by three equal tables, all read before any is used."""

    _fsdp_modules = (Table,)

    def __init__(self, inner: nn.Module, config: TransformerConfig, shows: str) -> None:
        super().__init__()
        self.inner = inner
        self.tables = nn.ModuleList([Table(config, shows) for _ in range(3)])
        self.shows = shows

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        read = [self._read(cast(Table, table), x) for table in self.tables]
        return x + x * (read[0] + read[1] * read[2]).to(x.dtype)

    def _read(self, table: Table, x: Tensor) -> Tensor:
        if self.shows == "read by the model":
            return table.weight * table.weight
        output = table(x)
        if self.shows == "attributes":
            return table.value
        return output.value if isinstance(output, Held) else output


def layers_of(model: nn.Module, number: int) -> list[nn.Module]:
    """Returns the layer of this number in the whole model; none where it is on another pipeline stage."""
    name = f"decoder.layers.{number}"
    return [module for of_model, module in model.named_modules() if of_model.endswith(name)]


def build(
    composition: Composition, layout: Layout, seed: int = 7, is_serial: bool = False, vp_stage: int | None = None
) -> GPTModel:
    """Builds the model on this rank; its weights depend on the seed alone.

    Args:
        layout: how it is cut.
        is_serial: leave out what a plain model does without, the meta device.
        vp_stage: which of the rank's virtual pipeline stages.
    """
    torch.manual_seed(seed)
    config = _config(composition, layout)
    stage = pipeline_stage(config, vp_stage)
    with torch.device("meta" if composition.start == "meta" and not is_serial else "cpu"):
        model = gpt_of(config, composition.embeddings == "tied", 64, SEQUENCE, vp_stage=vp_stage)
        if composition.trained == "adapters":
            add_lora(model, 2, targets=None if composition.experts == "none" else ("linear_qkv", "linear_proj"))
    if composition.base == "packed":
        for layer in cast(list[Any], layers_of(model, 0)):
            layer.mlp = Adapted(layer.mlp, model.config)
    if composition.unused != "nothing":
        for layer in cast(list[Any], layers_of(model, 1)):
            layer.mlp = Gated(layer.mlp, model.config)
    if composition.memory == "strided":
        for layer in cast(list[Any], layers_of(model, 1)):
            layer.mlp = Strided(layer.mlp, model.config)
    if composition.buffers != "read":
        for layer in cast(list[Any], layers_of(model, 0)):
            layer.mlp = Counted(layer.mlp, model.config, composition.buffers == "assigned")
    if composition.layers == "twice":
        model.decoder.layers = nn.ModuleList([*model.decoder.layers, model.decoder.layers[0]])
    elif composition.layers == "share a weight":
        first, second = cast(Any, model.decoder.layers)[:2]
        second.input_layernorm.weight = first.input_layernorm.weight
    if composition.tables != "none" and stage.is_last:
        decoder: Any = model.decoder
        decoder.final_layernorm = WithTables(decoder.final_layernorm, model.config, composition.tables)
    _freeze(model, composition.trained)
    if composition.hooks != "none":
        for layer in cast(list[Any], layers_of(model, 1)):
            layer.self_attention.linear_qkv.weight.register_hook(_halve)
    return model


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
_BALANCING: dict[str, dict[str, Any]] = {
    "balanced by losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.3],  # so large that one which is off shows in the router
        "moe_z_loss_coeff": 0.05,
        "moe_grouped_gemm": True,
    },
    "balanced by a bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.02,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
    },
}
_BALANCING["balanced over replicas"] = {
    **_BALANCING["balanced by losses"],
    "moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"],
}
_BALANCING["over ranks"] = {**_BALANCING["balanced by losses"], "moe_token_dispatcher_type": "alltoall"}


def expert_parallel_size(composition: Composition) -> dict[str, int]:
    """Returns the number of ranks that share the experts, as an argument."""
    return {"expert_model_parallel_size": 2 if composition.experts == "over ranks" else 1}


def _config(composition: Composition, layout: Layout) -> TransformerConfig:
    is_odd = composition.widths == "odd"
    fields: dict[str, Any] = {
        "num_layers": 4 if composition.depth == "four" else 2,
        "hidden_size": 15 if is_odd else 16,
        "ffn_hidden_size": 20 if is_odd else 24,
        "num_attention_heads": 4,
        "num_query_groups": {"all": 4, "grouped": 2, "one group": 1}[composition.heads],
        "kv_channels": 6 if is_odd else 4,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "normalization": "RMSNorm" if is_odd else "LayerNorm",
        "qk_layernorm": is_odd,
        "hidden_dropout": 0.0 if composition.dropout == "no" else 0.1,
        "attention_dropout": 0.0,
        "init_method_std": 0.2,
        "calculate_per_token_loss": composition.loss == "per token",
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
    }
    if layout.pp > 1:
        fields["virtual_pipeline_model_parallel_size"] = composition.virtual_stages
        fields["pipeline_parallel_schedule"] = composition.pipeline
    if composition.precision != "fp32":
        fields[composition.precision] = True
    if composition.experts != "none":
        fields |= _EXPERTS | _BALANCING[composition.experts] | expert_parallel_size(composition)
        fields["moe_input_jitter_eps"] = 0.1 if composition.jitter == "yes" else None
        # Rounding decides between experts of almost equal scores: in low precision, often, so that all are taken.
        fields |= {} if composition.precision == "fp32" else {"moe_router_topk": 4, "moe_router_dtype": "fp32"}
    if composition.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif composition.recompute == "selective":
        fields["recompute_granularity"] = "selective"
    return TransformerConfig(**fields)


_FROZEN: dict[str, Callable[[str], bool]] = {
    "without embedding": lambda name: name.startswith("embedding."),
    "without a layer": lambda name: name.startswith(FIRST_LAYER),
    "one norm": lambda name: name != "decoder.final_layernorm.weight",
}


def _freeze(model: nn.Module, trained: str) -> None:
    if trained in _FROZEN:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and not _FROZEN[trained](name))
