"""Full sharding by PyTorch FSDP2.

shard_model       applies `fully_shard`, unit by unit, gathers units ahead, and keeps those of freed units readable
unit_collectives  gathers and reduces units, in a tree of micro-batches for the same bits on any number of ranks
torch_private     what torch has no public interface for
"""
