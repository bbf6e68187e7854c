"""The data of a run: its vocabulary, batches that go on where a run stopped, and are read and copied ahead."""

from __future__ import annotations

import itertools
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from corpus import prepare

from core import parallel_state
from core.base import device
from core.base.errors import ConfigError, DataError
from core.tokenizers import tokenizer_path
from core.training import data as device_batches
from core.training.data import BATCHES_AHEAD, Batch, DeviceBatches, SideStream, load_data, open_batches
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._spawn import run_distributed
from tests.unit.training._configs import small_config


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of the text" for i in range(60)))
    prepare([tmp_path / "text.txt"], tmp_path / "corpus", split_on="line")
    return tmp_path / "corpus"


def test_the_tokenizer_next_to_the_corpus_decides_the_vocabulary(corpus: Path):
    data = load_data(small_config(global_batch_size=4, eval_iters=2), corpus, 1)
    assert data.vocab_size == 384  # 257, padded
    assert data.tokenizer is not None and data.tokenizer.decode([104, 105]) == "hi"
    assert len(data.train) >= 16 and data.valid is not None and len(data.valid) >= 8
    assert load_data(small_config(eval_iters=0), corpus, 1).valid is None
    assert load_data(small_config(make_vocab_size_divisible_by=1, vocab_size=300), corpus, 1).vocab_size == 300
    with pytest.raises(ConfigError, match="vocab_size 100 is smaller than the tokenizer's 257"):
        load_data(small_config(vocab_size=100), corpus, 1)


def test_a_corpus_without_a_tokenizer_needs_a_vocabulary_size(corpus: Path, tmp_path: Path):
    shutil.move(tokenizer_path(corpus), tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match="--vocab-size"):
        load_data(small_config(), corpus, 1)
    data = load_data(small_config(vocab_size=257), corpus, 1)
    assert data.tokenizer is None and data.vocab_size == 384
    with pytest.raises(DataError, match="vocabulary has 200"):
        load_data(small_config(vocab_size=200), corpus, 1)
    named = load_data(small_config(tokenizer_model=tmp_path / "elsewhere.json"), corpus, 1)
    assert named.tokenizer is not None


