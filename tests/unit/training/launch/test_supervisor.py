"""Which rank hangs, by what all ranks have called; and settings of the launcher that contradict."""

from __future__ import annotations

import pytest

from core.base.errors import ConfigError
from core.training.launch.__main__ import run_ranks
from core.training.launch.generations import _sizes
from core.training.launch.joining import Job, LostRankPolicy
from core.training.launch.messages import RUN_STARTED, Done, Generation, Leaves, Sizes, Step
from core.training.launch.processes import SignalCount
from core.training.launch.supervisor import Supervisor, behind


class _Process:
    def __init__(self, node: _Machine, place: int) -> None:
        self.node, self.place, self.code, self.was_ended = node, place, None, False

    def poll(self) -> int | None:
        return -9 if self.node.is_lost else self.code

    def send_signal(self, number: int) -> None:
        pass

    def end(self) -> None:
        self.code, self.was_ended = -9 if self.code is None else self.code, True


class _Machine:
    """A machine whose processes do nothing. Keeps the last place that was announced to each."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.number, self.num_ranks, self.is_lost, self.why = number, num_ranks, False, ""
        self.processes, self.places = {}, {}

    def start(self, worker, place, environment):
        self.processes[worker] = _Process(self, place)
        return self.processes[worker]

    def tell(self, worker, message):
        if isinstance(message, Generation):
            self.places[worker] = message

    def close(self, status):
        pass


class _Script:
    """Machines that join at the start, and what happens later, each time that the launcher looks who joins."""

    generation, started = -1, ""

    def __init__(self, machines, happens) -> None:
        self.machines, self.happens = machines, happens(self)
        # What the launcher does with a message of a worker, and its Supervisor; whoever makes them sets both.
        self.take, self.supervisor = None, None

    def wait_for_all(self, signals):
        return self.machines[1:]

    def newcomers(self):
        for joined in self.happens:
            self.machines += joined
            return joined
        for worker in self.supervisor._active:  # all have said so, and end
            self.take(worker._number, Done(self.supervisor.number))
        for process in self.processes():
            process.code = process.code or 0
        return ()

    def processes(self):
        return [process for machine in self.machines for process in machine.processes.values()]


def _places(monkeypatch, kind, machines, happens, spares=0):
    """Returns the machine and the LOCAL_RANK of each rank at the end."""
    supervisor = _supervisor(monkeypatch, LostRankPolicy(kind, spares=spares), _Script(machines, happens))
    supervisor.watch({})
    told = [(place, machine.number) for machine in machines for place in machine.places.values()]
    last = {p.rank: (number, p.local_rank) for p, number in told if p.number == supervisor.number}
    return {rank: last[rank] for rank in sorted(last) if rank >= 0}


def _supervisor(monkeypatch, policy, script):
    machines = script.machines
    monkeypatch.setattr("core.training.launch.supervisor.ThisNode", lambda *_: machines[0])
    monkeypatch.setattr("core.training.launch.supervisor.Joining", lambda *_: script)
    supervisor = Supervisor(
        Job(policy, "", "", b""), machines[0].num_ranks, [], {}, None, len(machines), SignalCount()
    )
    script.take, script.supervisor = supervisor._take, supervisor
    supervisor.join()
    return supervisor


def test_fewer_ranks_are_spread_over_all_machines(monkeypatch):
    machines = [_Machine(number, 2) for number in range(4)]

    def happens(script):
        script.take(0, Sizes(0, [1, 2, 4, 8]))
        machines[3].is_lost = True
        yield []
        yield []

    places = _places(monkeypatch, "shrink", machines, happens)
    assert places == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (2, 0)}


def test_a_spare_takes_the_gpu_of_a_lost_rank(monkeypatch):
    def happens(script):
        script.processes()[0].code = -9
        yield []
        yield []

    assert _places(monkeypatch, "shrink", [_Machine(0, 2)], happens, spares=1) == {0: (0, 1), 1: (0, 0)}


def test_ranks_of_lost_machines_take_spares_first(monkeypatch):
    third = _Machine(3, 2)

    def happens(script):
        yield [third]
        script.machines[1].is_lost = True
        yield []
        yield []
        script.machines[2].is_lost, third.processes[3].code = True, -9
        yield []
        yield []

    machines = [_Machine(number, 1) for number in range(3)]
    assert _places(monkeypatch, "replace", machines, happens) == {0: (0, 0), 1: (3, 0), 2: (3, 1)}


def test_a_rank_lost_while_others_wait_is_ended_too(monkeypatch):
    machines, lost = [_Machine(0, 2), _Machine(1, 1)], []

    def happens(script):
        machines[1].is_lost = True
        yield []
        yield []
        lost.append(script.processes()[0])
        lost[0].code = -9
        yield [_Machine(1, 1)]

    assert _places(monkeypatch, "replace", machines, happens) == {0: (0, 0), 1: (0, 1), 2: (1, 0)}
    assert lost[0].was_ended


def test_a_run_without_a_machine_for_ranks_has_failed(monkeypatch, capsys):
    lost = _Machine(1, 1)
    lost.is_lost = True
    monkeypatch.setattr(
        "core.training.launch.supervisor.Joining", lambda *_: _Script([None, lost], lambda _: iter([]))
    )
    policy = LostRankPolicy("replace", limit_s=1.0)
    assert run_ranks(0, ["-c", ""], max_restarts=1, policy=policy, num_nodes=2) == 1
    assert capsys.readouterr().err == "no machine is left to run ranks\n"


def test_ranks_have_the_start_of_a_launcher_that_was_lost(monkeypatch, tmp_path):
    joining = _Script([], lambda _: iter([[]] * 10**6))
    joining.started = "20260131-235959"
    monkeypatch.setattr("core.training.launch.supervisor.Joining", lambda *_: joining)
    program = f"import os, pathlib; pathlib.Path({str(tmp_path / 'start')!r}).write_text(os.environ[{RUN_STARTED!r}])"
    assert run_ranks(1, ["-c", program], policy=LostRankPolicy("replace"), num_nodes=2) == 1
    assert (tmp_path / "start").read_text() == "20260131-235959"


def test_a_rank_that_leaves_without_a_word_is_lost(monkeypatch, capsys):
    machine, said = _Machine(0, 2), []

    def happens(script):
        script.take(0, Step(0, 3, 0.1))
        script.processes()[1].code = 0
        yield []
        yield []
        said.append(capsys.readouterr().err)
        script.take(0, Done(0))  # of the generation before
        script.processes()[0].code = 0
        yield []
        yield []

    assert _places(monkeypatch, "replace", [machine], happens) == {0: (0, 0), 1: (0, 1)}
    assert said == ["rank 1 ended with status 0 before its program had; a new process takes its place\n"]
    assert capsys.readouterr().err.startswith("rank 0 ended with status 0 before its program had; ")


def test_a_rank_that_leaves_before_its_generation_is_lost(monkeypatch, capsys):
    monkeypatch.setattr("core.training.launch.supervisor._LEAVE_S", 0.0)

    def happens(script):
        script.take(1, Leaves(-1))
        script.processes()[1].code = 0
        yield []
        yield []
        yield []
        yield []

    assert _places(monkeypatch, "shrink", [_Machine(0, 2)], happens)[0] == (0, 0)
    assert "rank 1 ended with status 0 before its program had; going on with 1 of 1" in capsys.readouterr().err


def test_a_rank_lost_at_the_same_step_each_time_is_given_up(monkeypatch, capsys):
    def happens(script):
        while True:
            script.take(0, Step(script.supervisor.number, 3, 0.1))
            script.processes()[-1].code = 1
            yield []

    _places(monkeypatch, "replace", [_Machine(0, 2)], happens)
    assert "rank 1 failed with status 1; 10 losses without a further step" in capsys.readouterr().err


def test_a_failure_after_the_last_step_is_one(monkeypatch):
    def happens(script):
        script.take(0, Done(0))
        script.take(1, Done(0))
        script.processes()[0].code, script.processes()[1].code = 3, 0
        yield []

    supervisor = _supervisor(monkeypatch, LostRankPolicy("shrink"), _Script([_Machine(0, 2)], happens))
    assert [worker.status for worker in supervisor.watch({})] == [3, 0]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([{"dp": (5, True)}, {"dp": (4, False)}], [1]),
        ([{"dp": (5, True)}, {"dp": (4, False)}, {"dp": (5, True)}, {"dp": (4, False)}], [1, 3]),
        # rank 3 hangs: rank 2 waits for it in a tensor-parallel group, and so do rank 0 for rank 2, and rank 1
        (
            [
                {"tp01": (9, False), "dp02": (3, True)},
                {"tp01": (9, False), "dp13": (3, True)},
                {"tp23": (8, True), "dp02": (2, False)},
                {"tp23": (7, False), "dp13": (2, False)},
            ],
            [3],
        ),
        ([{"dp": (5, True)}, {"dp": (5, True)}], []),
        ([{}, {}], []),
    ],
    ids=["one of two", "two of four", "behind a waiting rank", "all wait", "no record"],
)
def test_ranks_that_others_wait_for_are_found(positions, expected):
    assert behind(positions, range(len(positions))) == expected


def test_only_the_first_start_needs_a_smaller_number_of_ranks():
    def takes_pairs(size):
        if size % 2:
            raise ConfigError("odd")

    assert _sizes(Generation(world_size=2, policy="shrink", number=3), takes_pairs) == [2]
    with pytest.raises(ConfigError, match="run on no fewer than 2 ranks"):
        _sizes(Generation(world_size=2, policy="shrink"), takes_pairs)
