"""Mixtures of experts (Shazeer et al., 2017), by Megatron-LM's names: router, balancing, experts, shared experts.

moe_layer        route, drop, dispatch to experts, bring back; the end of a step: biases and statistics
router           from logits to experts and probabilities; the load of experts and their bias
load_balancing   auxiliary losses, and how they join the loss of a model
dispatch         capacity; sorts tokens by expert, brings them to the ranks of their experts, and outputs back
experts          the matrices of all experts, in one call or one after the other; experts that take every token; cuts
                 those of models of transformers over ranks
"""

from ...base.megatron_names import absent_names
from .experts import cut_experts
from .load_balancing import add_auxiliary_losses
from .moe_layer import MoELayer, logged_statistics

__all__ = ["MoELayer", "add_auxiliary_losses", "cut_experts", "logged_statistics"]


__getattr__ = absent_names(__name__)
