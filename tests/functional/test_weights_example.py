"""The example that sends weights to a server, as its users run it on two ranks."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.unit._program import REPOSITORY, run_program

EXAMPLE = REPOSITORY / "examples" / "weights" / "train_and_generate.py"


@pytest.mark.long
def test_a_server_generates_with_each_version_of_small_patches(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
    ended = run_program(EXAMPLE, address, folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.err
    assert re.findall(r"server: version (\d) continues with", ended.out) == ["0", "1", "2", "3"]
    sent = [(int(part), int(whole)) for part, whole in re.findall(r"sent (\d+) bytes of (\d+)", ended.out)]
    assert len(sent) == 3 and all(0 < part < whole / 2 for part, whole in sent)
