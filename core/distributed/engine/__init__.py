"""The flat engine: gradients, and under ZeRO-3 parameters, in contiguous memory that collectives work in place on.

It carries `DistributedDataParallel` (replicated, ZeRO-1, ZeRO-2) and `FullyShardedDataParallel` (ZeRO-3).

grad_slot      one parameter's place in a bucket, and its gradient there
buffer         the memory, and the buckets that divide it: places of parameters and gradients
reduction      the collectives that reduce a bucket, and its sums over micro-batches in a tree
bucket_group   takes a bucket through a step: reduces its gradients, gathers its parameters
schedule       when buckets are sent, and who waits for parameters that replicas gather
between_steps  parameters that were moved, and ``param.grad``
unit           ZeRO-3: buckets whose parameters are gathered and hidden together, in slots that units share
gathering      ZeRO-3: when units are gathered, in the order of the last step
install        ZeRO-3: builds units, and the hooks around each call of their modules, which gather and cast
"""
