"""Starts ranks, and ends a program of several ranks with one message.

python -m shardstack.training.launch --nproc-per-node 2 script.py --flags

__main__          starts the launcher, and waits for its ranks
supervisor        the launcher that decides: keeps the survivors of a lost rank
follower          the launcher of another machine: does as the first one says
joining           launchers of other machines join the first one, and prove that they are of its job
nodes             the machines of ranks, this one and others
lines, messages   sockets between launchers and ranks, and what is said there
processes         starts, kills and signals processes; a run takes a signal as a request to stop
copies_folder     the folder in memory for copies of the ranks' state
entry             reads the environment that a launcher sets; sets a program's exit status
generations       the rank's part: its program runs again in another group of ranks
link              a rank's end of the socket to its launcher
"""
