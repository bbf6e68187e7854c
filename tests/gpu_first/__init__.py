"""What to run first on a machine with a GPU, in stages of at most eight minutes: `make gpu-first`.

`stages` has what is run, in the order in which it tells most. `__main__` runs it: each command with a time limit
(`commands`), everything that it shows in one folder and one archive (`results`). `take_in` is the way back: it copies
an archive's golden values and figures into a checkout of the same commit (`checkout`). `wheels` brings along what the
Python there lacks.
"""
