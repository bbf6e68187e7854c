"""Full sharding by PyTorch FSDP2.

shard_model       applies `fully_shard`, unit by unit
gathered_weights  gathers units ahead of their use, and keeps those of freed units readable
gradient_sums     adds up micro-batches in a tree, for the same bits on any number of ranks
collectives       of each unit: recorded, by direct exchange under gloo, and among neighbours that keep it whole
torch_private     what torch has no public interface for
"""
