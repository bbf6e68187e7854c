"""Opens the data of a run: its corpus, the corpus's tokenizer, and loaders that continue where the run is.

Micro-batches are copied to the rank's device; on a GPU ahead of their use, while it computes.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import parallel_state
from ..base import device
from ..base.errors import ConfigError, DataError
from ..base.micro_batch_tree import MicroBatchTree
from ..comm import streams
from ..comm.call import Wait
from ..datasets.data_samplers import build_pretraining_data_loader
from ..datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, document_range, parse_shares
from ..datasets.indexed_dataset import IndexedDataset
from ..tensor_parallel.groups import pad_vocab_size
from ..tokenizers import NullTokenizer, Tokenizer, load_tokenizer, tokenizer_path
from .config import PretrainConfig
from .launch.processes import ignore_stop_signals


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


def load_data(
    config: PretrainConfig, data_path: Path, world_size: int, tokenizer: Tokenizer | NullTokenizer | None = None
) -> RunData:
    """Opens the corpus at `data_path` and finds, or builds and caches, the order of its samples.

    Args:
        tokenizer: of the corpus; None reads `tokenizer_model`, or the file next to the corpus if there is one.

    Raises:
        DataError: the corpus is missing, damaged, too small, or has tokens beyond the vocabulary.
        ConfigError: the size of the vocabulary is unknown, or two settings contradict each other.
    """
    corpus = IndexedDataset(data_path)
    if len(corpus) == 0:
        raise DataError(f"{corpus.idx_path}: the corpus is empty; prepare it from files that hold text")
    beside_corpus = tokenizer_path(data_path)
    if tokenizer is None and (config.data.tokenizer_model is not None or beside_corpus.exists()):
        tokenizer = load_tokenizer(config.data.tokenizer_model or beside_corpus)
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
    train = GPTDataset(corpus, "train", settings, config.data_samples(world_size))
    first, last = document_range(len(corpus), "valid", config.data.split)
    num_valid = config.run.eval_iters * batch if parse_shares(config.data.split)[1] > 0 else 0
    if num_valid and first == last:
        num_valid = 0
        warnings.warn(
            f"{corpus.prefix}: none of its {len(corpus)} documents falls to validation under split "
            f"{config.data.split}, so nothing is validated; give it a larger share, or more documents",
            stacklevel=2,
        )
    return RunData(
        train=train,
        valid=GPTDataset(corpus, "valid", settings, num_valid) if num_valid else None,
        sample_order=_sample_order(train, batch),
        tokenizer=tokenizer if isinstance(tokenizer, Tokenizer) else None,
        vocab_size=pad_vocab_size(vocab_size, config.gpt.make_vocab_size_divisible_by),
    )


def open_batches(
    dataset: GPTDataset, config: PretrainConfig, consumed_samples: int = 0, tree: MicroBatchTree | None = None
) -> DeviceBatches:
    """Opens this rank's micro-batches after the first `consumed_samples` samples of a dataset.

    A validation opens the same samples each time, so that losses are comparable.

    Args:
        tree: of the wrapper's plan; says which micro-batches of a step are this rank's.
    """
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    micro_batches = config.data.micro_batch_size * data_parallel_size
    loader = build_pretraining_data_loader(
        dataset,
        consumed_samples,
        micro_batch_size=config.data.micro_batch_size,
        # Micro-batches follow each other in one order at any size of a batch that grows.
        global_batch_size=micro_batches if config.batch_grows else config.data.global_batch_size or micro_batches,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=data_parallel_size,
        num_workers=config.data.num_workers,
        seed=config.run.seed,
        tree=tree,
    )
    loader.worker_init_fn = ignore_stop_signals
    return DeviceBatches(iter(loader))


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


def _vocab_size(config: PretrainConfig, data_path: Path, tokenizer: Tokenizer | NullTokenizer | None) -> int:
    vocab_size = config.data.vocab_size
    least = None if tokenizer is None else tokenizer.vocab_size
    if (vocab_size := vocab_size or least) is None:
        raise ConfigError(
            f"{tokenizer_path(data_path)} does not exist, so the size of the vocabulary is unknown; give "
            "--vocab-size, or the tokenizer of the corpus with --tokenizer-model"
        )
    if vocab_size < (least or 0):
        raise ConfigError(f"vocab_size {vocab_size} is smaller than the tokenizer's {least}; drop it, or raise it")
    return vocab_size


Batch = Mapping[str, torch.Tensor]
"""Tensors `[b, s]`: `tokens`, `labels`, `loss_mask`, `position_ids`, and `document_starts` if documents are packed.

