"""A process that is to end with its parent does so, also where the parent died before it could say so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.training.launch import parent_death


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_parent_that_is_gone_already_is_noticed():
    command = [sys.executable, "-I", parent_death.__file__, "1", sys.executable, "-c", "print('ran')"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (137, "")


def test_it_becomes_the_command_that_it_is_given():
    command = f"[sys.executable, '-I', {parent_death.__file__!r}, str(os.getpid()), sys.executable, '-c', "
    inner = f"import subprocess, sys, os; subprocess.run({command}'import sys; print(sys.argv)', 'a b'])"
    ended = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, timeout=600)
    assert ended.stdout == "['-c', 'a b']\n"
