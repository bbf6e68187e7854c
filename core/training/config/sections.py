"""Sections of a run's settings: embeddings, schedule, data, checkpoints, and the run itself.

Each section checks itself when it is built. `PretrainConfig` combines them with those of model, wrapper and optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...base.errors import ConfigError, check_range
from ...dist_checkpointing import Retention
from ...num_microbatches_calculator import batch_schedule
from ...transformer.lora import LoRATarget


@dataclass(kw_only=True)
class GPTConfig:
    """Parts of a GPT outside of its transformer layers.

    Raises:
        ConfigError: a size is below one, or settings of adapters contradict each other.
    """

    max_position_embeddings: int | None = None
    """Longest sequence, in tokens, that the model can take. None: the sequence length of training."""

    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """How positions enter: a learned table, or rotary embeddings."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output projection its own weight instead of the embedding's."""

    freeze: tuple[str, ...] = ()
    """Do not train parameters whose names match these shell patterns, such as `decoder.layers.0.*`. May be given
    repeatedly."""

    lora_rank: int | None = None
    """Train only LoRA adapters of this rank, added to frozen linear layers. None: train the whole model."""

    lora_alpha: float | None = None
    """Scale an adapter's output by `lora_alpha / lora_rank`. None: `lora_rank`, which scales by 1."""

    lora_targets: tuple[LoRATarget, ...] | None = None
    """Layers that have adapters. None: all of these."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this number of entries, at every tensor-parallel size, so that one
    checkpoint fits all of them. The tensor-parallel size has to divide it."""

    def __post_init__(self) -> None:
        check_range(self, "max_position_embeddings", "make_vocab_size_divisible_by", "lora_rank", least=1)
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is set and lora_rank is not; give the rank of the adapters")
            return
        check_range(self, "lora_alpha", over=0)
        if self.freeze:
            raise ConfigError(
                f"lora_rank {self.lora_rank} freezes all else, and freeze {' '.join(self.freeze)} is given; drop one"
            )


