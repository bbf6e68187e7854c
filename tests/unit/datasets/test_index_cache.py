"""The cache of indices: one entry for each key, safe in a race, built again when damaged."""

import multiprocessing
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.base.errors import DataError
from core.datasets import index_cache
from core.datasets.index_cache import Arrays, load_or_build


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


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _hostile_pickle_instead(entry: Path) -> None:
    (entry / "b.npy").write_bytes(pickle.dumps(_Hostile(entry.parent / "executed")))


def _remove(entry: Path) -> None:
    (entry / "b.npy").unlink()


def _scramble_description(entry: Path) -> None:
    (entry / "description.json").write_text('{"key": [')


def _empty_description(entry: Path) -> None:
    (entry / "description.json").write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip_one_bit,
        _break_header,
        _pickle_instead,
        _hostile_pickle_instead,
        _remove,
        _scramble_description,
        _empty_description,
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

    monkeypatch.setattr(index_cache.np, "save", full)
    with pytest.warns(UserWarning, match=r"the order of samples is not kept \(No space left on device\)"):
        assert _matches(load_or_build(tmp_path, {}, _arrays))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def _race(directory: Path, barrier, answers, with_locks: bool) -> None:
    if not with_locks:
        index_cache._one_at_a_time = _no_lock
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
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, answers, with_locks)) for _ in range(3)]
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
