"""The order of operations on simulated streams, and the memory that they use.

Each stream, and each thread of the host, is a line of operations with a vector clock: the last operation of every
other line that has ended before its next one. Waits join clocks. Two accesses to the same bytes, one of them a write,
are a race if neither line's clock has the other's.

The allocator is the worst case of torch's: freed memory goes back to the stream that it was allocated on, whose next
allocation takes it, whatever the sizes. What other streams still do with it then is a race, and so is what they do
with new memory before they have waited for the stream that it was allocated on, which may still use what was freed.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Clock = dict[str, int]
Frame = tuple[str, int, str]

MAIN = "main"
_SHOWN = ("/core/", "/tests/", "/torch/distributed/fsdp/")
_HIDDEN = str(Path(__file__).parent / "_")[:-1]
_HARNESS = tuple(f"{_HIDDEN}{name}.py" for name in ("simulation", "recorder", "installed", "process"))
_FRAMES = 3


class Access(NamedTuple):
    """What an operation does with a range of bytes of a storage."""

    first: int
    last: int
    line: str
    number: int
    writes: bool
    operation: str
    place: tuple[Frame, ...]

    def __str__(self) -> str:
        where = " < ".join(f"{_short(file)}:{line} {name}" for file, line, name in self.place)
        return f"{self.operation} {'writes' if self.writes else 'reads'} on {self.line} at {where or '?'}"


@dataclass
class Memory:
    """A storage: where it is, and what is done with it."""

    home: str
    """The stream that it was allocated on."""
    is_host: bool = False
    is_pinned: bool = False
    accesses: list[Access] = field(default_factory=list)
    used_on: set[str] = field(default_factory=set)
    """Streams whose use the allocator waits for (`record_stream`)."""
    num_bytes: int = 0


class Stream:
    """What `torch.cuda.Stream` is, as far as the project and FSDP2 use it."""

    def __init__(self, simulation: Simulation, name: str = "") -> None:
        self._simulation, self.name = simulation, name or simulation.name_of_stream()

    def wait_stream(self, stream: Stream) -> None:
        self._simulation.join(self.name, self._simulation.clock(stream.name))

    def wait_event(self, event: Event | None) -> None:
        if event is not None:
            self._simulation.join(self.name, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulation)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._simulation.host_waits(self._simulation.clock(self.name))


class Event:
    """What `torch.cuda.Event` is. A query is no wait, and its answer orders nothing: on a GPU it may be another."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self._simulation.clock((stream or self._simulation.current).name))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._simulation.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._simulation.host_waits(self.clock)