@dataclass(kw_only=True)
class SchedulerConfig:
    """Schedules of learning rate and weight decay, in iterations, or in samples for a run whose length is in samples.

    Raises:
        ConfigError: a length is below zero, or the warm-up is given in two ways.
    """

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay from the peak to the minimal learning rate."""

    lr_decay_iters: int | None = None
    """Iterations until the minimal learning rate is reached. None: the length of the run."""

    lr_decay_samples: int | None = None
    """`lr_decay_iters` in samples, for a run with `train_samples`. None: the length of the run."""

    lr_warmup_iters: int = 0
    """Iterations of linear rise from `lr_warmup_init` to the peak."""

    lr_warmup_samples: int = 0
    """`lr_warmup_iters` in samples, for a run with `train_samples`."""

    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a share of the decay, instead of `lr_warmup_iters` or `lr_warmup_samples`."""

    lr_warmup_init: float = 0.0
    """Learning rate at which the warm-up starts."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of a WSD (warm-up, stable, decay) schedule."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of that last part."""

    lr_wsd_decay_samples: int | None = None
    """`lr_wsd_decay_iters` in samples, for a run with `train_samples`."""

    start_weight_decay: float | None = None
    """Weight decay at the first iteration, if the style is not constant."""

    end_weight_decay: float | None = None
    """Weight decay at the last iteration, if the style is not constant."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from `start_weight_decay` to `end_weight_decay`."""

    use_checkpoint_opt_param_scheduler: bool = False
    """On `load`, continue the checkpoint's schedule. Without this and the next setting, the two must be equal."""

    override_opt_param_scheduler: bool = False
    """On `load`, use this schedule instead of the checkpoint's."""

    def __post_init__(self) -> None:
        check_range(self, "lr_decay_iters", "lr_wsd_decay_iters", "lr_decay_samples", "lr_wsd_decay_samples", least=1)
        check_range(self, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init", least=0)
        check_range(self, "start_weight_decay", "end_weight_decay", least=0)
        if self.lr_warmup_fraction is not None:
            if steps := self.lr_warmup_iters or self.lr_warmup_samples:
                raise ConfigError(
                    f"lr_warmup_{'iters' if self.lr_warmup_iters else 'samples'} {steps} and lr_warmup_fraction "
                    f"{self.lr_warmup_fraction} both say how long to warm up; drop one"
                )
            check_range(self, "lr_warmup_fraction", least=0, below=1, takes="0 up to, not with, 1")
        if self.lr_decay_style == "WSD" and (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples) is None:
            raise ConfigError("lr_decay_style WSD needs lr_wsd_decay_iters, the length of its last part")
        decays = (self.start_weight_decay, self.end_weight_decay)
        if (self.weight_decay_incr_style == "constant") != (decays == (None, None)) or decays.count(None) == 1:
            raise ConfigError(
                f"weight_decay_incr_style is {self.weight_decay_incr_style}, with start_weight_decay {decays[0]} and "
                f"end_weight_decay {decays[1]}; a constant style takes neither (set weight_decay), the others both"
            )


@dataclass(kw_only=True)
class DataConfig:
    """The corpus, and the number of samples in a step.

    Raises:
        ConfigError: a size is below one.
    """

    data_path: Path | None = None
    """Corpus: the path of its .bin and .idx files without the suffix."""

    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""

    data_cache_path: Path | None = None
    """Folder of the sample index. None: next to the corpus."""

    mock_data: bool = False
    """Train on synthetic documents, which count up, in the place of a corpus."""

    tokenizer_type: str | None = None
    """Tokenizer by Megatron-LM's name: GPT2BPETokenizer reads `vocab_file` and `merge_file`, HuggingFaceTokenizer and
    those of Llama a tokenizer.json, and NullTokenizer has `vocab_size` ids and no text. None: by the files."""

    tokenizer_model: Path | None = None
    """Tokenizer file (tokenizer.json) of the corpus, or its folder. None: the one next to it."""

    vocab_file: Path | None = None
    """Vocabulary of a byte-level BPE (vocab.json of GPT-2), with `merge_file`, in the place of `tokenizer_model`."""

    merge_file: Path | None = None
    """Merges of that BPE (merges.txt)."""

    vocab_size: int | None = None
    """Entries of the vocabulary, for a corpus without a tokenizer. None: the tokenizer's."""

    seq_length: int
    """Tokens of a sample."""

    micro_batch_size: int
    """Samples that a rank runs through the model at once."""

    global_batch_size: int | None = None
    """Samples of a step over all ranks. None: one micro-batch a rank."""

    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: begin with a global batch of START samples, and raise it by INCREMENT, in equal parts
    of the first SAMPLES samples, to `global_batch_size`."""

    step_batch_size_schedule: tuple[str, ...] | None = None
    """Global batches by the number of tokens so far, as 0:16 2.4B:320 12B:1536. Suffixes: K, M, B, T. The last is
    `global_batch_size`."""

    num_workers: int = 2
    """Processes that read samples, on each rank. 0 reads in the rank's own, on a GPU in a thread of it."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""

    reset_attention_mask: bool = False
    """Hide the tokens of one document from those of another in the same sample."""

    eod_mask_loss: bool = False
    """Mask the loss of the token that follows an end of document."""

    def __post_init__(self) -> None:
        check_range(self, "vocab_size", "seq_length", "micro_batch_size", "global_batch_size", least=1)
        check_range(self, "num_workers", least=0)
        if (self.rampup_batch_size or self.step_batch_size_schedule) is not None:
            self.global_batch_size = self.batch_schedule(self.global_batch_size)[-1][1]

    def batch_schedule(self, global_batch_size: int | None) -> tuple[tuple[int, int], ...]:
        """Returns the sample from which on each global batch size holds, and that size."""
        return batch_schedule(
            global_batch_size, self.rampup_batch_size, self.step_batch_size_schedule, self.seq_length
        )


@dataclass(kw_only=True)
class CheckpointConfig:
    """The folder of a run, and its checkpoints.

    Raises:
        ConfigError: an interval or a number is below one, or a setting would have no effect.
    """

    save: Path | None = None
    """Folder of the run's checkpoints, log and loss curve. None: the folder of `load`, or nothing is written."""

    load: Path | None = None
    """Folder of a run to continue from its latest checkpoint, or one of its checkpoints."""

    pretrained_checkpoint: Path | None = None
    """Start with these weights and a new optimizer, unless a run is continued: a run's folder or checkpoint, a model
    of Hugging Face's (config.json and safetensors), or a torch_dist checkpoint of Megatron-LM's."""

    moe_use_upcycling: bool = False
    """Start every expert as a copy of the layer's MLP in `pretrained_checkpoint`, a dense model (Komatsuzaki et al.,
    2022). Routers start anew."""

    moe_upcycling_granularity: int = 1
    """With `moe_use_upcycling`: experts are so many times narrower than the MLP, each a copy of a piece of it (He et
    al., 2024). Each piece is in an equal number of experts."""

    save_interval: int | None = None
    """Iterations between checkpoints. None: one at the end."""

    async_save: bool = False
    """Write checkpoints while training goes on. It waits only until its state is copied to host memory. The copies
    take as much memory as this rank's part of a checkpoint."""

    keep_last: int | None = None
    """Keep this many of the latest checkpoints, and remove older ones when a new one is complete. None: keep all. With
    1 there is no other checkpoint if it is damaged."""

    keep_every: int | None = None
    """In addition to `keep_last`, keep the checkpoints whose iteration is a multiple of this."""

    load_optim: bool = True
    """On `load`, continue the optimizer and the schedule. Without this they start anew, with the weights loaded."""

    load_rng: bool = True
    """On `load`, continue the random streams of dropout. Without this they start from the seed."""

    save_optim: bool = True
    """Write the state of optimizer and schedule into checkpoints. Without it `load` needs `--no-load-optim`."""

    save_rng: bool = True
    """Write random streams into checkpoints."""

    verify_checkpoint: bool = True
    """Compare every loaded tensor with the hash that was saved with it. Without this, only tensors that are loaded
    into another layout than they were saved in are compared."""

    def __post_init__(self) -> None:
        check_range(self, "save_interval", "keep_last", "keep_every", "moe_upcycling_granularity", least=1)
        if self.moe_upcycling_granularity > 1 and not self.moe_use_upcycling:
            raise ConfigError(
                f"moe_upcycling_granularity is {self.moe_upcycling_granularity} without moe_use_upcycling; set both"
            )
        if self.moe_use_upcycling and self.pretrained_checkpoint is None:
            raise ConfigError(
                "moe_use_upcycling is set without pretrained_checkpoint; give that the dense model, or drop it"
            )
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError(
                f"keep_every is {self.keep_every} and keep_last is not set, so that all checkpoints are kept; add "
                "keep_last, or drop keep_every"
            )

    @property
    def retention(self) -> Retention | None:
        """Returns which checkpoints to keep, or None for all."""
        return None if self.keep_last is None else Retention(self.keep_last, self.keep_every)

    @property
    def folder(self) -> Path | None:
        """The folder that this run writes into."""
        return self.save or self.load


_LONGEST_TIMEOUT_MINUTES = 365 * 24 * 60


@dataclass(kw_only=True)
class RunConfig:
    """Length of the run, validation, logging, and seeds.

    Raises:
        ConfigError: a number is out of its range.
    """

    train_iters: int | None = None
    """Iterations of the whole run, those before `--load` included."""

    train_samples: int | None = None
    """Samples of the whole run, in the place of `train_iters`. Schedules are then in samples too."""

    exit_interval: int | None = None
    """End the run, with a checkpoint, after an iteration that this divides."""

    exit_duration_in_mins: float | None = None
    """End the run, with a checkpoint, so many minutes after it was started."""

    eval_interval: int = 1000
    """Iterations between validations."""

    eval_iters: int = 100
    """Global batches of a validation, 0 for none."""

    log_interval: int = 100
    """Iterations between lines of the log."""

    log_weights_hash: int | None = None
    """Iterations between hashes of the weights in the log, the same on any number of ranks and under any wrapper, and
    as `python -m shardstack.dist_checkpointing.inspect` prints it of a checkpoint. None: no hashes."""

    tensorboard_dir: Path | None = None
    """Folder for TensorBoard's event files."""

    trackers: tuple[str, ...] = ()
    """Trackers that get the numbers of the log too: wandb, mlflow, trackio, or tensorboard in the run's folder. The
    name of that folder is the project's, unless an environment variable of the package says otherwise."""

    log_layer_norms: bool = False
    """Log the norms of gradient, update and weight of each layer, the same on any number of ranks and under any
    wrapper. The host then waits for each step, and a logged step takes a copy of the shards that a rank updates."""

    wandb_project: str | None = None
    """Project of the tracker wandb, which this and the next two settings turn on. None: the run's folder."""

    wandb_exp_name: str | None = None
    """Name of the run in wandb. None: wandb chooses one."""

    wandb_save_dir: Path | None = None
    """Folder of wandb's files. None: the current one."""

    profile: bool = False
    """Trace steps with torch's profiler into the folder `profile` of the run's folder, for TensorBoard or Perfetto."""

    profile_step_start: int = 10
    """First traced step, counted from the start of the program."""

    profile_step_end: int = 12
    """Step before which tracing ends."""

    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that are traced."""

    profile_memory: bool = False
    """Measure the memory of the run's third iteration on the first rank by category, and draw it: memory.png and
    memory.json in the run's folder. That iteration takes longer."""

    seed: int = 1234
    """Seed of initial weights, sample order and dropout."""

    copy_interval: int = 1
    """Iterations between copies of the state in memory, under `launch --on-lost-rank replace` or `shrink`: after a
    lost rank the iterations since the last copy are computed again."""

    data_parallel_random_init: bool = False
    """Seed each data-parallel replica differently, by 10 times its rank, so that its samples get other dropout masks.
    Replicas still start from the weights of the first, which the wrapper broadcasts. Without this the masks of all
    replicas are equal, as in Megatron-LM."""

    deterministic: bool = False
    """Compute the same bits in every run, on the CPU and on one GPU: choose deterministic operations and refuse those
    that have none. Several GPUs also need a fixed algorithm of NCCL's (the variable NCCL_ALGO)."""

    fp32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How matrices in fp32 are multiplied: in fp32, in TF32 (several times as fast on a GPU that has it), or in bf16.
    Runs in bf16 or fp16 multiply in that."""

    distributed_timeout_minutes: float = 10.0
    """Minutes after which a collective that not all ranks joined is an error."""

    def __post_init__(self) -> None:
        check_range(self, "train_iters", "train_samples", "exit_interval", "exit_duration_in_mins", over=0)
        check_range(self, "eval_interval", "log_interval", "log_weights_hash", "copy_interval", least=1)
        check_range(self, "eval_iters", "profile_step_start", least=0)
        check_range(self, "profile_step_end", over=self.profile_step_start, takes="a step after profile_step_start")
        if (self.train_iters is None) == (self.train_samples is None):
            found = "missing: " if self.train_iters is None else f"{self.train_iters} and {self.train_samples}: "
            raise ConfigError(f"{found}train_iters and train_samples; give the length of the run by one of them")
        check_range(self, "seed", least=0, below=2**32, takes=f"0 to {2**32 - 1}")
        year = f"a positive number up to {_LONGEST_TIMEOUT_MINUTES}, a year"
        check_range(self, "distributed_timeout_minutes", over=0, most=_LONGEST_TIMEOUT_MINUTES, takes=year)
