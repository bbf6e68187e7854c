"""Keeps a rank's process when another rank is lost: its program runs again, in groups of the ranks that are left.

    for generation in generations():
        with generation:
            main()                    # joins the process group, loads the newest state, trains

Under a launcher that keeps survivors (``--on-lost-rank replace`` or ``shrink``) a rank that is lost ends the block on
all others: the launcher announces the next generation, a thread closes this process's connections to other ranks, so
that any collective that waits raises, the block's error is dropped with the process group, and the block begins again
with the variables ``RANK`` and ``WORLD_SIZE`` of its new place. Under another launcher, or none, the block runs once.

`shutdown` on a socket is what frees a collective of gloo that waits: `abort` and `shutdown` of a process group do not.
It also reaches collectives inside torch (FSDP2, object collectives), and leaves no thread behind. Those of NCCL wait
on the device, often for memory that ranks of a machine share: there the thread aborts the communicators, which no GPU
has shown yet. A rank that does not leave in time ends, and with it the generation: all ranks start again.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch.distributed as dist

from ... import parallel_state
from ...base import device
from ...base._torch_compat import abort_process_groups
from ...base.checked_json import decode
from ...base.errors import ConfigError, OutOfStepError
from ...comm.lane import groups_are_aborted, wait_for_lanes
from ...comm.out_of_step import defer_explanations, is_failure_of_backend, raise_out_of_step
from ...comm.record import call_counts
from ...rendezvous.launchers import GENERATION
from .link import LAUNCHER_FD, launcher_socket, tell_launcher
from .messages import AskWhere, Done, Generation, Sizes, Step, ToRank, Where
from .processes import say

COPIES_FOLDER = "SHARDSTACK_COPIES_FOLDER"
"""Environment variable: the folder for copies in memory. It is empty or absent under a launcher that keeps no
survivors."""

LOST_STATUS = 75
"""Exit status of a rank that could not leave its generation in time."""

_NCCL_ON_FAILURE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that groups of NCCL's read when they are made: by default a lost rank ends their process."""

_ANNOUNCEMENT_S = 20.0
"""How long a rank whose collective failed waits for the launcher to say which rank was lost."""
_CLOSE_INTERVAL_S = 0.02
_STORE_AFTER_S = 1.0
"""When the connection to the store is closed too, for a rank that waits in the store. Torch then logs a trace."""


def generations(can_run: Callable[[int], object] | None = None) -> Iterator[AbstractContextManager[Generation]]:
    """Yields a context manager for each generation of ranks, until the block inside it ends on all ranks.

    Args:
        can_run: raises ConfigError for a number of ranks that the program cannot run on. None: it takes any number.

    Raises:
        ConfigError: the environment is that of a rank, and its launcher is not there.
    """
    if not os.environ.get(COPIES_FOLDER):
        yield nullcontext(Generation())
        return
    os.environ.setdefault(_NCCL_ON_FAILURE, "0")
    if not _launcher:
        if (connection := launcher_socket()) is None:
            raise ConfigError(
                f"{COPIES_FOLDER} is set and {LAUNCHER_FD} is no socket to this process's launcher; start it with "
                "shardstack.training.launch, or unset both"
            )
        _launcher.append(_Launcher(connection))
    while not _launcher[0].is_over:
        yield _Block(_launcher[0], can_run)


def current_generation() -> Generation | None:
    """Returns this process's generation, or None if its launcher does not keep survivors."""
    return _launcher[0].current if _launcher else None


def copies_root() -> Path | None:
    """Returns the folder in memory for copies of the run's state, or None if its launcher keeps no survivors."""
    folder = os.environ.get(COPIES_FOLDER)
    return Path(folder) if folder and _launcher else None


def report_step(iteration: int, seconds: float) -> None:
    """Tells the launcher that this rank goes on. Without such news for its limit it looks for a rank that hangs."""
    if _launcher:
        tell_launcher(Step(_launcher[0].number, int(iteration), max(0.0, min(float(seconds), 1e9))))


