"""ZeRO-3 on flat buffers: the engine of `FullyShardedDataParallel`.

memory     this rank's shards, and the memory of their gradients
piece      a unit's parameters of one kind: how they are contiguous, cut and cast
unit       a unit: its parameters as views of a slot, which units share, gathered and hidden
build      makes the units of a plan
gathering  when units are gathered: prefetch in the order of the last step, what may be used when
calls      the hooks around each call of a unit's modules, which gather and cast
"""
