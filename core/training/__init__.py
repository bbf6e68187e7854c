"""A pretraining run: its settings, the order of a step, the loop around it, and how it starts, stops and fails.

    config, sections        all settings, and the checks on them
    arguments               the command-line flags made from them; foreign_flags: hints for those of Megatron-LM
    initialize              process group, parallel groups and seeds
    data                    corpus, tokenizer and loaders
    frozen                  parameters that are left as they are (adapters beside them: core.transformer.lora)
    train_step              what one optimizer step is, and one validation
    state, checkpointing    what moves on with a run, and how it gets to disk and back
    loop, log, stop         the steps of a run, what is written of them, and how a signal ends them
    memory_profile          memory over one step, by what it is for
    patience                files that wait for a full disk
    skips                   what becomes of steps whose gradients are not finite
    generation, bigram      text from a model, and the baseline that it has to beat
    entry, launch           one line for a mistake, one traceback for a crash; starting ranks on one machine
    parent_death            ranks that end with their launcher

``examples/gpt/pretrain_gpt.py`` shows the order in which a run uses them.
"""
