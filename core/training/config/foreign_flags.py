"""Hints for flags of Megatron-LM that do not exist here: what to do instead."""

from __future__ import annotations

_HERE = "this is always on here; drop it"
_ALONE = "there is one implementation here; drop it"
_NOT_YET = "not here yet; drop it"

_HINTS = {
    "tokenizer-type": "it is the tokenizer.json next to the corpus; write --tokenizer-model for another",
    "vocab-file": "write --tokenizer-model with a tokenizer.json instead, or --vocab-size with a number",
    "merge-file": "write --tokenizer-model with a tokenizer.json instead, which holds the merges",
    "train-samples": "write --train-iters instead: samples divided by the global batch size",
    "lr-decay-samples": "write --lr-decay-iters instead: samples divided by the global batch size",
    "no-load-optim": _NOT_YET,
    "no-load-rng": "not here yet; random streams start again where the number of ranks changes",
    "finetune": "write --pretrained-checkpoint in the place of --load instead: its weights alone are read",
    "recompute-activations": "write --recompute-granularity selective instead",
    "use-rotary-position-embeddings": "write --position-embedding-type rope instead",
    "use-mcore-models": _HERE,
    "transformer-impl": _ALONE,
    "use-flash-attn": "the fastest attention kernel is chosen here; drop it, or write --attention-backend flash",
    "cp-comm-type": "keys and values are all-gathered here, which is all there is; drop it",
    "no-create-attention-mask-in-dataloader": "no mask is ever made here; drop it",
    "exit-interval": "write --train-iters instead, and --lr-decay-iters for the length of the schedule",
    "exit-duration-in-mins": "not here yet; SIGTERM ends a run with a checkpoint (timeout --signal TERM 60m ...)",
    "ckpt-format": _ALONE,
    "save-retain-interval": "write --keep-last with the number of checkpoints to keep, and --keep-every with this",
    "use-dist-ckpt": _HERE,
    "append-eod": "prepare_data.py always ends documents so; drop it",
    "mock-data": "without --data-path there is a corpus already; drop it",
    "distributed-backend": "it follows from the device, nccl on GPUs and gloo on CPUs; drop it",
    "skip-train": "not here yet; generate.py runs a trained model",
}
"""Hints by the name of the flag, without its dashes."""


def hint_for_foreign_flag(flag: str) -> str | None:
    """Returns a line about a flag of Megatron-LM that does not exist here; None for any other flag."""
    name = flag.lstrip("-").replace("_", "-")
    return f"Unknown option: --{name}: {_HINTS[name]}" if name in _HINTS else None
