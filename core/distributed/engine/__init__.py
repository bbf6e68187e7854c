"""The flat engine: gradients, and under ZeRO-3 parameters, in contiguous memory that collectives work in place on.

It carries `DistributedDataParallel` (replicated, ZeRO-1, ZeRO-2) and `FullyShardedDataParallel` (ZeRO-3).

grad_slot      one parameter's place in a bucket, and its gradient there
buffer         the memory, and the places of parameters in it
reduction      the collectives that reduce a bucket
bucket         one bucket, whose gradients are reduced together, in a step
schedule       when buckets are sent
between_steps  parameters that were moved, and ``param.grad``
unit           buckets whose parameters are gathered together: in place, or under ZeRO-3 in slots that units share
gathering      ZeRO-3: when units are gathered, in the order of the last step, and the hooks around calls of modules
"""
