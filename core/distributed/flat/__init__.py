"""The flat engine: gradients, and under ZeRO-3 parameters, in contiguous memory that collectives work in place on.

It carries `DistributedDataParallel` (replicated, ZeRO-1, ZeRO-2) and `FullyShardedDataParallel` (ZeRO-3).

flat_engine         the engine: from a backward's gradient to the step of an optimizer
whole_parameters    parameters that every rank has whole, gathered in place after an update (ZeRO-1, ZeRO-2)
sharded_parameters  parameters of which a rank has shards, gathered for their use (ZeRO-3)
gathering           when units are gathered, and the hooks around calls of modules (ZeRO-3)
unit                buckets whose parameters are gathered together: in place, or in slots that units share
steps               when buckets are sent in a step; between steps parameters that were moved, and ``param.grad``
bucket              one bucket, whose gradients are reduced together, in a step
buffer              the memory, and the places of parameters in it
grad_slot           one parameter's place in a bucket, and its gradient there
"""
