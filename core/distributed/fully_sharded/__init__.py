"""ZeRO-3 on flat buffers: what `FullyShardedDataParallel` does to a model.

memory     this rank's shards, and the slots that units are gathered into
unit       a unit: its parameters as views of a slot, gathered and hidden
gathering  when units are gathered: hooks of forward and backward, prefetch in the order of the last step
"""
