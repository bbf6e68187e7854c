"""The settings of a transformer: one dataclass, with Megatron-LM's field names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ..base.errors import ConfigError, ParallelConfigError, out_of_choices, out_of_range, raise_together
from ..base.initialization import Initializer
from ..base.megatron_names import takes_megatron_fields
from ..base.text import nearest_multiples
from .attention_backend import AttentionBackend
from .moe_config import MoEConfig
from .pipeline_stages import stages_of


@dataclass(frozen=True)
class Normal:
    """Fills with draws from N(0, sigma^2). Instances with the same sigma compare equal, also across processes."""

    sigma: float

    def __call__(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Fills `tensor` in place, by default from torch's default generator, and returns it."""
        return torch.nn.init.normal_(tensor, 0.0, self.sigma, generator)


def init_method_normal(sigma: float) -> Normal:
    """Returns an initializer that draws from N(0, sigma^2)."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Returns an initializer that draws from N(0, sigma^2 / (multiplier x num_layers)), for output projections.

    With 2, the branches of a layer, a sum over all branches of the residual stream has variance sigma^2.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


Activation = Literal["gelu", "gelu_tanh", "silu", "squared_relu"]
ActivationFunction = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(input_: torch.Tensor) -> torch.Tensor:
    return F.gelu(input_, approximate="tanh")


def _squared_relu(input_: torch.Tensor) -> torch.Tensor:
    return F.relu(input_).square()


ACTIVATIONS: dict[Activation, ActivationFunction] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "squared_relu": _squared_relu,
}


def activation_function(activation: Activation | ActivationFunction) -> ActivationFunction:
    """Returns the function that a name stands for, or a function as it is."""
    return activation if callable(activation) else ACTIVATIONS[activation]


Normalization = Literal["LayerNorm", "RMSNorm"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "rowwise"]
RecomputeGranularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]


_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")

_REQUIRED_FLAG = {"required_flag": True}
"""Makes a field required on the command line."""

_CODE = {"is_code": True}
"""Marks a field that neither a flag nor JSON can express."""


@dataclass(frozen=True)
class _FromStd(Normal):
    """The initializer of `init_method_std`, derived again when `dataclasses.replace` changes that."""


@takes_megatron_fields
@dataclass(kw_only=True)
class TransformerConfig(MoEConfig):
    """The shape of a transformer and how it is computed.

    Sizes of 0, Megatron-LM's defaults, are for modules that do not need them; a model refuses them. Megatron-LM's
    other fields are refused by name if they would change what is computed and do not have their defaults; the rest is
    ignored with a warning.

    Fields that default to None get their values once, in the constructor, from other fields; `dataclasses.replace`
    therefore keeps values that were derived from the old sizes.

    Raises:
        ConfigError: all errors in one message, separated by |; a `ParallelConfigError` if all are about parallel
            degrees.
    """

    num_layers: int = field(default=0, metadata=_REQUIRED_FLAG)
    """Number of transformer layers."""

    hidden_size: int = field(default=0, metadata=_REQUIRED_FLAG)
    """Width of the residual stream."""

    num_attention_heads: int = field(default=0, metadata=_REQUIRED_FLAG)
    """Number of query heads of a layer."""

    num_query_groups: int = None  # type: ignore[assignment]  # an int once __post_init__ has run, as for those below
    """Key and value heads of a layer, each shared by heads / groups query heads (Ainslie et al., 2023). None: one
    for every query head. Fewer than tensor-parallel ranks is slower: each layer gathers its projection."""

    ffn_hidden_size: int = None  # type: ignore[assignment]
    """Width of the MLP, or of gate and up each with `gated_linear_unit`. None means 4 x hidden_size."""

    kv_channels: int = None  # type: ignore[assignment]
    """Width of one head. None: hidden_size / num_attention_heads."""

    hidden_dropout: float = 0.1
    """Probability of dropping an element after the embedding, the attention and the MLP."""

    attention_dropout: float = 0.1
    """Probability of dropping an attention weight. torch's fused kernel for CPU has no dropout: with dropout,
    attention on CPU needs memory quadratic in the sequence length."""

    attention_backend: AttentionBackend = "auto"
    """The kernel of attention, by Megatron-LM's names. "auto": the one that torch chooses. "flash", "fused" (of
    cuDNN) and "unfused" ("local" is the same): that one, or an error where it cannot run. "flash3": FlashAttention-3
    as the flash kernel of the whole process, by its package `flash_attn_interface`, on GPUs of capability 9.0 and
    without dropout. A member of Megatron-LM's `AttnBackend` becomes its name."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance (LayerNorm) or to the mean square (RMSNorm)."""

    normalization: Normalization = "LayerNorm"
    """Kind of every norm: "LayerNorm" or "RMSNorm"."""

    add_bias_linear: bool = True
    """Biases in the projections of attention and MLP."""

    add_qkv_bias: bool = False
    """Add a bias to the query, key and value projection even without `add_bias_linear`."""

    gated_linear_unit: bool = False
    """Whether the MLP multiplies activation(gate) by an up branch. With "silu" it is SwiGLU (Shazeer, 2020)."""

    activation_func: Activation | ActivationFunction = "gelu"
    """Activation of the MLP: "gelu" (exact), "gelu_tanh" (its tanh approximation, as in GPT-2), "silu" or
    "squared_relu" (So et al., 2021), or any function of a tensor. `F.gelu` and `F.silu` become their names."""

    qk_layernorm: bool = False
    """Norm each head's query and key before the rotation."""

    rotary_percent: float = 1.0
    """Share of a head's channels that rotary embeddings rotate. The rest is unchanged."""

    rotary_base: float = 10000.0
    """Base of the geometric series of rotary wavelengths."""

    fp8: Fp8Format | None = None
    """Compute the linear layers of transformer layers in fp8: "e4m3" throughout, or "hybrid", with gradients in e5m2.
    Embeddings, the projection to the vocabulary and experts stay in the model's precision. Needs `fp8_recipe`."""

    fp8_recipe: Fp8Recipe | None = None
    """Scales of `fp8`, from the matrices of each product: "tensorwise", one for a matrix, or "rowwise", one for a row,
    in e4m3. Megatron-LM's default, delayed scaling, does not exist here, so that None is none of them."""

    init_method_std: float = 0.02
    """Standard deviation of initial weights. It is divided by sqrt(2 x num_layers) for projections that end in the
    residual stream (Radford et al., 2019)."""

    init_method: Initializer = field(default=None, metadata=_CODE)  # type: ignore[assignment]
    """Fills a weight that reads the residual stream. None means a normal distribution of `init_method_std`."""

    output_layer_init_method: Initializer = field(default=None, metadata=_CODE)  # type: ignore[assignment]
    """Fills a weight that writes to the residual stream. None means a normal distribution, divided as
    `init_method_std` says."""

    embedding_init_method_std: float | None = None
    """Standard deviation of the initial embeddings of words and positions. None: `init_method_std`."""

    embedding_init_method: Initializer = field(default=None, metadata=_CODE)  # type: ignore[assignment]
    """Fills the embeddings. None: `init_method`, or a normal distribution of `embedding_init_method_std`."""

    recompute_granularity: RecomputeGranularity | None = None
    """What to recompute in backward instead of saving it: "selective" for the core of attention (Korthikanti et al.,
    2022), "full" for whole layers, None for nothing."""

    recompute_method: RecomputeMethod | None = None
    """Layers that "full" recomputes: "uniform" for all, in chunks of `recompute_num_layers` of which only the input is
    saved, "block" for the first `recompute_num_layers`, each a chunk of its own."""

    recompute_num_layers: int | None = None
    """Number of layers for `recompute_method`."""

    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank, which also embeds. None: as many as others."""

    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank, which also computes the loss. None: as many as others."""

    def __post_init__(self) -> None:
        violations: list[ConfigError] = []
        try:
            super().__post_init__()
            if self.num_layers > 0:
                stages_of(self)
        except ConfigError as error:
            violations.append(error)
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        divides = self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0
        if self.kv_channels is None and divides:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if isinstance(self.attention_backend, Enum):  # Megatron-LM's `AttnBackend`
            self.attention_backend = self.attention_backend.name
        self._resolve_experts()
        if callable(self.activation_func):
            names = {function: name for name, function in ACTIVATIONS.items()}
            self.activation_func = names.get(self.activation_func, self.activation_func)
        violations += self._violations()
        raise_together(violations, " | ")
        scaled = scaled_init_method_normal(self.init_method_std, max(1, self.num_layers)).sigma
        stds = {"init_method": self.init_method_std, "output_layer_init_method": scaled}
        for name, std in (stds | {"embedding_init_method": self.embedding_init_method_std}).items():
            if getattr(self, name) is None or isinstance(getattr(self, name), _FromStd):
                setattr(self, name, self.init_method if std is None else _FromStd(std))

    @property
    def fp8_products(self) -> str:
        """The recipe of :func:`shardstack.fp8.use_fp8_products` that `fp8` and `fp8_recipe` name."""
        return "tensorwise_e4m3" if (self.fp8, self.fp8_recipe) == ("e4m3", "tensorwise") else str(self.fp8_recipe)

    def check_sizes_given(self, *names: str) -> None:
        """Checks sizes that a module needs.

        Args:
            names: names of sizes; by default all sizes of a transformer.

        Raises:
            ConfigError: a size is 0.
        """
        for name in names or _SIZES:
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} is 0; it takes a positive number")

    def check_split(self, tensor_parallel_size: int) -> None:
        """Raises the first ConfigError of sizes that cannot be split over the ranks of a tensor-parallel group."""
        for violation in self._size_violations(tensor_parallel_size):
            raise violation

    def _violations(self) -> Iterator[ConfigError]:
        negative = [*out_of_range(self, *_SIZES, "kv_channels", least=0, takes="a positive number")]
        yield from map(ConfigError, negative)
        if not negative and all(getattr(self, name) for name in _SIZES):
            yield from self._size_violations(max(1, self.tensor_model_parallel_size))
        chance, share = "a probability from 0 to below 1", "a share above 0 and up to 1"
        problems = [
            *out_of_range(self, "hidden_dropout", "attention_dropout", least=0, below=1, takes=chance),
            *out_of_range(self, "rotary_percent", over=0, most=1, takes=share),
            *out_of_range(self, "layernorm_epsilon", "rotary_base", over=0),
            *out_of_range(self, "init_method_std", "embedding_init_method_std", least=0),
        ]
        own = {} if callable(self.activation_func) else {"activation_func": get_args(Activation)}
        choices = {"normalization": get_args(Normalization), **own, "attention_backend": get_args(AttentionBackend)}
        yield from map(ConfigError, [*problems, *out_of_choices(self, **choices)])
        if self.context_parallel_size > 1 and self.attention_backend in ("fused", "unfused", "local"):
            yield ConfigError(
                f"attention_backend is {self.attention_backend!r} with context_parallel_size "
                f"{self.context_parallel_size}, which needs torch's flash kernel; write 'auto' or 'flash'"
            )
        if self.fp8 is not None:
            yield from map(ConfigError, out_of_choices(self, fp8=get_args(Fp8Format), fp8_recipe=get_args(Fp8Recipe)))
        if (self.fp8, self.fp8_recipe) == ("hybrid", "rowwise"):
            yield ConfigError("fp8 is 'hybrid' with fp8_recipe 'rowwise', which takes e4m3 alone; write fp8 'e4m3'")
        yield from self._recompute_violations()
        yield from self._expert_violations()

    def _size_violations(self, tp: int) -> Iterator[ConfigError]:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.kv_channels is None:
            yield ConfigError(
                f"num_attention_heads {heads} does not divide hidden_size {self.hidden_size}; "
                f"take a hidden_size of {nearest_multiples(self.hidden_size, heads)}, or give kv_channels"
            )
        dense = ("tensor_model_parallel_size", tp)
        expert_tp = self.expert_tensor_parallel_size
        degrees = {
            "num_attention_heads": dense,
            "ffn_hidden_size": dense,
            "moe_ffn_hidden_size": dense if expert_tp is None else ("expert_tensor_parallel_size", expert_tp),
            "moe_shared_expert_intermediate_size": dense,
        }
        for name, (degree, ranks) in degrees.items():
            size = getattr(self, name) or 0
            if ranks > 0 and size % ranks:
                fitting = nearest_multiples(size, ranks)
                yield ParallelConfigError(f"{name} {size} cannot be split over {degree} {ranks}; take {fitting}")
        channels = self.kv_channels or 0
        if heads % groups:
            yield ConfigError(
                f"num_query_groups {groups} does not divide num_attention_heads {heads}; take "
                f"{_fitting_groups(groups, heads, tp, channels)} groups"
            )
        elif groups != heads and groups % tp and (tp % groups or (heads + 2 * groups) * channels % tp):
            yield ParallelConfigError(
                f"num_query_groups {groups} cannot be split over tensor_model_parallel_size {tp}, nor its ranks over "
                f"the groups; take {_fitting_groups(groups, heads, tp, channels)}"
            )

    def _recompute_violations(self) -> Iterator[ConfigError]:
        granularity, method, number = self.recompute_granularity, self.recompute_method, self.recompute_num_layers
        kinds, methods = get_args(RecomputeGranularity), get_args(RecomputeMethod)
        yield from map(ConfigError, out_of_choices(self, True, recompute_granularity=kinds, recompute_method=methods))
        if granularity == "full":
            if method is None:
                yield ConfigError('recompute_granularity "full" needs recompute_method: "uniform" or "block"')
            if number is None or not 1 <= number <= max(1, self.num_layers):
                yield ConfigError(
                    f'recompute_granularity "full" needs recompute_num_layers from 1 to {self.num_layers} '
                    f"(num_layers), and it is {number}"
                )
        elif method is not None or number is not None:
            names = [n for n in ("recompute_method", "recompute_num_layers") if getattr(self, n) is not None]
            yield ConfigError(
                f"{' and '.join(names)} given with recompute_granularity {granularity!r}; drop it, or take 'full'"
            )


def _fitting_groups(groups: int, heads: int, tp: int, channels: int) -> str:
    """Returns the nearest numbers of query groups below and above `groups` that fit the heads and the ranks."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    fitting = [n for n in divisors if n % tp == 0 or (tp % n == 0 and (heads + 2 * n) * channels % tp == 0)]
    fitting = fitting or divisors  # if none fits, the heads do not fit the ranks
    below, above = (n for n in fitting if n < groups), (n for n in fitting if n > groups)
    return " or ".join(str(n) for n in (max(below, default=None), min(above, default=None)) if n is not None)
