"""From text to batches: a memory-mapped corpus, samples packed in a shuffled order, dealt out to ranks.

    text_sources      finds and streams documents (text, JSON lines; plain, .gz, .zst)
    tokenizer         byte-level, a BPE trained on the spot, or any Hugging Face ``tokenizer.json``
    prepare           the two above, in parallel, into a corpus on disk
    indexed_dataset   that corpus: Megatron-LM's ``.bin``/``.idx`` (index_file reads and writes the latter)
    sample_index      computes which tokens make sample i; index_cache stores the result on disk
    gpt_dataset       returns samples of a split as tensors
    data_samplers     assigns samples to steps, micro-batches and ranks

This file imports nothing, so that worker processes of ``prepare`` start without torch.
"""
