"""Starts ranks on this machine, and ends a program of several ranks with one message.

python -m core.training.launch --nproc-per-node 2 script.py --flags

ranks             starts ranks, waits for them, passes signals on
signals           counts signals to a launcher; a run takes one as a request to stop; ends a rank with its launcher
entry             reads the environment that a launcher sets; sets a program's exit status
"""
