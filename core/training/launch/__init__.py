"""Starts ranks, and ends a program of several ranks with one message.

python -m core.training.launch --nproc-per-node 2 script.py --flags

__main__          starts ranks, waits for them, passes signals on
nodes             the machines of ranks, each with a launcher; the first one decides
processes         starts, kills and signals processes; a run takes a signal as a request to stop
supervisor        keeps the survivors of a lost rank: the launcher's part
generations       the rank's part: its program runs again in another group of ranks
copies_folder     the folder in memory for copies of the ranks' state
entry             reads the environment that a launcher sets; sets a program's exit status
"""
