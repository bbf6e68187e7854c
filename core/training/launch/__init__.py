"""How ranks start and end: one command that starts them on this machine, and how a program of several ranks fails.

python -m core.training.launch --nproc-per-node 2 script.py --flags

ranks             starts them, waits for them, passes signals on; `signals` counts these
parent_death      ends a rank with its launcher
environment       what a launcher says to a rank, checked
entry             a program's exit status: one line for a user's mistake, one traceback for a crash
"""
