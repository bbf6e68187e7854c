"""From text to batches: a memory-mapped corpus, samples packed from it in a shuffled order, and who reads which.

    text_sources      finds and streams documents (text, JSON lines; plain, .gz, .zst)
    tokenizer         byte-level, a BPE trained on the spot, or any Hugging Face ``tokenizer.json``
    prepare           the two above, in parallel, into a corpus on disk
    indexed_dataset   that corpus: Megatron-LM's ``.bin``/``.idx``
    sample_index      which tokens make sample i; index_cache keeps the answer on disk
    gpt_dataset       samples of a split, as tensors
    data_samplers     which sample belongs to which step, micro-batch and rank

Nothing is imported here: worker processes of ``prepare`` start without loading torch.
"""
