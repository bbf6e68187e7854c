"""The flat engine: gradients, and under ZeRO-3 parameters, in contiguous memory that collectives work on in place.

It carries `DistributedDataParallel` (replicated, ZeRO-1, ZeRO-2) and `FullyShardedDataParallel` (ZeRO-3).

flat_engine         the engine, and its gradients: from a backward to the step of an optimizer
whole_parameters    parameters that every rank has whole, gathered in place after an update (ZeRO-1, ZeRO-2)
sharded_parameters  parameters of which a rank has shards: when units are gathered, and hooks around calls (ZeRO-3)
unit                buckets whose parameters are gathered together: in place, or in slots that units share
steps               when buckets are sent in a step; between steps parameters that were moved, and ``param.grad``
bucket              one bucket, whose gradients are reduced together: its memory, and its way through a step
buffer              the memory, and the places of parameters there
grad_slot           one parameter's place in a bucket, and the gradient there
"""