Context-parallel ranks get the same whole sequences, and each takes its chunks.
"""

READ_ON_HOST = frozenset({"document_starts"})
"""Tensors of a batch that the host reads, and that therefore stay in its memory."""

BATCHES_AHEAD = 2
"""Micro-batches that are read and copied ahead of use."""


def to_device(batch: Batch) -> Batch:
    """Copies a batch to this process's device, except tensors that the host reads. Does not wait for copies of pinned
    memory."""
    here, host = device.current_device(), torch.device("cpu")
    return {name: value.to(host if name in READ_ON_HOST else here, non_blocking=True) for name, value in batch.items()}


class SideStream:
    """Copies batches to this process's GPU on a stream of its own, so that they do not queue behind computation."""

    def __init__(self) -> None:
        self._stream = streams.Stream()  # of the GPU that is current here, which the reading thread takes over

    def start(self, batch: Batch) -> Wait[Batch]:
        """Begins to copy a batch. Work queued after the wait for the copy may read it."""
        with streams.stream(self._stream):
            # In the side stream's memory, which a later batch may get once all streams that use it are past it.
            copies, event = to_device(batch), streams.record_event()

        def wait() -> Batch:
            computing = streams.current_stream()
            computing.wait_event(event)
            for name, tensor in copies.items():
                if name not in READ_ON_HOST:
                    streams.used_on(tensor, computing)
            return copies

        return wait


class DeviceBatches(Iterator[Batch], AbstractContextManager["DeviceBatches"]):
    """Iterates over a rank's micro-batches, on its device.

    On a GPU a thread reads the next batches and starts their copies while the step runs: the host waits for neither.
    The loader pins what it reads. On CPU batches pass through, as reading ahead would take computation's cores; the
    loader's workers do it where they are wanted.

    A batch that was read and not used leaves no trace: a run counts its samples by step, and one that continues opens
    its loader after the last step's. An error in reading a batch is raised where the batch is asked for.

    Use it in a `with` statement, or `close` it: the thread then ends with the batch that it is reading.

    Args:
        batches: read by one thread at a time, and to its end.
        start_copy: queues the copy of a batch, on the reading thread, and returns the function that waits for it, on
            the trainer's; None chooses by the device, and on CPU there are no copies.
    """

    def __init__(self, batches: Iterator[Batch], start_copy: Callable[[Batch], Wait[Batch]] | None = None) -> None:
        if start_copy is None and streams.is_asynchronous(device.current_device()):
            start_copy = SideStream().start
        self._batches, self._copies = batches, None if start_copy is None else map(start_copy, batches)
        # Futures of the next batches, in order. `__next__` appends and takes them; the reading thread fulfils them.
        self._ahead: deque[Future[Wait[Batch]]] = deque()
        # The reading thread. Set here, and shut down by `close`; None if batches are not read ahead.
        self._reader: ThreadPoolExecutor | None = None
        if self._copies is not None:
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
            self._ahead.extend(self._reader.submit(next, self._copies) for _ in range(BATCHES_AHEAD))

    def __next__(self) -> Batch:
        if self._reader is None or self._copies is None:
            return to_device(next(self._batches))
        self._ahead.append(self._reader.submit(next, self._copies))
        return self._ahead.popleft().result()()

    def close(self) -> None:
        """Stops reading ahead. May be called again."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()
