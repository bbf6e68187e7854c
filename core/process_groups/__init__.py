"""Makes the process groups that `core.parallel_state` returns, under Megatron-LM's names there.

rank_generator  computes which ranks form a group, in numbers alone
make_groups     divides the world: sizes, grids, and the groups and meshes along them
current         keeps the groups of this process, and makes the getters that differ only in the kind of group
initialize      makes all groups at once, and destroys them
"""
