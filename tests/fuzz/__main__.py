"""Gives every reader hostile variants of its files until the time is used up.

    python -m tests.fuzz --minutes 10 --seed 1 --only tokenizer

A reader may refuse a file, with an error of `core.base.errors` of one line, or read it. It may not crash, raise
anything else, run what a file holds, start a process, or hold more memory than `MEMORY_BASE_BYTES + MEMORY_MULTIPLE`
times the files' size (`core.base.files`). The first that does is shown with the smallest variant that hypothesis
finds, and kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from core.base.errors import ShardstackError
from core.base.files import MEMORY_BASE_BYTES, MEMORY_MULTIPLE
from tests.fuzz import messages, readers
from tests.fuzz.readers import Reader
from tests.fuzz.variants import variants

READERS = {**readers.READERS, **messages.READERS}

SLICE_S = 15.0
"""How long one process tries one reader."""

_SETTINGS = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
_FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn")


class Watch:
    """Sees what is run and how much memory is held, by this process, while a file is read."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.on = False
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in _FORBIDDEN:
            self.events.append(f"{event} {arguments!r:.200}")

    def read(self, reader: Reader, folder: Path) -> None:
        """Reads a folder; raises AssertionError for what no reader may do."""
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _memory("VmRSS")
        self.on = True
        try:
            reader.read(folder)
        except ShardstackError as error:
            assert len(str(error)) < 20_000, f"an error of {len(str(error))} characters"
        finally:
            self.on = False
        held = _memory("VmHWM") - before
        assert not self.events, f"it ran {self.events}"
        assert held < MEMORY_BASE_BYTES + MEMORY_MULTIPLE * size, f"{held} bytes were held for files of {size}"


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def try_reader(name: str, folder: Path, number: int, seconds: float) -> int:
    """Tries one reader for some seconds, and returns how many variants it was given."""
    reader, watch, until, count = READERS[name], Watch(), time.monotonic() + seconds, 0
    honest = folder / "honest"
    honest.mkdir(parents=True)
    reader.make(honest)
    watch.read(reader, Path(shutil.copytree(honest, folder / "first")))
    files = sorted({path for pattern in reader.files for path in honest.glob(pattern) if path.is_file()})
    draw = random.Random(number)

    def give(file: Path, data: bytes) -> None:
        nonlocal count
        count += 1
        shutil.rmtree(folder / "hostile", ignore_errors=True)
        shutil.copytree(honest, folder / "hostile")
        (folder / "hostile" / file).write_bytes(data)
        reader.repair(folder / "hostile")
        watch.read(reader, folder / "hostile")

    while time.monotonic() < until:
        file = draw.choice(files).relative_to(honest)
        attempt = given(variants((honest / file).read_bytes()))(_bound(give, file))
        seed(draw.getrandbits(32))(_SETTINGS(attempt))()
    return count


def _bound(give: Callable[[Path, bytes], None], file: Path) -> Callable[[bytes], None]:
    def attempt(data: bytes) -> None:
        give(file, data)

    return attempt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=READERS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    until, counts, number = time.monotonic() + 60 * options.minutes, dict.fromkeys(READERS, 0), options.seed
    names = [options.only] if options.only else list(READERS)
    while time.monotonic() < until:
        for name in names:
            number += 1
            seconds = min(SLICE_S, max(1.0, (until - time.monotonic()) / len(names)))
            counts[name] += _in_child(name, folder / f"{number}", number, seconds)
            shutil.rmtree(folder / f"{number}")
    print(f"{sum(counts.values())} hostile files: {', '.join(f'{name} {n}' for name, n in counts.items() if n)}")
    shutil.rmtree(folder)


def _in_child(name: str, folder: Path, number: int, seconds: float) -> int:
    """Returns a process of its own: what crashes does not take the others with it."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        try:
            (folder / "count").write_text(str(try_reader(name, folder / "files", number, seconds)))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise SystemExit(f"{name}: a hostile file ended its reader with {status}; it is in {folder / 'files/hostile'}")
    return int((folder / "count").read_text())


if __name__ == "__main__":
    main()
