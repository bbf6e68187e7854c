"""Starts a program's ranks on this machine: ``python -m core.training.launch --nproc-per-node 2 script.py --flags``.

For one machine it stands in for ``torchrun``, whose environment variables it sets, and differs where a person sits in
front: a mistake in the flags is the one line that a rank prints, and ends with that rank's status; a crash shows the
traceback of the rank that crashed; Ctrl-C and SIGTERM are passed on and waited for, so that a run can save. Several
machines need ``torchrun`` or Slurm.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

GRACE_S = 5.0
"""How long the other ranks may take to end by themselves once one has failed."""

_POLL_S = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks to their end and returns the exit status: 0, or that of the first rank to fail."""
    options = _parse(arguments)
    return run_ranks(options.nproc_per_node, [options.script, *options.arguments])


def run_ranks(num_ranks: int, command: list[str]) -> int:
    """Runs ranks of this Python with a command line, a script or ``-m module`` first; returns as `main` does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = _start(num_ranks, listener.getsockname()[1], command)
        try:
            with _Signals(ranks):
                store = _serve_store(listener)
                status = _wait(ranks)
                del store
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
    return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m core.training.launch", description=__doc__.split("\n")[0])
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks to start, 1 by default")
    parser.add_argument("script", help="the program that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what is passed on to it")
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node is {options.nproc_per_node}; it takes a positive number")
    return options


def _start(num_ranks: int, port: int, command: list[str]) -> list[subprocess.Popen[bytes]]:
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store lives here, and outlives a rank that fails
    }
    threads = {"OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else {}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **common, **threads, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]


def _serve_store(listener: socket.socket) -> Any:
    """The store through which ranks meet, on a socket that was opened before them: no port can be lost to another."""
    # Imported here: the ranks are importing torch at the same time, and wait in the socket's queue.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks; once one has failed, the others have a grace to end in."""
    deadline = None
    first: tuple[int, int] | None = None
    while any(process.poll() is None for process in ranks):
        if first is None:
            first = _first_failure(ranks)
            if first is not None:
                deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
            break
        time.sleep(_POLL_S)
    first = first or _first_failure(ranks)
    if first is None:
        return 0
    rank, code = first
    if code < 0:
        sys.stderr.write(f"rank {rank} was ended by {signal.Signals(-code).name}\n")
        return 128 - code
    return code


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    failed = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    # Of several in one moment, one that a signal ended is more telling than those that lost a partner.
    return min(failed, key=lambda item: item[1], default=None)


class _Signals:
    """While it lasts, SIGTERM and SIGINT go to the ranks, which decide what they mean."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self._ranks = ranks
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._pass_on)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
