"""The flat engine: gradients, and under ZeRO-3 parameters, in contiguous memory that collectives work in place on.

It carries `DistributedDataParallel` (replicated, ZeRO-1, ZeRO-2) and `FullyShardedDataParallel` (ZeRO-3).

grad_slot      one parameter's place in a bucket, and its gradient there
buffer         the memory, the places of parameters in it, and the collectives that reduce a bucket
bucket         one bucket, whose gradients are reduced together, in a step
steps          when buckets are sent in a step; between steps parameters that were moved, and ``param.grad``
unit           buckets whose parameters are gathered together: in place, or under ZeRO-3 in slots that units share
gathering      ZeRO-3: when units are gathered, and the hooks around calls of modules

Two files are FSDP2's too:

gathered_units  which units to gather ahead, whether gathered ones were written, what neighbouring ranks keep
gradient_tree   sums of micro-batches in a fixed order
"""
