"""Opens the data of a run: its corpus, the corpus's tokenizer, and loaders that continue where the run is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from .. import parallel_state
from ..datasets.data_samplers import build_pretraining_data_loader
from ..datasets.gpt_dataset import GPTDataset, document_range
from ..datasets.gpt_dataset_config import GPTDatasetConfig, parse_shares
from ..datasets.indexed_dataset import IndexedDataset
from ..datasets.tokenizer import Tokenizer, load_tokenizer, tokenizer_path
from ..errors import ConfigError, DataError
from ..micro_batch_tree import MicroBatchTree
from ..tensor_parallel.vocab import pad_vocab_size
from .config import PretrainConfig
from .device_batches import Batch, DeviceBatches
from .launch.signals import ignore_stop_signals


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Datasets of a run, and the vocabulary that its model needs."""

    train: GPTDataset
    valid: GPTDataset | None
    """None if the run validates nothing."""
    tokenizer: Tokenizer | None
    """None if only the size of the vocabulary is known."""
    vocab_size: int
    """Rows of the embedding: the vocabulary, padded."""
    sample_order: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the order of training samples as JSON values, and a fingerprint of the order, ``order``."""


def load_data(config: PretrainConfig, data_path: Path, world_size: int) -> RunData:
    """Opens the corpus at `data_path` and finds, or builds and caches, the order of its samples.

    Raises:
        DataError: the corpus is missing, damaged, too small, or has tokens beyond the vocabulary.
        ConfigError: the size of the vocabulary is unknown, or two settings contradict each other.
    """
    corpus = IndexedDataset(data_path)
    if len(corpus) == 0:
        raise DataError(f"{corpus.idx_path}: the corpus is empty; prepare it from files that hold text")
    tokenizer = _tokenizer(config, data_path)
    vocab_size = _vocab_size(config, data_path, tokenizer)
    settings = GPTDatasetConfig(
        sequence_length=config.data.seq_length,
        random_seed=config.run.seed,
        split=config.data.split,
        vocab_size=vocab_size,
        eod=tokenizer.eod if tokenizer is not None else None,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        create_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        cache_dir=config.data.data_cache_path,
    )
    batch = config.global_batch_size(world_size)
    train = GPTDataset(corpus, "train", settings, config.run.train_iters * batch)
    num_valid = config.run.eval_iters * batch if _can_validate(config, corpus) else 0
    return RunData(
        train=train,
        valid=GPTDataset(corpus, "valid", settings, num_valid) if num_valid else None,
        sample_order=_sample_order(train, batch),
        tokenizer=tokenizer,
        vocab_size=pad_vocab_size(vocab_size, config.gpt.make_vocab_size_divisible_by),
    )


def training_batches(
    data: RunData, config: PretrainConfig, consumed_samples: int, tree: MicroBatchTree | None = None
) -> DeviceBatches:
    """Opens this rank's micro-batches after the first `consumed_samples` samples of the run.

    Args:
        tree: of the wrapper's plan; says which micro-batches of a step are this rank's.
    """
    return DeviceBatches(iter(_loader(data.train, config, consumed_samples, tree)))


def validation_batches(dataset: GPTDataset, config: PretrainConfig) -> DeviceBatches:
    """Opens this rank's micro-batches of a validation: the same samples each time, so that losses are comparable."""
    return DeviceBatches(iter(_loader(dataset, config, 0)))


def _loader(
    dataset: GPTDataset, config: PretrainConfig, consumed_samples: int, tree: MicroBatchTree | None = None
) -> DataLoader[Batch]:
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    loader = build_pretraining_data_loader(
        dataset,
        consumed_samples,
        micro_batch_size=config.data.micro_batch_size,
        global_batch_size=config.data.global_batch_size or config.data.micro_batch_size * data_parallel_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=data_parallel_size,
        num_workers=config.data.num_workers,
        seed=config.run.seed,
        tree=tree,
    )
    loader.worker_init_fn = ignore_stop_signals
    return loader


def _can_validate(config: PretrainConfig, corpus: IndexedDataset) -> bool:
    """Returns whether there is a document to validate on; warns if rounding left none of the requested share."""
    first, last = document_range(len(corpus), "valid", config.data.split)
    asked = parse_shares(config.data.split)[1] > 0 and config.run.eval_iters > 0
    if asked and first == last:
        warnings.warn(
            f"{corpus.prefix}: none of its {len(corpus)} documents falls to validation under split "
            f"{config.data.split}, so nothing is validated; give it a larger share, or more documents",
            stacklevel=3,
        )
    return asked and first < last


def _sample_order(train: GPTDataset, global_batch_size: int) -> dict[str, Any]:
    corpus, settings = train.corpus, train.config
    return {
        "num_samples": train.num_samples,
        "seed": settings.random_seed,
        "split": settings.split,
        "seq_length": settings.sequence_length,
        "global_batch_size": global_batch_size,
        # Without the folder: mounts differ between machines.
        "corpus": f"{corpus.bin_path.name} ({corpus.bin_path.stat().st_size} bytes)",
        "order": train.order_fingerprint(),
    }


def _tokenizer(config: PretrainConfig, data_path: Path) -> Tokenizer | None:
    if config.data.tokenizer_model is not None:
        return load_tokenizer(config.data.tokenizer_model)
    path = tokenizer_path(data_path)
    return load_tokenizer(path) if path.exists() else None


def _vocab_size(config: PretrainConfig, data_path: Path, tokenizer: Tokenizer | None) -> int:
    asked = config.data.vocab_size
    if tokenizer is None:
        if asked is None:
            raise ConfigError(
                f"{tokenizer_path(data_path)} does not exist, so the size of the vocabulary is unknown; give "
                "--vocab-size, or the tokenizer of the corpus with --tokenizer-model"
            )
        return asked
    if asked is not None and asked < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size {asked} is smaller than the tokenizer's {tokenizer.vocab_size}; drop it, or raise it"
        )
    return asked or tokenizer.vocab_size
