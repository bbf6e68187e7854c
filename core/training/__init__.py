"""A pretraining run: its settings, the order of a step, the loop around it, and how it starts, stops and fails.

    config/             all settings, the checks on them, and the command-line flags made from them (`arguments`)
    initialize          process group, parallel groups and seeds
    data                corpus, tokenizer and loaders
    frozen_parameters   parameters that are not trained (adapters: core.transformer.lora)
    train_step          what one optimizer step is, and one validation
    state               what changes with every step
    checkpointing/      the state of a run on disk and back; pretrained: weights alone
    loop                the steps of a run, with skipped_steps and stop_request (signals)
    log/                what is written of a run
    memory_profile      memory over one step, by what it is for
    launch/             starting ranks on one machine, and how a program of several ranks fails

``examples/gpt/pretrain_gpt.py`` shows the order in which a run uses them.
"""
