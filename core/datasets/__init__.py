"""From a corpus to batches: samples packed in a shuffled order, assigned to ranks.

    indexed_dataset   a memory-mapped corpus: Megatron-LM's ``.bin``/``.idx``
    sample_index      computes which tokens make sample i, and caches the result on disk
    gpt_dataset       returns samples of a split as tensors
    data_samplers     assigns samples to steps, micro-batches and ranks

``examples/gpt/prepare_data.py`` makes a corpus of text. This file imports nothing, so that its worker processes start
without torch.
"""
