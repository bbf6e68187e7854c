"""Full sharding by PyTorch FSDP2.

sharded_model     the model, and the handles that act on all of its units
shard_model       applies `fully_shard`, unit by unit
prefetch          gathers units ahead of their use
gathered_weights  notices writes to gathered weights, and keeps those of freed units readable
gradient_sums     adds up micro-batches in a tree, for the same bits on any number of ranks
collectives       records units' collectives, exchanges directly under gloo, and keeps units whole among neighbours
torch_private     what torch has no public interface for
"""
