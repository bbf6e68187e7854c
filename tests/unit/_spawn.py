"""Runs a function on several ranks, each a process of its own, and shows a rank's traceback when it fails.

    def _sums_ranks(offset: int) -> float:                    # at module level: it travels by name
        value = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(value)
        return value.item()

    def test_all_reduce():
        assert run_distributed(_sums_ranks, 2, 10) == [21.0, 21.0]

    @on_ranks(2)                                              # a test whose whole body runs on each rank
    def test_a_broadcast():
        ...

Ranks are forked from a process that has imported everything (`tests/_forked.py`), and those of a world size are reused
by every test of the session. They meet in a store of this process, at a port that the system chooses: a file store
looks for a key each 10 ms. Each job has a time limit; after a failure or a time-out the processes are ended, and the
next test gets new ones, so that no test inherits a broken group.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import inspect
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests._forked import FORKED
from tests.unit._process_state import process_state_kept

START_LIMIT_S = 600.0
_HOST = "127.0.0.1"
JOB_LIMIT_S = 600.0  # ends a hang; of a job that takes seconds a busy machine makes minutes
IDLE_POOLS_KEPT = 4  # world sizes whose processes stay alive
_GROUPS_LEFT = 8  # of jobs whose models cannot be freed: each wakes up a thread a hundred times a second
_GIVES_UP_AFTER = timedelta(seconds=0.5)
_LISTENS_EACH_S = 0.2  # where ranks of a test ask each other: less than in a run, which a test would wait for
_JOBS_NAMED = 4  # the last jobs of a pool, named when one fails
_SHOW_STACKS = signal.SIGUSR2  # no test sends it


class RankFailure(RuntimeError):
    """A rank raised, died, or did not finish in time; the message holds the tracebacks of all that raised."""


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, limit_s: float = JOB_LIMIT_S) -> list[Any]:
    """Calls `fn(*args)` on `world_size` gloo ranks and returns what each rank returned, in rank order.

    `fn` must be importable (defined at module level); arguments and results are pickled. Seeds are set to the same
    value on every rank before each call, and `core.parallel_state` is torn down after it.
    """
    pool = _POOLS.pop(world_size, None)
    if pool is not None and not pool.is_fresh():
        pool.close()
        pool = None
    pool = pool or _RankPool(world_size)
    results = pool.run(fn, args, limit_s)  # a failure closes the pool, which then is not put back
    _POOLS[world_size] = pool
    while len(_POOLS) > IDLE_POOLS_KEPT:
        _POOLS.pop(next(iter(_POOLS))).close()
    return results


def on_ranks(
    world_size: int | str, limit_s: float = JOB_LIMIT_S
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Makes a test of a function that runs on each of several ranks, with the arguments that pytest passes.

    Args:
        world_size: the number of ranks, or the name of the argument that has it.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            size = arguments[world_size] if isinstance(world_size, str) else world_size
            run_distributed(test, size, *inspect.signature(body).bind(**arguments).args, limit_s=limit_s)

        test.body = body  # type: ignore[attr-defined]  # what `_serve` calls: the test itself travels by its name
        return test

    return decorate


def run_anywhere(fn: Callable[..., Any], world_size: int, *args: Any) -> None:
    """Calls `fn(*args)` on that many ranks; in this process where one is enough."""
    if world_size == 1:
        fn(*args)
    else:
        run_distributed(fn, world_size, *args)


class _RankPool:
    def __init__(self, world_size: int) -> None:
        # Where ranks meet, and a folder for the files of their stacks; both live as long as the ranks.
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._jobs: deque[str] = deque(maxlen=_JOBS_NAMED)  # names of the last ones; `run` appends
        for rank in range(world_size):
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(
                target=_serve, args=(theirs, rank, world_size, self._store.port, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(START_LIMIT_S, "starting")

    def is_fresh(self) -> bool:
        """Waits for the end of the last job, which returned before its groups were destroyed.

        Returns whether the group works, which ranks see there, and jobs have left few others.
        """
        if not all(process.is_alive() for process in self._processes):
            return False
        try:
            return all(pipe.poll(START_LIMIT_S) and pipe.recv() <= _GROUPS_LEFT for pipe in self._pipes)
        except (EOFError, OSError):  # a rank dies
            return False

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], limit_s: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((fn, args))
        results = self._collect(limit_s, fn.__name__)
        self._jobs.append(f"{fn.__module__}.{fn.__name__}")
        return results

    def _collect(self, limit_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results | failures]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = [rank for rank in range(len(self._pipes)) if rank not in results | failures]
                failures |= {rank: f"no answer within {limit_s:g} s\n{self._where_it_is(rank)}" for rank in silent}
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(5)
                    succeeded, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if succeeded else failures)[rank] = value
            if failures:  # the others may be waiting in a collective for the one that failed
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures:
            self.close()
            report = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
            before = f" after {', '.join(self._jobs)}" if self._jobs else ""
            raise RankFailure(f"{what} on {len(self._pipes)} ranks{before}:\n{report}")
        return [results[rank] for rank in range(len(self._pipes))]

    def _where_it_is(self, rank: int) -> str:
        """Returns the stacks of a rank's threads."""
        stacks = _stacks_file(self._folder.name, rank)
        process = self._processes[rank]
        if process.pid is None or not process.is_alive() or not stacks.exists():
            return f"exit code {process.exitcode}"
        os.kill(process.pid, _SHOW_STACKS)
        time.sleep(0.5)
        return stacks.read_text()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


