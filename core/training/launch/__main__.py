"""Starts ranks: ``python -m core.training.launch --nproc-per-node 2 script.py --flags``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...base.errors import ConfigError
from .entry import USER_ERROR_STATUS
from .processes import say
from .ranks import run_ranks
from .supervisor import POLICIES, LostRankPolicy

_DESCRIPTION = "Starts a program's ranks, on this machine and others."


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks to their end and returns the exit status: 0, or that of the first rank to fail."""
    options = _parse(arguments)
    policy = None
    if options.on_lost_rank != "restart":
        policy = LostRankPolicy(
            kind=options.on_lost_rank, limit_s=options.lost_rank_timeout, spares=options.spare_processes
        )
    command = [options.script, *options.arguments]
    try:
        return run_ranks(
            options.nproc_per_node,
            command,
            max_restarts=options.max_restarts,
            policy=policy,
            num_nodes=options.nnodes,
            node=options.node_rank,
            address=(options.master_addr, options.master_port),
        )
    except ConfigError as error:
        say(f"error: {error}")
        return USER_ERROR_STATUS


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m core.training.launch", description=_DESCRIPTION)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks to start, 1 by default")
    parser.add_argument("--nnodes", type=int, default=1, help="machines, each with a launcher; 1 by default")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this machine; 0, the default, decides")
    parser.add_argument("--master-addr", default="127.0.0.1", help="where machine 0 is reached by the others")
    parser.add_argument("--master-port", type=int, default=29500, help="its port, 29500 by default")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how many times to start all ranks again after a failure; 0 by default",
    )
    parser.add_argument(
        "--on-lost-rank",
        choices=POLICIES,
        default="restart",
        help="when a rank dies or hangs: end all ranks, and start them again if --max-restarts allows; or keep the "
        "others, and replace it; or keep the others, and go on with fewer. The last two need a program of generations",
    )
    parser.add_argument(
        "--lost-rank-timeout",
        type=float,
        default=600.0,
        help="seconds without a step after which a rank that holds up the others is killed; 600 by default",
    )
    parser.add_argument(
        "--spare-processes",
        type=int,
        default=0,
        help="processes that wait to take the place of a lost rank; 0 by default",
    )
    parser.add_argument("script", help="the program that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(arguments)
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node-rank is {options.node_rank} and --nnodes {options.nnodes}; nodes count from 0")
    if options.nnodes > 1 and options.on_lost_rank == "restart":
        parser.error("--nnodes above 1 takes --on-lost-rank replace or shrink; to restart all ranks use torchrun")
    decides_alone = options.nnodes > 1 and options.node_rank == 0  # it may compute nothing, and be lost less likely
    for name, least in (("nproc_per_node", 1 - decides_alone), ("max_restarts", 0), ("spare_processes", 0)):
        if getattr(options, name) < least:
            takes = "a positive number" if least else "zero or a positive number"
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it takes {takes}")
    if not options.lost_rank_timeout > 0:
        parser.error(f"--lost-rank-timeout is {options.lost_rank_timeout}; it takes a positive number of seconds")
    if options.node_rank > 0 and options.spare_processes:
        parser.error("--spare-processes is for the launcher of --node-rank 0, which starts them on its machine")
    if options.on_lost_rank == "restart" and options.spare_processes:
        parser.error("--spare-processes is given without --on-lost-rank replace or shrink, which use them")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
