"""Lets ranks that a launcher started find each other.

slurm   translates the place of a task under ``srun`` to the variables that ``torchrun`` sets
rounds  gives each round of ranks, in a job that ``torchrun`` restarts, a store of its own
"""