class _Launcher:
    """This process's end of the socket to the launcher, and the thread that listens to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Guards what follows. The thread notifies when a place in a generation has come, or the end.
        self._news = threading.Condition()
        # The place that the launcher has announced last; the thread sets it. None before the first.
        self._announced: Generation | None = None
        # The generation whose block runs, or ran last. `enter` sets it, on the main thread.
        self.current: Generation | None = None
        # Whether the main thread is in a block, whose connections the thread may close. `enter` and `leave` set it.
        self._is_inside = False
        # Sockets that were there before the block (device and inode), which stay open. `enter` sets it.
        self._kept: set[tuple[int, int]] = set()
        # Whether the program has ended on all ranks.
        self.is_over = False
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    @property
    def number(self) -> int:
        """Number of the generation whose block runs, or ran last. -1 before the first."""
        return self.current.number if self.current is not None else -1

    def enter(self) -> Generation:
        """Waits for a place in a generation, and takes it."""
        with self._news:
            self._news.wait_for(
                lambda: self._is_outdated() and self._announced is not None and self._announced.rank >= 0
            )
            generation = self.current = self._announced
            self._kept = {identity for identity, _ in _connections()}
            self._is_inside = True
            groups_are_aborted.clear()
        if generation is None:
            raise RuntimeError("no generation was announced")
        names = {"RANK": generation.rank, "LOCAL_RANK": generation.local_rank, "WORLD_SIZE": generation.world_size}
        names |= {"LOCAL_WORLD_SIZE": generation.local_world_size}
        names |= dict.fromkeys((GENERATION, "TORCHELASTIC_RESTART_COUNT"), generation.number)
        os.environ.update({name: str(value) for name, value in names.items()})
        return generation

    def has_ended(self, limit_s: float) -> bool:
        """Returns whether the launcher has ended the current generation, or does in `limit_s` seconds."""
        with self._news:
            return self._news.wait_for(lambda: self.is_over or self._is_outdated(), limit_s)

    def leave(self) -> None:
        """Says that the block has ended. From here on the thread closes nothing."""
        with self._news:
            self._is_inside = False

    def _is_outdated(self) -> bool:
        return self._announced is not self.current

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = decode(line, ToRank)
                if isinstance(message, AskWhere):
                    tell_launcher(Where(self.number, call_counts()))
                    continue
                with self._news:
                    if isinstance(message, Generation):
                        self._announced = message
                    else:
                        self.is_over = True
                    self._news.notify_all()
                self._free_main_thread()

    def _free_main_thread(self) -> None:
        """Closes this process's connections to other ranks until the main thread has left the block."""
        began_at = time.monotonic()
        while True:
            with self._news:
                if not self._is_inside or not (self.is_over or self._is_outdated()):
                    return
                if dist.is_initialized() and "nccl" in dist.get_backend_config() and not groups_are_aborted.is_set():
                    groups_are_aborted.set()
                    abort_process_groups()
                _close_connections(self._kept, store_too=time.monotonic() - began_at > _STORE_AFTER_S)
            if self._announced is not None and time.monotonic() - began_at > self._announced.limit_s:
                say(f"rank {os.environ['RANK']} did not leave the generation that has ended")
                os._exit(LOST_STATUS)
            time.sleep(_CLOSE_INTERVAL_S)


_launcher: list[_Launcher] = []
"""The launcher of this process, at most one. `generations` adds it. Never cleared."""


class _Block(AbstractContextManager[Generation]):
    """Runs a block in one generation, and drops its error if that generation has ended."""

    def __init__(self, launcher: _Launcher, can_run: Callable[[int], object] | None) -> None:
        self._launcher, self._can_run = launcher, can_run

    def __enter__(self) -> Generation:
        generation = self._launcher.enter()
        defer_explanations(True)
        if not generation.lost and self._can_run is not None:
            tell_launcher(Sizes(generation.number, _sizes(generation, self._can_run)))
        return generation

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            return self._leave(error)
        finally:  # an interrupt, too: the thread must not close connections that the program makes after the block
            self._launcher.leave()
            defer_explanations(False)

    def _leave(self, error: BaseException | None) -> bool:
        """Returns whether the error of the block, or of its last barrier, is that of a generation that has ended."""
        came_from_the_block = error is not None
        if error is None:
            try:
                if dist.is_initialized():
                    device.barrier()  # a rank that is lost before it is replaced, and repeats the end with the others
            except Exception as failure:
                error = failure
            else:
                self._launcher.leave()
                self._launcher.is_over = True
                tell_launcher(Done(self._launcher.number))
                return False
        if not isinstance(error, Exception):
            return False
        came_from_a_rank = is_failure_of_backend(error) or isinstance(error, OutOfStepError)
        if not self._launcher.has_ended(_ANNOUNCEMENT_S if came_from_a_rank else 0.0):
            defer_explanations(False)
            if dist.is_initialized():
                raise_out_of_step(error)
            if not came_from_the_block:
                raise error
            return False
        cause: BaseException | None = error
        while cause is not None:  # frees the tensors of the frames that it came through
            traceback.clear_frames(cause.__traceback__)
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
        wait_for_lanes()
        self._launcher.leave()
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        return True


def _sizes(generation: Generation, can_run: Callable[[int], object]) -> list[int]:
    """Returns the numbers of ranks that a program can run on, up to the generation's number.

    Raises:
        ConfigError: the ranks shall go on with fewer, and no smaller number will do. Those that start again, after a
            machine was lost, may be the fewest.
    """
    sizes = []
    for size in range(1, generation.world_size + 1):
        with suppress(ConfigError):
            can_run(size)
            sizes.append(size)
    if generation.number == 0 and generation.policy == "shrink" and sizes in ([], [generation.world_size]):
        raise ConfigError(
            f"--on-lost-rank is shrink, and these settings run on no fewer than {generation.world_size} ranks; use "
            "replace, or settings that divide among fewer"
        )
    return sizes


def _connections() -> Iterator[tuple[tuple[int, int], socket.socket]]:
    """Yields this process's TCP connections: device and inode, and a duplicate of the socket. Linux only."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            status = os.fstat(int(entry.name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed
            continue
        with duplicate, suppress(OSError):
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                duplicate.getpeername()  # raises for a socket that listens, whose end would end the process
                yield (status.st_dev, status.st_ino), duplicate


def _close_connections(to_keep: set[tuple[int, int]], *, store_too: bool) -> None:
    port = int(os.environ.get("MASTER_PORT", "0"))
    for identity, connection in _connections():
        if identity not in to_keep and (store_too or connection.getpeername()[1] != port):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
