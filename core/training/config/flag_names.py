"""Tables of flags: names that differ from those of the fields, shorthands, headings, hints for Megatron-LM's flags."""

from __future__ import annotations

from typing import Any

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "layernorm_epsilon": ("--norm-epsilon",),
    "bucket_size": ("--ddp-bucket-size",),
    "average_in_collective": ("--ddp-average-in-collective",),
    "grad_reduce_in_fp32": ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-fp32"),
    "deterministic": ("--deterministic", "--deterministic-mode"),
    "use_checkpoint_opt_param_scheduler": ("--use-checkpoint-opt_param-scheduler",),
    "override_opt_param_scheduler": ("--override-opt_param-scheduler",),
}
"""Fields whose flags have other names in Megatron-LM."""

NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
"""Fields that are on by default, with the flag that turns each off."""

NOT_FLAGS = {"params_dtype", "perform_initialization"}
"""Fields that the program sets itself, so they have no flag."""

SHORTHANDS: dict[str, tuple[str, Any, str]] = {
    "use_torch_fsdp2": (
        "ddp",
        bool,
        "Wrap the model in PyTorch's FSDP2: parameters, gradients and optimizer state sharded.",
    ),
    "reshard_to_ranks": (
        "ddp",
        int,
        "`--reshard-after-forward` to a number: between forward and backward keep each parameter whole among so many "
        "ranks, a divisor of those that share it.",
    ),
    "swiglu": ("model", bool, "The MLP is SwiGLU: `--gated-linear-unit --activation-func silu`."),
    "group_query_attention": (
        "model",
        bool,
        "Share key and value heads between query heads; needs `--num-query-groups`.",
    ),
}
"""Flags that are not fields: the section of ``--help`` that lists each one, its type and its help."""

AS_NUMBER = {"reshard_to_ranks": "reshard_after_forward"}
"""Shorthands that set a switch to a number, with the field of the switch."""

DERIVED = {"hidden_size": ("ffn_hidden_size", "kv_channels"), "lr": ("min_lr",)}
"""By field, the fields derived from it when not given: its flag overrides a program's defaults for those."""

ALTERNATIVES = ({"lr_warmup_iters", "lr_warmup_fraction"}, {"swiglu", "activation_func"})
"""Fields that set the same thing: the flag of one overrides a program's default for another."""

TITLES = {
    "model": "Transformer",
    "gpt": "Embeddings, and what is trained",
    "ddp": "Data-parallel wrapper",
    "optimizer": "Optimizer",
    "scheduler": "Learning-rate schedule",
    "data": "Data",
    "checkpoint": "Checkpoints",
    "run": "Run",
}
"""Headings of ``--help``, by section."""


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
