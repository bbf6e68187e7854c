"""Variables of the environment that no launcher sets so: each is one line that names it, before anything waits."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from unittest import mock

import pytest
import torch.distributed as dist

from core.base.errors import ConfigError
from core.rendezvous import default_group, environment
from core.rendezvous.environment import MOST_THREADS, environment_int
from core.rendezvous.launchers import GENERATION

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
NAMES = (*ALONE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


def _environment(changed: Mapping[str, str]) -> mock._patch_dict:
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    return mock.patch.dict(os.environ, {**others, **changed}, clear=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "abc"}, "RANK is 'abc' in the environment"),
        ({"RANK": "-1"}, "RANK is '-1' in the environment"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x' in the environment"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "999999999"}, "WORLD_SIZE is '999999999'"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is '3' in the environment; it takes 1 to 2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE 1; .* at most 0"),
        ({"MASTER_ADDR": ""}, "RANK is set and MASTER_ADDR not"),
        ({"MASTER_ADDR": "no.such.invalid"}, "MASTER_ADDR is 'no.such.invalid', which this machine cannot find"),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR is 'a..b'"),  # Python cannot even encode it
        ({"MASTER_PORT": "p"}, "MASTER_PORT is 'p'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0' in the environment; it takes 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"OMP_NUM_THREADS": "4,2"}, "OMP_NUM_THREADS is '4,2'"),
        ({"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS is ''"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS is '0'"),
        ({"OMP_NUM_THREADS": "999999999"}, f"OMP_NUM_THREADS is '999999999' .* it takes 1 to {MOST_THREADS}"),
        ({"GLOO_SOCKET_IFNAME": "eth99"}, "GLOO_SOCKET_IFNAME is 'eth99'; take interfaces of this machine .* lo"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth99"}, "GLOO_SOCKET_IFNAME is 'lo,eth99'"),
    ],
)
def test_a_loop_of_ones_own_is_told_what_is_wrong(changed: dict[str, str], said: str) -> None:
    with (
        _environment(ALONE | changed),
        mock.patch.object(environment, "_PAUSE_S", 0.0),
        pytest.raises(ConfigError, match=said) as caught,
    ):
        default_group.init_process_group()
    assert "\n" not in str(caught.value) and not dist.is_initialized()


def test_threads_are_bounded_without_a_launcher() -> None:
    with _environment({"OMP_NUM_THREADS": "4097"}), pytest.raises(ConfigError, match="OMP_NUM_THREADS is '4097'"):
        default_group.init_process_group()


@pytest.mark.parametrize(
    "changed",
    [
        {"MASTER_ADDR": "::1"},
        {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo,lo"},
        {"WORLD_SIZE": "8", "RANK": "7", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "8", "RANK": "7", "LOCAL_RANK": "9"},  # of a launcher that does not say how many ranks are here
        {
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "1",
            GENERATION: "1",
        },  # rank 0 here was lost, and the place is a GPU's
        {"OMP_NUM_THREADS": str(MOST_THREADS), "MASTER_PORT": "65535"},
    ],
)
def test_what_launchers_set_is_taken(changed: dict[str, str]) -> None:
    with _environment(ALONE | changed):
        environment.check_environment()


def test_a_name_that_is_known_a_moment_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([socket.gaierror(-3, "not yet"), socket.gaierror(-2, "not yet"), None])
    pauses: list[float] = []

    def look_up(*_: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with _environment(ALONE):
        environment.check_environment()
    assert len(pauses) == 2


def test_a_long_value_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9" * 10000)
    with pytest.raises(ConfigError, match="RANK is '999") as caught:
        environment_int("RANK", 0)
    assert len(str(caught.value)) < 300
