"""How ranks that a launcher started find each other. The library takes any group that exists, and needs none of it.

default_group   joins the default process group
environment     checks what the environment says about a rank
launchers       Slurm's variables, and a store of its own for each round of ranks of torchrun
job_secret      the secret that all parts of a job know, and what is signed by it
signed_store    a store whose values are signed
"""
