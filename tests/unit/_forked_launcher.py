"""Our launcher in a forked process, whose ranks are forked too: they start without importing anything again."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests._forked import FORKED


class ForkedLauncher:
    """A launcher that runs, in a process group of its own: what `subprocess.Popen` would give of it."""

    def __init__(
        self, arguments: Sequence[Any], folder: Path, prepare: Callable[[], None] | None = None, **variables: str
    ) -> None:
        """Starts it in `folder` with additional environment variables. Calls `prepare` there before its `main`."""
        self._outputs = [folder / "launcher.out", folder / "launcher.err"]
        command = [str(argument) for argument in arguments]
        self._process = FORKED.Process(target=_launch, args=(command, folder, self._outputs, variables, prepare))
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end, and returns what it and its ranks have written to stdout and to stderr."""
        self._process.join(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._outputs)
        return out, err


def _launch(
    command: list[str],
    folder: Path,
    outputs: Sequence[Path],
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    from core.training.launch import nodes
    from core.training.launch.__main__ import main

    os.setsid()
    os.environ.update(environment)
    mp.set_start_method(mp.get_all_start_methods()[0], force=True)  # that of a process which nothing forked
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    if prepare is not None:
        prepare()
    with mock.patch.object(nodes, "start_rank", _ForkedRank):
        sys.exit(main(command))


class _ForkedRank:
    """What the launcher uses of `subprocess.Popen`, of a rank that is forked from it and ends with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()) -> None:
        from core.training.launch.processes import end_with_parent

        self.returncode: int | None = None  # set once, by `poll` or `wait`
        self._command = list(command)
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                end_with_parent(launcher)
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)  # the launcher counts them
                os._exit(self._run(environment))
            finally:
                os._exit(1)

    def _run(self, environment: Mapping[str, str]) -> int:
        os.environ.update(environment)
        sys.argv = self._command
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)  # before it has a session of its own
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