class Simulation:
    """Notes operations, and the races among them.

    Attributes:
        races: each once, with its number.
        computes_on: the only stream on which operations may record a graph.
        waits: where the host has waited for a device.
        operations: how many each line had.
        most_bytes: of the device at once. Memory that another stream was noted to use, by `record_stream`, comes back
            once the host has seen the end of that use: the host never asks else, as where it is many layers ahead.
    """

    def __init__(self) -> None:
        self.races: dict[str, int] = {}
        self.waits: list[tuple[Frame, ...]] = []
        self.operations: dict[str, int] = {}
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, Memory] = {}  # by the storage's address
        self._debts: dict[str, list[Access]] = {}  # by the stream whose next allocation may take the memory
        self._count, self._num_streams = 0, 0
        self.most_bytes = self._bytes = 0
        self._late: list[tuple[Access, int]] = []  # freed memory that comes back behind an access, and its bytes
        self._lock = threading.RLock()
        self._of_thread, self._threads = threading.local(), itertools.count(1)
        self.main = self.computes_on = Stream(self, MAIN)

    # ---- lines

    @property
    def host(self) -> str:
        """The line of the thread that asks."""
        name: str = getattr(self._of_thread, "name", "")
        if not name:  # a thread that begins has no name yet: `current_thread` would give it another
            of_process = threading.get_ident() == threading.main_thread().ident
            name = self._of_thread.name = "host" if of_process else f"host, thread {next(self._threads)}"
        return name

    @property
    def current(self) -> Stream:
        entered: list[Stream] = self._of_thread.__dict__.setdefault("streams", [self.main])
        return entered[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self._of_thread.streams.append(stream or before)
        try:
            yield
        finally:
            self._of_thread.streams.pop()

    def name_of_stream(self) -> str:
        """Returns a name for a new stream: where it was made."""
        self._num_streams += 1
        frames = [frame for frame in _frames() if not frame[0].startswith("<")]
        return f"stream {self._num_streams}" + (f" of {_short(frames[0][0])}" if frames else "")

    def clock(self, line: str) -> Clock:
        """Returns a line's clock, which may be joined."""
        return self._clocks.setdefault(line, {})

    def join(self, line: str, other: Clock) -> None:
        with self._lock:
            clock = self.clock(line)
            for name, number in other.items():
                clock[name] = max(number, clock.get(name, 0))

    def host_waits(self, clock: Clock) -> None:
        self.waits.append(_frames())
        self.join(self.host, clock)

    def synchronize(self, device: object = None) -> None:
        for line in list(self._clocks):
            if not line.startswith("host"):
                self.host_waits(self.clock(line))

    # ---- memory

    def allocated(self, tensor: Tensor, *, is_host: bool = False, is_pinned: bool = False) -> None:
        """Notes that a tensor's memory was allocated on the current stream."""
        with self._lock:
            self._memory_of(tensor.untyped_storage(), self.current.name, is_host, is_pinned)

    def memory(self, tensor: Tensor) -> Memory:
        """Returns what is known of a tensor's memory."""
        return self._memory.get(tensor.untyped_storage()._cdata) or Memory(MAIN)

    def used_on(self, tensor: Tensor, stream: Stream) -> None:
        self.memory(tensor).used_on.add(stream.name)

    def _memory_of(
        self, storage: torch.UntypedStorage, line: str, is_host: bool = False, is_pinned: bool = False
    ) -> Memory:
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(line, is_host, is_pinned, num_bytes=storage.nbytes())
            weakref.finalize(storage, self._freed, key)
            if not is_host:
                seen = self.clock(self.host)
                back = [late for late in self._late if late[0].number <= seen.get(late[0].line, 0)]
                self._late = [late for late in self._late if late not in back]
                self._bytes += storage.nbytes() - sum(num_bytes for _, num_bytes in back)
                self.most_bytes = max(self.most_bytes, self._bytes)
                freed = self.clock(line).get(line, 0)
                whole = Access(0, storage.nbytes(), line, freed, True, "an allocation", _frames())
                self._memory[key].accesses.append(whole)
            clock = self.clock(line)
            for old in () if is_host else self._debts.pop(line, ()):
                if old.number > clock.get(old.line, 0):
                    new = Access(0, 0, line, 0, True, "an allocation", _frames())
                    self._note_race("memory is reused while another stream uses it", old, new)
        return self._memory[key]

    def _freed(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key)
            if memory.is_host:  # the allocator of pinned memory waits for the copies
                return
            clock = self.clock(memory.home)
            late = [a for a in memory.accesses if a.line in memory.used_on and a.number > clock.get(a.line, 0)]
            if late:
                self._late.append((max(late, key=lambda access: access.number), memory.num_bytes))
            else:
                self._bytes -= memory.num_bytes
            self._debts.setdefault(memory.home, []).extend(
                access
                for access in memory.accesses
                if access.line not in (memory.home, *memory.used_on)
                and access.number > clock.get(access.line, 0)
                and not access.line.startswith("host")
            )

    # ---- operations

    def operation(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        stream: Stream | None = None,
        blocks: bool = False,
    ) -> None:
        """Notes an operation on the current stream, or on the host if all its tensors are there.

        Args:
            blocks: the host waits for its end.
        """
        with self._lock:
            tensors = [tensor for tensor in (*reads, *writes) if tensor.numel()]
            on_host = bool(tensors) and all(self.memory(tensor).is_host for tensor in tensors)
            host, line = self.host, self.host if on_host else (stream or self.current).name
            self.join(line, self.clock(host))
            self._count += 1
            self.clock(line)[line] = self._count
            self.operations[line] = self.operations.get(line, 0) + 1
            place = _frames()
            for is_write, accessed in ((False, reads), (True, writes)):
                for tensor in accessed:
                    self._access(tensor, Access(*_range(tensor), line, self._count, is_write, name, place))
            if blocks and not on_host:
                self.host_waits(self.clock(line))

    def _access(self, tensor: Tensor, new: Access) -> None:
        if new.first == new.last:
            return
        memory, clock = self._memory_of(tensor.untyped_storage(), new.line), self.clock(new.line)
        kept = []
        for old in memory.accesses:
            overlaps = old.first < new.last and new.first < old.last
            if overlaps and (new.writes or old.writes) and old.number > clock.get(old.line, 0):
                self._note_race("two streams use the same bytes, and neither waits for the other", old, new)
            is_covered = overlaps and new.first <= old.first and old.last <= new.last
            if not (is_covered and (new.writes or (old.line == new.line and not old.writes))):
                kept.append(old)
        memory.accesses = [*kept, new]

    def graph_recorded(self, name: str) -> None:
        """Notes an operation that records a graph: backward would run it on the stream that it is on."""
        if self.current.name != self.computes_on.name:
            new = Access(0, 0, self.current.name, 0, True, name, _frames())
            self._note_race("a graph is recorded on another stream than the one that computes", new, new)

    def _note_race(self, kind: str, old: Access, new: Access) -> None:
        text = f"{kind}:\n    {old}\n    {new}"
        self.races[text] = self.races.get(text, 0) + 1


def _range(tensor: Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if not tensor.numel():
        return first, first
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * size


def _frames() -> tuple[Frame, ...]:
    """Returns the innermost calls of the project, or of FSDP2, the harness left out."""
    found: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        file = frame.f_code.co_filename
        if any(part in file for part in _SHOWN) and file not in _HARNESS:
            found.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _short(file: str) -> str:
    return file[max(file.rfind(part) for part in ("/core/", "/tests/", "/torch/")) + 1 :]
