"""Mixtures of experts (Shazeer et al., 2017), by Megatron-LM's names: router, balancing, experts, shared experts.

moe_layer        route, drop, dispatch to experts, bring back
router           logits, the load of experts and their bias
routing          from logits to experts and probabilities
load_balancing   auxiliary losses, and how they join the loss of a model
permutation      capacity; sorts tokens by expert and back
dispatch         brings tokens to the ranks of their experts, and outputs back
experts          the matrices of all experts, in one call or one after the other
shared_experts   experts that take every token
stock_experts    cuts the experts of models of transformers over ranks
step             ends a step: biases and statistics
"""

from ...base.megatron_names import absent_names
from .experts import GroupedMLP
from .load_balancing import add_auxiliary_losses
from .moe_layer import MoELayer
from .router import TopKRouter
from .shared_experts import SharedExpertMLP
from .step import finish_step, logged_statistics, restart_step
from .stock_experts import cut_experts

__all__ = [
    "GroupedMLP",
    "MoELayer",
    "SharedExpertMLP",
    "TopKRouter",
    "add_auxiliary_losses",
    "cut_experts",
    "finish_step",
    "logged_statistics",
    "restart_step",
]


__getattr__ = absent_names(__name__)