_POOLS: dict[int, _RankPool] = {}


@atexit.register
def close_pools() -> None:
    """Ends every rank process that is still alive."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def _num_groups(pid: int) -> int:
    """Returns how many of gloo's groups a process has, by their threads; 0 where the system does not say."""
    number = 0
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            number += name.read_text() == "gloo_tcp_loop\n"
    return number


def _serve(pipe: Connection, rank: int, world_size: int, port: int, folder: str) -> None:
    """Joins the group, then answers jobs until the pipe closes: the life of one rank."""
    from core.comm import record

    global _port, _points, _job
    _port, _points = port, _connect(port)
    os.environ.update(OMP_NUM_THREADS="1", SHARDSTACK_DEVICE="cpu", RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    if world_size > 1:  # a rank alone is asked by none, and does not listen
        record._INTERVALS_WITHOUT_ANSWER = int(JOB_LIMIT_S / 2)  # on a busy machine a rank may take long to answer
    stacks = _stacks_file(folder, rank).open("w")  # open while the process lives
    faulthandler.register(_SHOW_STACKS, stacks, all_threads=True)
    dist.init_process_group(
        "gloo", store=_connect(port), rank=rank, world_size=world_size, timeout=timedelta(seconds=JOB_LIMIT_S)
    )
    dist.barrier()
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        with process_state_kept():
            try:
                _job += 1
                _seed_everything()
                answer = (True, getattr(fn, "body", fn)(*args))
                _check_left_nothing_behind()
            except BaseException:
                answer = (False, traceback.format_exc())
        # By value: a tensor that is shared between processes keeps a file open for as long as a test keeps it. Before
        # ranks wait for each other: after a failure there is no rank to wait for.
        pipe.send_bytes(pickle.dumps(answer))
        del fn, args, answer  # what they refer to would outlive the job
        _tear_down()
        pipe.send(_num_groups(os.getpid()))  # `is_fresh` waits for it
        gc.freeze()  # what outlives the job, such as a library it imported: no later collection looks at it again


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks-{rank}")


def _connect(port: int) -> dist.TCPStore:
    return dist.TCPStore(_HOST, port, timeout=timedelta(seconds=JOB_LIMIT_S))


_port: int
"""Of the store in which the ranks meet. `_serve` sets it."""
_points: dist.TCPStore
"""A connection of its own, which no thread waits on: it would keep other threads out. `_serve` makes it."""


def reach(point: str) -> None:
    """Lets ranks go on that wait in `wait_for` for this point; for jobs whose ranks shall not meet in a collective."""
    _points.set(f"tests/{_job}/{point}", "reached")


def wait_for(*points: str) -> None:
    """Waits, in no collective, until ranks of this job have called `reach` with each point."""
    _listen_often()
    keys = [f"tests/{_job}/{point}" for point in points]
    _connect(_port).wait(keys, timedelta(seconds=JOB_LIMIT_S / 2))


def has_reached(point: str) -> bool:
    """Returns whether a rank of this job has called `reach` with this point."""
    return bool(_points.check([f"tests/{_job}/{point}"]))


def give_up_soon(group: dist.ProcessGroup) -> None:
    """Makes this rank's calls in a group fail soon, if a rank stays away; until the job ends.

    To be called right before the call that is to fail. A limit given when the group is made would be that of
    connecting and of every call before, which take seconds on a busy machine.
    """
    from core.comm import gloo

    _listen_often()
    group._get_backend(torch.device("cpu"))._set_default_timeout(_GIVES_UP_AFTER)
    # Messages between two ranks keep the limit with which their group was made.
    _undone_after_the_job.enter_context(mock.patch.object(gloo, "_wait_for", _wait_briefly))


def _listen_often() -> None:
    """Makes this rank answer other ranks' questions about its collectives sooner, until the job ends."""
    from core.comm import record

    _undone_after_the_job.enter_context(mock.patch.object(record, "_listening_interval_s", lambda: _LISTENS_EACH_S))


def _wait_briefly(messages: Sequence[dist.Work]) -> None:
    for message in messages:
        message.wait(_GIVES_UP_AFTER)


_undone_after_the_job = ExitStack()
"""Patches of this rank. `give_up_soon` and `_listen_often` add; `_tear_down` undoes them."""


_job = -1
"""Number of the job, the same on all ranks. `_serve` raises it when a job begins."""


def _check_left_nothing_behind() -> None:
    """Raises if this thread is still in a collective by its record: the next job's messages would have its tag."""
    call = sys.modules.get("shardstack.comm.call")
    left = call.recorded_collective() if call is not None else None
    if left is not None:
        raise RuntimeError(f"the job has left the {left.kind} of {left.what} without leaving its record")


def _seed_everything() -> None:
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)


