"""Full sharding by PyTorch FSDP2.

sharded_model         the model, and the handles that act on all of its units
shard_model           applies `fully_shard`, unit by unit
prefetch              gathers units ahead of their use
micro_batches         keeps units gathered between micro-batches
forward_methods       gathers parameters around methods other than `forward`
gathered_values       notices writes to shards and to gathered parameters
collectives           records units' collectives, and exchanges directly under gloo
torch_private         what knows torch's private state
"""
