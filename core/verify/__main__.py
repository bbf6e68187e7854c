"""The command ``python -m shardstack.verify my_module:build --steps 10``.

It starts its ranks, one for each GPU, or two under gloo without a GPU; under a launcher (torchrun, Slurm) it uses the
launcher's ranks. The exit status is 0 if every wrapper is equal, 1 if one is not, 2 if there was nothing to compare.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..base import device
from ..base.command_line import CommandParser
from ..rendezvous import default_group
from ..rendezvous.launchers import set_launcher_variables
from ..training.launch.__main__ import run_ranks
from ..training.launch.entry import add_flags, environment_threads, run_command
from . import WRAPPERS, Options, load_model_under_test, verify

NOT_EQUAL_STATUS = 1


def main(arguments: Sequence[str], program: str = "python -m shardstack.verify") -> int:
    """Runs the command, and returns the exit status."""
    options = _parse(arguments, program)
    set_launcher_variables()
    if "RANK" not in os.environ:
        ranks = options.nproc_per_node or (torch.cuda.device_count() if device.device_type() == "cuda" else 2)
        return run_ranks(ranks, ["-m", "shardstack.verify", *arguments])
    statuses: list[int] = []
    run_command(lambda _: statuses.append(_verify(options)), [])
    return statuses[0]


def _verify(options: argparse.Namespace) -> int:
    settings = Options(
        steps=options.steps, micro_batches=options.micro_batches, optimizer=options.optimizer, lr=options.lr
    )
    torch.set_num_threads(environment_threads())
    default_group.init_process_group(timeout_minutes=5.0)
    under_test = load_model_under_test(options.build)
    _say(
        f"{under_test.name} on {dist.get_world_size()} ranks ({device.device_type()}): {settings.steps} steps of "
        f"{settings.micro_batches} micro-batches, {settings.optimizer}\n"
    )
    differing = []
    for verdict in verify(under_test, settings, options.wrappers):
        of = f", as {verdict.reference}" if verdict.is_equal and not verdict.inapplicable else ""
        _say(f"  {verdict}{of}\n")
        if not verdict.is_equal:
            differing.append(verdict.wrapper)
    _say(f"not equal: {'; '.join(differing)}\n" if differing else "equal\n")
    return NOT_EQUAL_STATUS if differing else 0


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = CommandParser(
        prog=program, description="Trains a model under every wrapper and says whether, and where, the numbers part."
    )
    parser.add_argument("build", metavar="module:function", help="builds the model; see docs/verify.md")
    add_flags(parser, Path(__file__).with_name("flags.json"))
    parser.set_defaults(**vars(Options()))
    parser.add_argument(
        "--wrappers", nargs="+", metavar="WRAPPER", help=f"only these, of: {'; '.join(WRAPPERS)}; all by default"
    )
    options = parser.parse_args(arguments)
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node is {options.nproc_per_node}; it takes a positive number")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
