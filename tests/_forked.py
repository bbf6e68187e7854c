"""Starts processes in milliseconds: they are forked from one that has imported what tests need."""

from __future__ import annotations

import multiprocessing as mp

FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["tests._imports"])
