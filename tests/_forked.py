"""Starts processes in milliseconds: they are forked from one that has imported what tests need."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing import forkserver

FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["tests._imports"])


def start_server() -> None:
    """Starts the process that others are forked from, with the environment and folder of now; waits for nothing."""
    forkserver.ensure_running()
