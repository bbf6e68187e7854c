"""Makes the process groups that `core.parallel_state` returns, under Megatron-LM's names there.

make_groups     divides the world: sizes, grids, and the ranks, groups and meshes along them
current         makes all groups at once, keeps them, and makes the getters that differ only in the kind of group
"""
