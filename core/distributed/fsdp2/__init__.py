"""Full sharding by PyTorch FSDP2.

shard_model    applies `fully_shard`, unit by unit, sets the collectives of units and gathers them ahead of their use
gradient_sums  adds up micro-batches in a tree, for the same bits on any number of ranks
torch_private  what torch has no public interface for
"""
