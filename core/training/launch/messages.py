"""What launchers and ranks say to each other: one type a message.

Each process of a rank has a socket to the launcher of its machine, and each other launcher one to the first. Both ends
write JSON, an object a line, whose ``kind`` is the name of one of these types. `checked_json.decode` is the only
reader: what is not exactly one of the types that an end expects raises, and ends the connection.

Launchers prove to each other that they know the job's secret before they say more (`job_secret`): the first one
sends a `Challenge`, the other one signs it in its `Hello`, and the first one signs what that chose in its `Welcome`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from ...base.checked_json import as_json
from ...base.files import BoundsError

RUN_STARTED = "SHARDSTACK_RUN_STARTED"
"""Environment variable: when the launcher started, in `STARTED_FORMAT`. It does not change when ranks start again, by
this launcher or by one of other machines' that takes the place of the first."""
STARTED_FORMAT = "%Y%m%d-%H%M%S.%f"
"""Format of times in UTC. Microseconds tell launchers that start in one second from each other."""

MOST_RANKS = 1024
"""Most ranks of a machine: a stranger's number starts no more."""

VARIABLES = {
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", RUN_STARTED),
}
"""The environment variables that the first launcher may set for ranks of other machines: none that runs code."""


MessageError = BoundsError
"""What came is no message of the types that this end expects. The text says what came, after "line 3"."""


def _is_start(text: str) -> bool:  # it becomes the name of a folder
    try:
        return not text or bool(datetime.strptime(text, STARTED_FORMAT))
    except ValueError:
        return False


Count = Annotated[int, range(2**31)]
Number = Annotated[int, range(-1, 2**31)]
"""-1 for none yet."""
StartText = Annotated[str, _is_start]
Variables = Annotated[dict[str, str], lambda variables: variables.keys() <= VARIABLES]
Seconds = Annotated[float, lambda seconds: seconds >= 0]


# ---- rank -> launcher. `generation` is that of the rank, -1 before its first.


@dataclass(frozen=True)
class Began:
    """The program runs under `entry.run_command`, which says when it has ended."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks that the program can run on."""

    generation: Number
    sizes: list[Count]


@dataclass(frozen=True)
class Step:
    """The rank goes on."""

    generation: Number
    step: Annotated[int, range(-(2**63), 2**63)]
    seconds: Seconds


@dataclass(frozen=True)
class Where:
    """By group, how many collectives the rank has called, and whether it waits in one."""

    generation: Number
    calls: dict[str, tuple[Count, bool]]


@dataclass(frozen=True)
class Done:
    """The program of generations has ended on every rank."""

    generation: Number


@dataclass(frozen=True)
class Leaves:
    """The program has ended on this rank, whose process ends next. -1: it has entered no generation."""

    generation: Number


FromRank = Began | Sizes | Step | Where | Done | Leaves


# ---- launcher -> rank


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A rank's place among the ranks that work together until one is lost."""

    number: Count = 0
    """Counts from 0 over all restarts of a launcher."""
    rank: Number = 0
    """-1: the process waits as a spare."""
    local_rank: Count = 0
    world_size: Count = 1
    local_world_size: Count = 1
    """Ranks on this machine."""
    node: Count = 0
    """Number of this machine."""
    lost: str = ""
    """Which rank was lost before this generation, and how. Empty for the first."""
    lost_at: Seconds = 0.0
    """When the launcher saw the loss (`time.time`). 0 for the first."""
    policy: str = "restart"
    """What survivors do: ``replace`` or ``shrink``."""
    limit_s: Seconds = 0.0
    """Seconds in which a rank has to leave the generation before."""


@dataclass(frozen=True)
class AskWhere:
    """Asks how many collectives the rank has called."""


@dataclass(frozen=True)
class Over:
    """The program has ended on every rank."""


ToRank = Generation | AskWhere | Over


# ---- between launchers, before they know each other


@dataclass(frozen=True)
class Challenge:
    """Asks the other launcher to sign a random text."""

    nonce: str


@dataclass(frozen=True)
class Hello:
    """Joins. After either launcher was lost it joins again, with the last generation and `RUN_STARTED`."""

    node: Annotated[int, range(-(2**31), 2**31)]
    machine: str
    launcher: str
    """The launcher's random name: a launcher that joins again takes its own place."""
    num_ranks: Count
    policy: str
    generation: Number
    started: StartText
    run: str
    """The scheduler's number of the job, or what ``--run-id`` says."""
    command: str
    """A hash of the command of the ranks."""
    nonce: str
    """The text that the first launcher has to sign."""
    signature: str = ""
    """Signature of the challenge and of all other fields."""


@dataclass(frozen=True)
class Welcome:
    """The launcher is admitted. `signature` signs the launcher's nonce."""

    signature: str


@dataclass(frozen=True)
class Refused:
    """The launcher is not taken in. `signature` is empty if the first one does not know it."""

    reason: str
    signature: str


# ---- between launchers that know each other


@dataclass(frozen=True)
class Beat:
    """The launcher at this end is alive."""


@dataclass(frozen=True)
class Start:
    """Start a worker's process, to be LOCAL_RANK `place`."""

    worker: Count
    place: Annotated[int, range(MOST_RANKS)]
    environment: Variables


@dataclass(frozen=True)
class Tell:
    worker: Count
    message: ToRank


@dataclass(frozen=True)
class Signal:
    """Send a signal to a worker's process. Signal 9 ends the process's children too."""

    worker: Count
    number: Annotated[int, range(1, 65)]


@dataclass(frozen=True)
class End:
    """All is over."""

    status: Annotated[int, range(256)]


@dataclass(frozen=True)
class Said:
    worker: Count
    message: FromRank


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended. -9 is a signal."""

    worker: Count
    code: Annotated[int, range(-64, 256)]


FromFirst = Beat | Start | Tell | Signal | End
FromOther = Beat | Said | Ended
Message = FromRank | ToRank | Challenge | Hello | Welcome | Refused | FromFirst | FromOther


def encode(message: Message) -> bytes:
    """Returns the line of a message, with its end."""
    return json.dumps(as_json(message)).encode() + b"\n"
