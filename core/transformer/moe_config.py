"""The settings of experts, by Megatron-LM's names: which layers have them, routing, balancing, capacity."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from ..base.errors import ConfigError, ParallelConfigError, out_of_choices, out_of_range
from ..base.megatron_names import ignore
from ..model_parallel_config import ModelParallelConfig

LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
RouterDtype = Literal["fp32", "fp64"]
TokenDropPolicy = Literal["probs", "position"]
TokenDispatcher = Literal["allgather", "alltoall"]


ARCHITECTURE_OF_EXPERTS = (
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype"),
)
"""Fields of `MoEConfig` that are part of a model's architecture."""

OPTIONS_OF_FUNCTION = (*ARCHITECTURE_OF_EXPERTS, "moe_expert_capacity_factor", "moe_token_drop_policy")
"""Fields of `MoEConfig` that change what a model with experts computes. The others change its training alone."""


_OF_EXPERTS = {
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), ConfigError),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), ParallelConfigError),
}
"""Sizes that need experts, each with the error of a model without them."""


@dataclass(kw_only=True)
class MoEConfig(ModelParallelConfig):
    """The part of `TransformerConfig` that describes experts (Shazeer et al., 2017)."""

    num_moe_experts: int | None = None
    """Experts of a layer that has them, each an MLP. None or 0: every layer has one MLP for all tokens."""

    moe_layer_freq: str | int | list[int] = 1
    """Which layers have experts: N, every Nth from the first on, or 0 or 1 for each layer, as a list or as text of
    lists, such as `([0]*3+[1]*58)`."""

    moe_ffn_hidden_size: int | None = None
    """Width inside of an expert, with `gated_linear_unit` of gate and up each. None: `ffn_hidden_size`."""

    moe_router_topk: int = 2
    """Experts of each token."""

    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = ("aux_loss",)
    """Auxiliary losses that balance the load (Fedus et al., 2021), one or several: "aux_loss" of the tokens of a
    micro-batch, "seq_aux_loss" of each sequence, "global_aux_loss" of the micro-batches of all data-parallel ranks, or
    "none"."""

    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """What such a loss is multiplied by, for each type. 0.01 is common."""

    moe_z_loss_coeff: float | None = None
    """Adds the mean square of the logits' logsumexp (Zoph et al., 2022), times this. 0.001 is common."""

    moe_router_score_function: ScoreFunction = "softmax"
    """From logits to scores."""

    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts, and then the best of them, whose probabilities do not add up to one. Without
    it the softmax is over the chosen experts."""

    moe_router_topk_scaling_factor: float | None = None
    """Multiply the probabilities of the chosen experts by this."""

    moe_router_enable_expert_bias: bool = False
    """Balance without a loss: add to each expert's score, for the choice alone, a bias that every step moves by
    `moe_router_bias_update_rate` (Wang et al., 2024). Needs scores by sigmoid or sqrtsoftplus."""

    moe_router_bias_update_rate: float = 1e-3
    """Step of the bias: up for an expert with fewer tokens than the mean, down for one with more."""

    moe_router_num_groups: int | None = None
    """Split the experts into so many groups, of which a token takes `moe_router_group_topk`."""

    moe_router_group_topk: int | None = None
    """Groups of a token."""

    moe_router_dtype: RouterDtype | None = None
    """Compute logits, and the weighted sum of experts' outputs, in this dtype. None: the compute dtype."""

    moe_input_jitter_eps: float | None = None
    """In training, multiply what the router reads by draws from [1 - eps, 1 + eps]."""

    moe_expert_capacity_factor: float | None = None
    """An expert takes at most tokens x top-k / experts x this of a micro-batch on a rank. A token that is dropped gets
    nothing from it. None or a negative number: no token is dropped."""

    moe_token_drop_policy: TokenDropPolicy = "probs"
    """Tokens that an expert over its capacity drops: the least probable, or the last ones."""

    moe_token_dispatcher_type: TokenDispatcher = "allgather"
    """How tokens reach their experts on other ranks: "allgather" sends every token to every expert-parallel rank, and
    takes micro-batches of one shape. "alltoall" sends each to the ranks of its experts."""

    moe_shared_expert_intermediate_size: int | None = None
    """Total width of experts that take every token, next to the others. None: there are none."""

    moe_shared_expert_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of one learned projection."""

    moe_grouped_gemm: bool | None = None
    """Multiply all experts' tokens in one call of `torch.nn.functional.grouped_mm`, where it runs, or else one expert
    after the other. Parameters have the same layout. None: in one call where the GPU has a kernel for it, in bf16 on
    those of capability 9.0 and later."""

    moe_per_layer_logging: bool = False
    """Log the balance of each layer and the load of each expert, in addition to the means over layers."""

    moe_enable_routing_replay: bool = False
    """List each router in `RouterReplay`, as Megatron-LM does, whose class methods record and replay the experts of
    all of them. The contexts `record` and `replay` do not need it."""

    @property
    def expert_ffn_size(self) -> int:
        """Width inside of an expert."""
        return cast(int, self.moe_ffn_hidden_size or self.ffn_hidden_size)  # type: ignore[attr-defined]

    @property
    def auxiliary_losses(self) -> Mapping[str, float]:
        """The coefficient of each balancing loss that is not zero, by type."""
        kinds, coefficients = _several(self.moe_router_load_balancing_type), _several(self.moe_aux_loss_coeff)
        return {kind: c for kind, c in zip(kinds, coefficients, strict=True) if c and kind != "none"}

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(1, self.num_layers + 1)))  # type: ignore[attr-defined]

    def has_experts(self, layer_number: int) -> bool:
        """Returns whether a layer, counted from 1, has experts."""
        if self.num_moe_experts is None:
            return False
        pattern = _layer_pattern(self.moe_layer_freq)
        if isinstance(pattern, int):
            return (layer_number - 1) % pattern == 0
        return 0 < layer_number <= len(pattern) and bool(pattern[layer_number - 1])

    def _resolve_experts(self) -> None:
        if self.num_moe_experts == 0:
            self.num_moe_experts = None
        if (self.moe_expert_capacity_factor or 0) < 0:
            self.moe_expert_capacity_factor = None
        if isinstance(self.moe_layer_freq, str):
            with suppress(ConfigError):  # `_layer_problems` raises it
                self.moe_layer_freq = _layer_pattern(self.moe_layer_freq)  # in one form, because runs are compared
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            values = getattr(self, name)
            if isinstance(values, (tuple, list)):
                setattr(self, name, values[0] if len(values) == 1 else tuple(values))

    def _expert_violations(self) -> Iterator[ConfigError]:
        if self.num_moe_experts is None:
            for name, error in _OF_EXPERTS.items():
                if (value := getattr(self, name)) not in (None, 1):
                    yield error(f"{name} is {value} without num_moe_experts; say how many experts, or drop it")
            options = [entry for entry in fields(MoEConfig) if entry.name.startswith("moe_")]
            values = {e.name: (_several(getattr(self, e.name)), _several(e.default)) for e in options}
            ignore("TransformerConfig", "num_moe_experts is not set, so that there are no experts", **values)
            return
        problems = [
            *out_of_range(self, "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", least=1),
            *out_of_range(self, "moe_shared_expert_intermediate_size", least=1),
            *out_of_range(self, "moe_router_num_groups", "moe_router_group_topk", least=1),
            *out_of_range(self, "moe_z_loss_coeff", "moe_router_bias_update_rate", least=0),
            *out_of_range(self, "moe_expert_capacity_factor", "moe_router_topk_scaling_factor", over=0),
            *out_of_range(self, "moe_input_jitter_eps", over=0, below=1, takes="a number between 0 and 1"),
            *out_of_choices(
                self,
                moe_router_score_function=get_args(ScoreFunction),
                moe_token_drop_policy=get_args(TokenDropPolicy),
                moe_token_dispatcher_type=get_args(TokenDispatcher),
            ),
            *out_of_choices(self, True, moe_router_dtype=get_args(RouterDtype)),
        ]
        yield from map(ConfigError, problems or [*self._routing_problems(), *self._balancing_problems()])
        yield from map(ConfigError, self._layer_problems())

    def _routing_problems(self) -> Iterator[str]:
        experts, topk = self.num_moe_experts or 0, self.moe_router_topk
        if experts % self.expert_model_parallel_size:
            yield (
                f"num_moe_experts is {experts}, which expert_model_parallel_size {self.expert_model_parallel_size} "
                "does not divide; take a multiple of it"
            )
        if topk > experts:
            yield f"moe_router_topk {topk} is above num_moe_experts {experts}; take at most as many"
        if topk == 1 and self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax:
            yield (
                "moe_router_topk is 1 with a softmax over the chosen experts, which is always 1, so that no router "
                "learns; set moe_router_pre_softmax"
            )
        groups, limit = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (limit is None):
            yield (f"moe_router_num_groups is {groups} and moe_router_group_topk {limit}; give both, or neither")
        if groups is None or limit is None:
            return
        if experts % groups:
            yield f"moe_router_num_groups {groups} does not divide num_moe_experts {experts}; take a divisor"
        elif limit > min(groups, topk):
            yield (
                f"moe_router_group_topk {limit} is above moe_router_num_groups {groups} or moe_router_topk {topk}; "
                "lower it"
            )
        elif topk > limit * (experts // groups):
            yield (
                f"moe_router_topk {topk} is above the {limit * (experts // groups)} experts of "
                f"moe_router_group_topk {limit} groups; raise the latter"
            )

    def _balancing_problems(self) -> Iterator[str]:
        kinds, coefficients = _several(self.moe_router_load_balancing_type), _several(self.moe_aux_loss_coeff)
        setting = f"moe_router_load_balancing_type {self.moe_router_load_balancing_type!r}"
        if unknown_kinds := [kind for kind in kinds if kind not in get_args(LoadBalancing)]:
            yield f"{setting}: {unknown_kinds[0]!r} is none of {', '.join(get_args(LoadBalancing))}"
        elif len(set(kinds)) != len(kinds) or (len(kinds) > 1 and "none" in kinds):
            yield f"{setting} contradicts itself; name each loss once, or 'none' alone"
        elif len(kinds) != len(coefficients):
            yield f"{setting} has {len(kinds)} type(s), and moe_aux_loss_coeff {len(coefficients)}; give one for each"
        elif kinds == ("none",) and coefficients[0]:
            yield f"moe_aux_loss_coeff is {coefficients[0]}, and {setting} has no loss; drop one of the two"
        if any(not coefficient >= 0 for coefficient in coefficients):
            yield f"moe_aux_loss_coeff is {self.moe_aux_loss_coeff}; it takes zero or positive numbers"
        if self.moe_router_enable_expert_bias and self.moe_router_score_function == "softmax":
            yield (
                "moe_router_enable_expert_bias is set with moe_router_score_function 'softmax', whose scores compete; "
                "take 'sigmoid'"
            )

    def _layer_problems(self) -> Iterator[str]:
        num_layers: int = self.num_layers  # type: ignore[attr-defined]
        try:
            pattern = _layer_pattern(self.moe_layer_freq)
        except ConfigError as error:
            yield str(error)
            return
        if isinstance(pattern, int):
            if pattern < 1:
                yield f"moe_layer_freq is {pattern}; it takes a positive number, or a list of 0 and 1"
        elif set(pattern) - {0, 1} or 1 not in pattern or (num_layers and len(pattern) != num_layers):
            yield (
                f"moe_layer_freq is {self.moe_layer_freq!r}; it takes 0 or 1 for each of num_layers {num_layers}, "
                "with experts in one layer or more"
            )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _layer_pattern(frequency: str | int | Sequence[int]) -> int | list[int]:
    """Reads `moe_layer_freq`. Text may only have integers, lists, + and x.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(frequency, int):
        return frequency
    if not isinstance(frequency, str):
        return list(frequency)
    try:
        return cast("int | list[int]", _evaluate(ast.parse(frequency.strip(), mode="eval").body))
    except (SyntaxError, TypeError, ValueError, RecursionError):
        raise ConfigError(
            f"moe_layer_freq is {frequency!r}; it takes a number, or lists of 0 and 1 as ([0]*3+[1]*58)"
        ) from None


_MOST_LAYERS = 100_000


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        values = [_evaluate(element) for element in node.elts]
        if all(type(value) is int for value in values):
            return values
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {list, int}:
            size = len(left) * right if isinstance(left, list) else left * len(right)
            if size <= _MOST_LAYERS:
                return left * right
    raise ValueError
