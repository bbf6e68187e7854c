"""Translates ``config.json`` of Hugging Face's GPTs to an architecture and back.

Llama, Qwen2, Qwen3 and GPT-2 are dense; Mixtral, Qwen3-MoE and GLM-4.5 have experts (`expert_weights.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ...base.errors import CheckpointError, ConfigError
from ...base.files import brief
from ...base.text import choices
from ...transformer.transformer_config import TransformerConfig
from .architecture import HF_LAYOUTS, HF_TABLES, Architecture, Layout, model_fields
from .expert_weights import LAYOUTS_WITH_EXPERTS, expert_fields, expert_settings

_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 10_000

_LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
"""Values of ``model_type`` whose attention no model here has."""
_ACTIVATIONS: dict[str, str] = HF_TABLES["activations"]
_THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}  # the first of several


def choose_layout(architecture: Architecture) -> Layout:
    """Returns Hugging Face's kind of model with this architecture.

    Raises:
        CheckpointError: there is none; says of each kind what it cannot express.
    """
    reasons = {}
    for layout in HF_LAYOUTS:
        problems = _inexpressible(layout, architecture)
        if not problems:
            return layout
        reasons[layout] = ", ".join(problems)
    text = "; ".join(f"{layout} cannot express {problems}" for layout, problems in reasons.items())
    raise CheckpointError(f"no layout of Hugging Face's fits this model: {text}")


def check_layout(layout: Layout, architecture: Architecture) -> None:
    """Raises CheckpointError with everything that `layout` cannot express of the model."""
    if layout not in HF_LAYOUTS:
        raise CheckpointError(f"there is no layout {layout!r}; {choices(layout, HF_LAYOUTS)}")
    if problems := _inexpressible(layout, architecture):
        raise CheckpointError(f"the layout {layout} cannot express {', '.join(problems)} of this model")


def hf_config(layout: Layout, architecture: Architecture, *, dtype: str = "float32") -> dict[str, Any]:
    """Returns the content of ``config.json``."""
    a = architecture
    common = {
        "architectures": [HF_LAYOUTS[layout]["class"]],
        "model_type": layout,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": a.ties_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers before 4.56
    }
    known = HF_LAYOUTS[layout]
    settings = common | {theirs: a[ours] for theirs, ours in known.get("names", {}).items()}
    activation = _THEIR_ACTIVATIONS[a["activation_func"]]
    if layout == "gpt2":
        return settings | {"n_positions": a.max_sequence_length, "activation_function": activation}
    settings |= {theirs: a[ours] for theirs, ours in HF_TABLES["names_of_all_but_gpt2"].items()}
    base = float(a["rotary_base"])
    share = {"partial_rotary_factor": a["rotary_percent"]} if layout == "glm4_moe" else {}
    settings |= {
        "hidden_act": activation,
        "max_position_embeddings": a.max_sequence_length,
        "rope_theta": base,  # transformers before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": base, **share},
        **known.get("constants", {}),
    }
    return settings if a["num_moe_experts"] is None else settings | expert_settings(layout, a)


def architecture_from_hf(config: Mapping[str, Any]) -> Architecture:
    """Returns the model that a ``config.json`` describes.

    Raises:
        CheckpointError: it is another kind of model, or has settings that no model here has; names all of them.
    """
    layout = layout_of(config)
    known, is_gpt2 = HF_LAYOUTS[layout], layout == "gpt2"
    problems = [
        f"{name} {brief(config[name])}"
        for name, values in known["takes"].items()
        if name in config and config[name] not in values
    ]
    if config.get("quantization_config"):
        problems.append("quantization_config")
    names = known["names"] if is_gpt2 else HF_TABLES["names_of_all_but_gpt2"]
    theirs = {ours: name for name, ours in names.items()}
    defaults = ({} if is_gpt2 else HF_TABLES["defaults_of_all_but_gpt2"]) | known.get("defaults", {})
    get = _Reader(defaults | {name: value for name, value in config.items() if value is not None})
    heads, hidden = get.size(theirs["num_attention_heads"]), get.size(theirs["hidden_size"])
    num_layers = get.size(theirs["num_layers"], most=_MOST_LAYERS)
    fields = {"num_layers": num_layers, "hidden_size": hidden, "num_attention_heads": heads, **known["fields"]}
    sizes = {
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden if is_gpt2 else None,
    }
    fields |= {name: get.size(theirs.get(name, name), default=default) for name, default in sizes.items()}
    fields["layernorm_epsilon"] = get.number(theirs["layernorm_epsilon"])
    if not is_gpt2:
        flags = {name: ours for name, ours in known.get("names", {}).items() if ours != "rotary_percent"}
        fields |= {ours: bool(config.get(name, False)) for name, ours in flags.items()}
        if len({bool(config.get(name, False)) for name in flags}) > 1 and layout == "llama":  # one field here
            problems.append(" with ".join(f"{name} {bool(config.get(name, False))}" for name in flags))
        rope, rope_problems = _rope(config, layout)
        fields |= rope
        problems += rope_problems
    if layout in LAYOUTS_WITH_EXPERTS:
        of_experts, expert_problems = expert_fields(layout, get, num_layers)
        fields |= of_experts
        problems += expert_problems
    activation = get("activation_function" if is_gpt2 else "hidden_act")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        problems.append(f"the activation {brief(activation)}")
    if problems:
        raise CheckpointError(f"models here cannot express {', '.join(problems)} of this {layout}")
    try:
        transformer = TransformerConfig(**fields | {"activation_func": _ACTIVATIONS[activation]})
    except ConfigError as error:
        raise CheckpointError(f"config.json describes a {layout} that no model here can be: {error}") from error
    return Architecture(
        transformer=model_fields(transformer),
        vocab_size=get.size("vocab_size"),
        max_sequence_length=get.size("n_positions" if is_gpt2 else "max_position_embeddings"),
        ties_embeddings=bool(get("tie_word_embeddings")),
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
    )


def check_fits(architecture: Architecture, num_elements: int, num_tensors: int) -> None:
    """Refuses a model that is larger than the tensors in its files, before it is allocated.

    Args:
        num_elements, num_tensors: totals over all files.
    """
    a = architecture
    attention = a["hidden_size"] * a["kv_channels"] * a["num_attention_heads"]
    per_layer = attention + 2 * a["hidden_size"] * a["ffn_hidden_size"]
    least = a.vocab_size * a["hidden_size"] + a["num_layers"] * per_layer
    if a["num_moe_experts"] is not None:
        others = 2 * a["hidden_size"] * (a["num_moe_experts"] * a["moe_ffn_hidden_size"] - a["ffn_hidden_size"])
        least += sum(map(a.has_experts, range(a["num_layers"]))) * others
    if least > num_elements or a["num_layers"] > num_tensors:
        raise CheckpointError(
            f"config.json describes a model of at least {least} parameters in {a['num_layers']} layers, and the files "
            f"hold {num_elements} in {num_tensors} tensors"
        )


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Returns the kind of model that a ``config.json`` describes.

    Raises:
        CheckpointError: the kind is unknown.
    """
    model_type = config.get("model_type")
    if model_type in _LATENT_ATTENTION:
        raise CheckpointError(
            f"model_type is {brief(model_type)}, whose multi-head latent attention (kv_lora_rank "
            f"{brief(config.get('kv_lora_rank'))}) no model here has; its router is that of a glm4_moe"
        )
    if model_type not in [*HF_LAYOUTS]:  # of any type
        raise CheckpointError(f"model_type is {brief(model_type)}; {', '.join(HF_LAYOUTS)} are known here")
    return cast(Layout, model_type)