def _micro_batches(prefix: Path, consumed: int, num_workers: int, **cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = small_config(global_batch_size=8, train_iters=3, eval_iters=1, num_workers=num_workers)
    parallel_state.initialize_model_parallel(**cut)
    data = load_data(config, prefix, 2)
    train = torch.stack([batch["tokens"] for batch in open_batches(data.train, config, consumed)])
    valid = torch.stack([batch["tokens"] for batch in open_batches(data.valid, config)])
    return train, valid


def test_batches_go_on_after_the_samples_that_were_consumed(corpus: Path):
    whole = run_distributed(_micro_batches, 2, corpus, 0, 0)
    later = run_distributed(_micro_batches, 2, corpus, 8, 0)
    for (train, valid), (rest, again) in zip(whole, later, strict=True):
        assert torch.equal(train[2 : 2 + len(rest)], rest)  # two micro-batches of a step on each rank
        assert len(rest) == len(train) - 2
        assert torch.equal(valid, again)
    assert not torch.equal(whole[0][0], whole[1][0])  # each rank its own


def _read_ahead(prefix: Path, stops: list[int]) -> list[torch.Tensor]:
    """Returns tokens of micro-batches of a run that stops after these steps, each time with more of them read."""
    config = small_config(global_batch_size=8, train_iters=4, num_workers=0)
    parallel_state.initialize_model_parallel()
    data = load_data(config, prefix, 2)
    found: list[torch.Tensor] = []
    with mock.patch(
        "core.training.data.DeviceBatches", partial(DeviceBatches, start_copy=lambda batch: lambda: batch)
    ):
        for first, last in itertools.pairwise([0, *stops]):
            with open_batches(data.train, config, 8 * first) as batches:
                found += [next(batches)["tokens"] for _ in range(2 * (last - first))]
    return found


def test_read_ahead_samples_are_neither_lost_nor_repeated(corpus: Path):
    for whole, continued in zip(
        run_distributed(_read_ahead, 2, corpus, [4]), run_distributed(_read_ahead, 2, corpus, [1, 3, 4]), strict=True
    ):
        assert all(map(torch.equal, whole, continued)) and len(whole) == len(continued) == 8
        assert len({tokens.numpy().tobytes() for tokens in whole}) == 8


def _first_micro_batch(prefix: Path, kind: str) -> torch.Tensor:
    return _micro_batches(prefix, 0, 0, **{kind: 2})[0][0]


@pytest.mark.parametrize("kind", ["tensor_model_parallel_size", "context_parallel_size"])
def test_ranks_of_one_model_read_the_same_whole_sequences(corpus: Path, kind: str):
    first, second = run_distributed(_first_micro_batch, 2, corpus, kind)
    assert torch.equal(first, second) and first.shape[1] == small_config().data.seq_length


def test_validation_is_left_out_where_no_document_falls_to_it(tmp_path: Path, corpus: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for split in ("100,0,0", "1"):
            assert load_data(small_config(split=split), corpus, 1).valid is None
        assert load_data(small_config(), corpus, 1).valid is not None
    (tmp_path / "one.txt").write_text("a single document of some length")
    prepare([tmp_path / "one.txt"], tmp_path / "one")
    with pytest.warns(UserWarning, match="none of its 1 documents .* 969,30,1"):
        assert load_data(small_config(), tmp_path / "one", 1).valid is None


def test_orders_of_samples_are_distinguished(corpus: Path):
    def order(**changes) -> dict:
        return dict(load_data(small_config(eval_iters=0, **changes), corpus, 1).sample_order)

    first = order(train_iters=2)
    assert first["num_samples"] == 4 and first["corpus"].startswith("corpus.bin (")
    assert order(train_iters=3)["order"] == first["order"]  # of the same single epoch
    assert len({order(**changes)["order"] for changes in ({}, {"seed": 1}, {"train_iters": 500})}) == 3


LIMIT_S = 600.0


def batch(number: int) -> Batch:
    return {"tokens": torch.full((1, 4), number), "document_starts": torch.zeros(1, 4)}


class _Copies:
    """Notes when copies start and when they are waited for, and lets a test wait until they have started."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: list[int] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def start(self, batch: Batch) -> Any:
        number = int(batch["tokens"][0, 0])
        with self._changed:
            self.started.append(number)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
        return lambda: (self.waited.append(number), batch)[1]

    def wait_until_started(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.started, LIMIT_S)


def _numbers(batches: Iterator[Batch], count: int) -> list[int]:
    return [int(next(batches)["tokens"][0, 0]) for _ in range(count)]


def test_batches_are_copied_ahead_and_waited_for_when_used() -> None:
    copies = _Copies()
    with DeviceBatches(map(batch, range(10)), copies.start) as batches:
        copies.wait_until_started(BATCHES_AHEAD - 1)
        assert copies.waited == []
        for number in range(3):
            assert _numbers(batches, 1) == [number]
            copies.wait_until_started(number + BATCHES_AHEAD)
            assert copies.waited == list(range(number + 1))
            assert copies.started == list(range(number + BATCHES_AHEAD + 1))  # and no further
    assert threading.get_ident() not in copies.threads and len(copies.threads) == 1


def test_an_iterator_ends_after_its_last_batch_and_stays_there() -> None:
    with DeviceBatches(map(batch, range(3)), _Copies().start) as batches:
        assert len(list(batches)) == 3
        for _ in range(BATCHES_AHEAD + 2):
            assert next(batches, None) is None


def test_an_error_in_reading_is_raised_where_the_batch_is_used() -> None:
    def read() -> Iterator[Batch]:
        yield batch(0)
        raise DataError("damaged")

    copies = _Copies()
    with DeviceBatches(read(), copies.start) as batches:
        assert _numbers(batches, 1) == [0]
        with pytest.raises(DataError, match="damaged"):
            next(batches)


def test_closing_ends_the_thread_with_the_batch_that_it_reads() -> None:
    reads, goes_on = threading.Event(), threading.Event()
    read_after: list[int] = []

    def read() -> Iterator[Batch]:
        reads.set()
        assert goes_on.wait(LIMIT_S)
        yield batch(0)
        read_after.append(1)
        yield batch(1)

    copies = _Copies()
    batches = DeviceBatches(read(), copies.start)
    assert reads.wait(LIMIT_S)
    batches._ahead[-1].add_done_callback(lambda read: goes_on.set())  # when closing cancels the next read
    batches.close()
    batches.close()
    assert copies.started == [0] and not read_after
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_on_cpu_batches_pass_through() -> None:
    read: list[int] = []

    def made(number: int) -> Batch:
        read.append(number)
        return batch(number)

    with DeviceBatches(map(made, range(5))) as batches:
        assert read == []
        first = next(batches)
        assert read == [0] and set(first) == {"tokens", "document_starts"}
        assert _numbers(batches, 4) == [1, 2, 3, 4]


class _Tensor:
    """Notes where it is copied to."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def to(self, place: torch.device, non_blocking: bool) -> _Tensor:
        self._log.append(f"{self._name} to {place} {'' if non_blocking else 'and wait '}on {_Streams.current}")
        return self

    def __str__(self) -> str:
        return self._name


class _Streams:
    """What `core.comm.streams` is asked for: a stream has a name, and the log says what is done with it."""

    current = "main"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def Stream(self) -> str:
        return "side"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        _Streams.current = stream
        yield
        _Streams.current = "main"

    def current_stream(self) -> Any:
        stream = mock.MagicMock()
        name = _Streams.current
        stream.__str__.return_value = name  # type: ignore[attr-defined]
        stream.wait_event = lambda event: self._log.append(f"{name} waits for {event}")
        return stream

    def record_event(self) -> str:
        self._log.append(f"event on {_Streams.current}")
        return "event"

    def used_on(self, tensor: _Tensor, stream: Any) -> None:
        self._log.append(f"{tensor} used on {stream}")


def test_the_computing_stream_waits_for_a_copy_and_keeps_memory() -> None:
    log: list[str] = []
    made: Any = {"tokens": _Tensor(log, "tokens"), "document_starts": _Tensor(log, "starts")}
    with (
        mock.patch.object(device_batches, "streams", _Streams(log)),
        mock.patch.object(device, "current_device", lambda: torch.device("cuda", 0)),
    ):
        wait = SideStream().start(made)
        assert log == ["tokens to cuda:0 on side", "starts to cpu on side", "event on side"]
        log.clear()
        assert list(wait()) == list(made)
    assert log == ["main waits for event", "tokens used on main"]


@pytest.mark.gpu
@needs_gpu
def test_no_batch_is_overwritten_before_the_gpu_has_read_it() -> None:
    with one_rank_on_a_gpu():
        made = [{"tokens": torch.full((1 << 18,), number).pin_memory()} for number in range(40)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            with DeviceBatches(iter(made)) as batches:
                rows = []
                for one in batches:
                    assert one["tokens"].is_cuda
                    torch.cuda._sleep(20_000_000)  # so that the host has copied all long before they are read
                    rows.append(one["tokens"].double().sum())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.stack(rows).tolist() == [float(number << 18) for number in range(40)]
