"""A pretraining run: its settings, the order of a step, the loop around it, and how it starts, stops and fails.

    config/             all settings, the checks on them, and the command-line flags made from them
    data                corpus, tokenizer, loaders, and batches on their way to the device
    train_step          one optimizer step, and one validation
    state               process group, parallel groups, seeds; all that changes with a step; checks of checkpoints
    checkpointing       saves and loads the state of a run
    recovery            copies a run's state to memory after each step, and continues from it after a lost rank
    loop                the steps of a run, with StopRequest (launch.processes)
    memory_profile      measures memory over one step by category, and draws it
    launch/             starts ranks on one machine, keeps the survivors of a lost rank, and reports failures

``examples/gpt/pretrain_gpt.py`` shows the order in which a run uses them.
"""
