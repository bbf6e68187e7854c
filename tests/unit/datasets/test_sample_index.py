"""The shuffled index against an oracle that walks token by token, and its cache, safe in a race."""

import pickle
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.base.errors import DataError
from core.datasets import sample_index
from core.datasets.sample_index import Arrays, build_indices, load_or_build, locate_samples
from tests._forked import FORKED
from tests.unit.dist_checkpointing._pieces import Bomb


def _walk(lengths: list[int], order: list[int], sequence_length: int) -> list[tuple[int, int]]:
    """Starts of samples: the first token, and every `sequence_length`-th from there that exists."""
    places = [(position, token) for position, document in enumerate(order) for token in range(lengths[document])]
    return places[::sequence_length]


def _expected(lengths: list[int], first: int, last: int, sequence_length: int, num_samples: int | None, seed: int):
    """Applies Megatron-LM's rules for the number of epochs, a last epoch shuffled apart, and its order of draws."""
    tokens = sum(lengths[first:last])
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * sequence_length + 1:
        epochs += 1
    draws = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values)
        draws.shuffle(array)
        return array.tolist()

    total = (epochs * tokens - 1) // sequence_length
    before = ((epochs - 1) * tokens - 1) // sequence_length
    documents = list(range(first, last))
    if epochs > 1 and num_samples - before < int(0.80 * ((tokens - 1) // sequence_length)):
        order = shuffled(documents * (epochs - 1)) + shuffled(documents)
        shuffle = shuffled(list(range(before))) + shuffled(list(range(before, total)))
    else:
        order = shuffled(documents * epochs)
        shuffle = shuffled(list(range(total)))
    return order, _walk(lengths, order, sequence_length)[: total + 1], shuffle


def _random_case(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, rng.integers(3, 30)).tolist()
    lengths[1] += 9  # some document of the range has tokens
    last = int(rng.integers(2, len(lengths) + 1))
    sequence_length = int(rng.integers(1, 9))
    tokens = sum(lengths[1:last])
    num_samples = None if seed % 5 == 0 else int(rng.integers(1, 5 * tokens // sequence_length + 2))
    return lengths, 1, last, sequence_length, num_samples, seed


@pytest.mark.parametrize("block", [1, 3, 1 << 21])
def test_indices_equal_reference_walk(monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(sample_index, "_BLOCK_DOCUMENTS", block)
    cases_of_several_epochs = 0
    for seed in range(60):
        lengths, *rest = case = _random_case(seed)
        actual = build_indices(np.array(lengths, np.int32), *rest)
        order, samples, shuffle = _expected(*case)
        assert actual["document_index"].tolist() == order
        assert [tuple(row) for row in actual["sample_index"].tolist()] == samples
        assert actual["shuffle_index"].tolist() == shuffle
        cases_of_several_epochs += len(order) > len(set(order))
        if rest[3] is not None:
            assert len(shuffle) >= rest[3]
    assert cases_of_several_epochs > 20


def test_short_last_epoch_is_shuffled_separately():
    lengths = np.full(10, 10, np.int32)
    num_samples = 25  # 2.5 epochs of 10 samples: the half epoch must come last
    actual = build_indices(lengths, 0, 10, 10, num_samples, seed=3)
    assert sorted(actual["document_index"][:20].tolist()) == sorted([*range(10)] * 2)
    assert sorted(actual["document_index"][20:].tolist()) == [*range(10)]
    assert sorted(actual["shuffle_index"][:19].tolist()) == [*range(19)]


def test_dtypes_are_small_and_lengths_do_not_overflow():
    lengths = np.full(4, 2**31 - 1, np.int32)
    starts = locate_samples(lengths, np.arange(4, dtype=np.int32), 2**30, 7)
    assert starts.dtype == np.int32
    flat = [int(position) * (2**31 - 1) + int(offset) for position, offset in starts]
    assert flat == [i * 2**30 for i in range(8)]


def test_only_the_seed_changes_the_order():
    lengths = np.full(50, 7, np.int32)
    first, again, other = (build_indices(lengths, 0, 50, 5, None, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["shuffle_index"], other["shuffle_index"])


def _arrays() -> Arrays:
    return {"a": np.arange(1000, dtype=np.int32).reshape(500, 2), "b": np.arange(7, dtype=np.uint32)}


def _never() -> Arrays:
    raise RuntimeError("built although cached")


def _matches(arrays: Arrays) -> bool:
    return all(np.array_equal(arrays[name], values) for name, values in _arrays().items())


def test_entry_is_built_once_and_memory_mapped(tmp_path: Path):
    assert _matches(load_or_build(tmp_path, {"seed": 1}, _arrays))
    cached = load_or_build(tmp_path, {"seed": 1}, _never)
    assert _matches(cached)
    assert all(isinstance(values, np.memmap) for values in cached.values())
    with pytest.raises(RuntimeError, match="built although cached"):
        load_or_build(tmp_path, {"seed": 2}, _never)


def _truncate(entry: Path) -> None:
    (entry / "a.npy").write_bytes((entry / "a.npy").read_bytes()[:300])


def _flip_one_bit(entry: Path) -> None:
    content = bytearray((entry / "a.npy").read_bytes())
    content[-5] ^= 1
    (entry / "a.npy").write_bytes(content)


def _break_header(entry: Path) -> None:
    content = (entry / "b.npy").read_bytes()
    (entry / "b.npy").write_bytes(content.replace(b"{'descr'", b"{('descr", 1))


def _pickle_instead(entry: Path) -> None:
    np.save(entry / "b.npy", np.array([{"x": 1}], dtype=object), allow_pickle=True)


def _hostile_pickle_instead(entry: Path) -> None:
    (entry / "b.npy").write_bytes(pickle.dumps(Bomb(entry.parent / "executed")))


def _remove(entry: Path) -> None:
    (entry / "b.npy").unlink()


def _scramble_description(entry: Path) -> None:
    (entry / "description.json").write_text('{"key": [')


def _empty_description(entry: Path) -> None:
    (entry / "description.json").write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [
        *(_truncate, _flip_one_bit, _break_header, _pickle_instead, _hostile_pickle_instead, _remove),
        *(_scramble_description, _empty_description),
    ],
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: Callable[[Path], None]):
    load_or_build(tmp_path, {}, _arrays)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(entry)
    with pytest.raises(RuntimeError, match="built although cached"):
        load_or_build(tmp_path, {}, _never)
    assert _matches(load_or_build(tmp_path, {}, _arrays))
    assert _matches(load_or_build(tmp_path, {}, _never))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([entry.name, "lock"])


def test_a_failed_build_leaves_no_entry(tmp_path: Path):
    with pytest.raises(RuntimeError):
        load_or_build(tmp_path, {}, _never)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_drafts_of_killed_processes_are_removed(tmp_path: Path):
    draft = f".{'0' * 32}.{'a' * 32}"
    for name in (draft, f"{draft}.old", ".mine"):
        (tmp_path / name).mkdir()
    load_or_build(tmp_path, {}, _arrays)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".mine"]


def test_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"file/cache: the index cache cannot be written .*choose another as cache_dir"
    ):
        load_or_build(tmp_path / "file" / "cache", {}, _arrays)


def test_full_disk_skips_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_index.np, "save", full)
    with pytest.warns(UserWarning, match=r"the order of samples is not kept \(No space left on device\)"):
        assert _matches(load_or_build(tmp_path, {}, _arrays))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def _race(directory: Path, barrier, answers, with_locks: bool) -> None:
    if not with_locks:
        sample_index._one_at_a_time = _no_lock
    rounds = []
    for number in range(20):

        def build(number: int = number) -> Arrays:
            (directory / f"built-{number}-{uuid.uuid4().hex}").touch()
            return _arrays()

        barrier.wait(120)
        rounds.append(_matches(load_or_build(directory / "cache", {"round": number}, build)))
    answers.put(all(rounds))


class _no_lock:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("with_locks", [True, False])
def test_processes_that_start_at_once_agree(tmp_path: Path, with_locks: bool):
    barrier, answers = FORKED.Barrier(3), FORKED.Queue()
    processes = [FORKED.Process(target=_race, args=(tmp_path, barrier, answers, with_locks)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=600) for _ in processes] == [True] * 3
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    builds = len(list(tmp_path.glob("built-*")))
    assert builds == 20 if with_locks else 20 <= builds <= 60
    entries = [path.name for path in (tmp_path / "cache").iterdir() if path.name != "lock"]
    assert len(entries) == 20
    assert not any(name.startswith(".") for name in entries)  # drafts are gone