def _tear_down() -> None:
    """Leaves the next job the default group alone, on all ranks before any begins it."""
    _finish_lanes()
    _undone_after_the_job.close()
    dist.barrier()  # a group may still be connecting on a slower rank
    parallel_state = sys.modules.get("shardstack.parallel_state")  # only a job that imported it can have built groups
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    # A destroyed group that is kept wakes up its thread a hundred times a second.
    groups = sys.modules.get("shardstack.distributed.groups")
    if groups is not None:
        groups._twins.clear()
    for mesh in [each for each in gc.get_objects() if type(each) is dist.DeviceMesh]:  # caches of DTensor keep meshes
        getattr(mesh, "_pg_registry", {}).clear()
    if "torch.distributed.tensor" in sys.modules:
        from core.base._torch_compat import forget_sharding_decisions

        forget_sharding_decisions()
    random_streams = sys.modules.get("shardstack.tensor_parallel.random")
    if random_streams is not None:  # else dropout of the next job would draw from the streams of this one
        random_streams.get_rng_tracker().reset()
    _forget_collectives()
    _forget_compiled()
    # Old groups must have closed their sockets before new ones open theirs: gloo closes late, and then now and then a
    # socket that has come to have the same number.
    gc.collect()
    dist.barrier()


def _finish_lanes() -> None:
    """Waits for collectives that the job has left running, such as the gather after its last step.

    One that began after `_forget_collectives` would be found under way by the next job, and one that uses a group
    after it is destroyed would fail.
    """
    lanes = sys.modules.get("shardstack.comm.lane")
    if lanes is not None:
        cpu = torch.device("cpu")
        for number in (0, 1):
            lanes.comm_lane(cpu, number).run(_do_nothing)


def _do_nothing() -> None:
    pass


def _forget_collectives() -> None:
    """Drops this job's collectives from the records: a later wait for a device would find one left under way.

    Their numbers go on, so that a message that no rank has received matches none of the next job.
    """
    record = sys.modules.get("shardstack.comm.record")
    for known in record.live_records() if record is not None else ():
        known.calls.clear()
        if known.published_table:  # a question of the next job would be answered by it
            record._store().delete_key(f"shardstack/{record._key(known.group_name, known.rank)}")
            known.published_table = {}


def _forget_compiled() -> None:
    """Drops what Dynamo has compiled: it falls back to eager where a function was compiled often before."""
    compiling = sys.modules.get("torch._dynamo.convert_frame")
    if compiling is not None and compiling.FRAME_COUNTER:
        torch._dynamo.reset()
