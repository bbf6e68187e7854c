"""A pretraining run: its settings, the order of a step, the loop around it, and how it starts, stops and fails.

config, arguments          all settings, and the command-line flags made from them
initialize                 process group, parallel groups and seeds
train_step                 what one optimizer step is, and one validation
loop, log, stop            the steps of a run, what is written of them, and how a signal ends them
checkpointing              all of a run's state, on disk and back
generation, bigram         text from a model, and the baseline that it has to beat
entry, launch              one line for a mistake, one traceback for a crash; starting ranks on one machine
"""
