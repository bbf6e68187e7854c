"""Full sharding by PyTorch FSDP2.

shard_model       applies `fully_shard`, unit by unit, and sets the collectives of units
gathered_weights  gathers units ahead of their use, and keeps those of freed units readable
gradient_sums     adds up micro-batches in a tree, for the same bits on any number of ranks
torch_private     what torch has no public interface for
"""
