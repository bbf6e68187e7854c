"""Makes the process groups that `core.parallel_state` returns, under Megatron-LM's names there.

current         keeps the groups of this process, as values
make_groups     divides the world: sizes, grids, and the ranks, groups and meshes along them; makes and destroys all
"""
