"""Starts ranks on this machine: ``python -m core.training.launch --nproc-per-node 2 script.py --flags``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .ranks import run_ranks

_DESCRIPTION = "Starts a program's ranks on this machine."


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks to their end and returns the exit status: 0, or that of the first rank to fail."""
    options = _parse(arguments)
    return run_ranks(options.nproc_per_node, [options.script, *options.arguments], max_restarts=options.max_restarts)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m core.training.launch", description=_DESCRIPTION)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks to start, 1 by default")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how many times to start all ranks again after a failure; 0 by default",
    )
    parser.add_argument("script", help="the program that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node is {options.nproc_per_node}; it takes a positive number")
    if options.max_restarts < 0:
        parser.error(f"--max-restarts is {options.max_restarts}; it takes zero or a positive number")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
