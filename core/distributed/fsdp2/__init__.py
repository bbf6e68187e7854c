"""Full sharding by PyTorch FSDP2.

fsdp2_engine      the engine: keeps torch's gathers and reductions to the contract of all wrappers
shard_model       applies `fully_shard`, unit by unit, and keeps saved weights of freed units readable
prefetch          gathers units ahead, in the order of the last forward
unit_collectives  gathers and reduces units, in a tree of micro-batches for the same bits on any number of ranks
torch_private     what torch has no public interface for
"""