def _inexpressible(layout: Layout, a: Architecture) -> list[str]:
    """Lists what a layout cannot express of a model: what its ``config.json`` gives back otherwise, or not at all."""
    if (a["num_moe_experts"] is not None) != (layout in LAYOUTS_WITH_EXPERTS):
        return [f"num_moe_experts {a['num_moe_experts']}"]
    if a["activation_func"] not in _THEIR_ACTIVATIONS:
        return [f"activation_func {a['activation_func']}, a function without a name"]
    try:
        read_back = architecture_from_hf(hf_config(layout, a))
    except CheckpointError as error:
        return [f"its settings ({error})"]
    problems = [difference.rpartition(" and ")[0] for difference in a.differences(read_back)]
    heads, width = a["num_attention_heads"], a["hidden_size"]
    if layout == "llama" and width % heads:  # which transformers refuses
        problems.append(f"hidden_size {width}, which {heads} heads do not divide")
    if layout == "qwen2" and a["kv_channels"] * heads != width:  # it has no head_dim there
        problems.append(f"kv_channels {a['kv_channels']}")
    return problems


class _Reader:
    """Looks up a value of a config, or returns a default if it is missing or null."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json has no {name}")
        return value

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST_SIZE) -> int:
        """Returns a positive size, under the first of several names: of layers, heads, channels, experts or tokens."""
        name = next((name for name in names if self.config.get(name) is not None), names[0])
        value = self(name, default)
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"config.json has {name} {brief(value)}; it takes {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"config.json has {name} {brief(value)}; it takes a positive number")
        return float(value)


def _rope(config: Mapping[str, Any], layout: Layout) -> tuple[dict[str, float], list[str]]:
    """Returns the fields of rotary embeddings, and their settings that models here do not support."""
    tables = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]  # before transformers 5, since
    if not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"config.json has {brief(tables)} for rope_scaling and rope_parameters, and no tables")
    kinds = {brief(table.get("rope_type", table.get("type", "default"))) for table in tables}
    problems = [f"rotary embeddings of type {kind}" for kind in sorted(kinds - {brief("default")})]
    rope = tables[0] | tables[1]
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if layout != "glm4_moe" and share not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor {brief(share)}")
    get = _Reader({"rope_theta": rope.get("rope_theta", config.get("rope_theta")), "partial_rotary_factor": share})
    base = get.number("rope_theta", 1e6 if layout == "mixtral" else 10000.0)
    percent = get.number("partial_rotary_factor", 0.5) if layout == "glm4_moe" else 1.0
    return {"rotary_base": base, "rotary_percent": percent}, problems
