"""What knows FSDP2's private state; a test pins every name (`test_torch_private`), and lists the few places elsewhere.

states           torch's objects for units and parameters
gradients        whole gradients that `no_sync` has left on a rank
iteration        what an exception or an evaluation leaves unfinished
parameters       writes, freezing and marks while parameters are gathered
partial_reshard  parameters that stay whole among a part of the ranks
exchange         gathers without copies and reductions during backward, under gloo
micro_batch_sums sums of micro-batches in a tree, for the same bits on any number of ranks
memory           the tensors that FSDP2 holds
"""

from .exchange import PendingReductions, exchange_directly
from .gradients import (
    allow_ungathered_units,
    complete_accumulated_gradients,
    drop_unsharded_gradients,
    reduce_unsharded_gradients,
    whole_gradients,
)
from .iteration import (
    allocate_gathered_parameters,
    drop_pending_gathers,
    forget_forward_order,
    has_failed_in_backward,
    is_in_forward,
    reset_iteration,
    set_fsdp_root,
)
from .memory import gathered_parameters, gathered_tensors, gathered_tensors_of, gradient_tensors, shard_tensors
from .micro_batch_sums import MicroBatchSums
from .parameters import (
    gathered_versions,
    keep_changes_of_parameters,
    mark_gathered_parameter,
    names_of_parameters,
    shard_versions,
)
from .partial_reshard import PartialReshard, free_partial_shards
from .states import as_fsdp, communication_of, name_of_parameter

__all__ = [
    "MicroBatchSums",
    "PartialReshard",
    "PendingReductions",
    "allocate_gathered_parameters",
    "as_fsdp",
    "communication_of",
    "complete_accumulated_gradients",
    "drop_pending_gathers",
    "drop_unsharded_gradients",
    "exchange_directly",
    "forget_forward_order",
    "free_partial_shards",
    "gathered_parameters",
    "gathered_tensors",
    "gathered_tensors_of",
    "gathered_versions",
    "gradient_tensors",
    "has_failed_in_backward",
    "is_in_forward",
    "keep_changes_of_parameters",
    "mark_gathered_parameter",
    "name_of_parameter",
    "names_of_parameters",
    "reduce_unsharded_gradients",
    "reset_iteration",
    "shard_tensors",
    "shard_versions",
    "set_fsdp_root",
    "allow_ungathered_units",
    "whole_gradients",
]
