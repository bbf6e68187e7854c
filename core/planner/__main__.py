"""The command ``python -m core.planner --world-size 1024 --hardware h100 --num-layers ...``.

It takes the flags of a run, or a whole command line that starts one: what is before the script is read for the number
of ranks. The exit status is 0 if the wrapper that the flags choose fits, 1 if it does not, and 2 for what the run
would refuse.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..base.errors import ConfigError
from ..training.config import validate
from ..training.config.arguments import parse_arguments
from ..training.launch.entry import run_command
from .calibrate import calibrate
from .estimates import WRAPPERS, Estimate, estimate, own_wrapper, wrapper_configs
from .hardware import PRESETS, Hardware, find_hardware
from .page import as_html
from .search import MOST_RANKS, candidates, combinations, scalings, single_changes
from .tables import Result, as_text, search_table, sweep_table

DOES_NOT_FIT_STATUS = 1


def main(arguments: Sequence[str]) -> int:
    """Runs the command, and returns the exit status."""
    options, flags = _parse(arguments)
    hardware = find_hardware(options.hardware)
    if options.calibrate is not None:
        measured, warning = calibrate(hardware)
        _write(options.calibrate, measured.to_json())
        sys.stdout.write(f"{measured.to_json()}{warning}")
        return 0
    own = parse_arguments(flags)
    validate(own, options.world_size)
    configs = wrapper_configs(flags, options.wrappers)
    memory = None if options.gpu_memory is None else int(options.gpu_memory * 2**30)
    results = {name: _estimate(name, config, options.world_size, hardware, memory) for name, config in configs.items()}
    chosen = results.get(own_wrapper(own), next(iter(results.values())))
    if isinstance(chosen, ConfigError):
        raise chosen
    text = as_text(results)
    if not chosen.fits:
        change = next(iter(candidates(single_changes(flags), options.world_size, hardware, chosen.gpu_memory)), None)
        made = "no single change makes it fit" if change is None else f"the cheapest change that fits: {change.name}"
        text += f"\n{chosen.wrapper} does not fit; {made}\n"
    if options.search:
        variants = combinations(flags, options.wrappers, hardware.node_size)
        found = candidates(variants, options.world_size, hardware, chosen.gpu_memory)
        text += f"\n{search_table(found)}\n"
    sweep = []
    if options.sweep:
        planned = {name: result.config for name, result in results.items() if isinstance(result, Estimate)}
        sweep = scalings(planned, options.world_size, hardware, chosen.gpu_memory)
        text += f"\n{sweep_table(sweep)}\n"
    sys.stdout.write(text)
    if options.json is not None:
        values = {"wrappers": _as_json(results), "sweep": [asdict(scaling) for scaling in sweep]}
        _write(options.json, json.dumps(values, indent=2) + "\n")
    if options.html is not None:
        _write(options.html, as_html(results, text, sweep))
    return 0 if chosen.fits else DOES_NOT_FIT_STATUS


def _estimate(name: str, config: Result | object, world_size: int, hardware: Hardware, memory: int | None) -> Result:
    if isinstance(config, ConfigError):
        return config
    try:
        return estimate(name, config, world_size, hardware, memory)  # type: ignore[arg-type]
    except ConfigError as error:
        return error


def _as_json(results: Mapping[str, Result]) -> dict[str, object]:
    return {
        name: result.as_json() if isinstance(result, Estimate) else {"refused": str(result)}
        for name, result in results.items()
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give a path in a folder that exists"
        ) from error


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m core.planner",
        description="Says what a run would cost under every wrapper: memory, bytes on the wire and time of a step.",
        epilog="All other flags are those of the run; a command line that starts it may follow as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, help="ranks; by default those of the given launcher, or 1")
    parser.add_argument("--hardware", default="h100", help=f"{', '.join(PRESETS)}, or a calibration; h100 by default")
    parser.add_argument("--gpu-memory", type=float, help="GiB of an accelerator, instead of the hardware's")
    parser.add_argument(
        "--wrappers",
        type=lambda text: text.split(","),
        default=[*WRAPPERS],
        metavar="A,B",
        help=f"only these, of: {', '.join(WRAPPERS)}; all by default",
    )
    parser.add_argument("--json", type=Path, help="also write all numbers into this file")
    parser.add_argument("--html", type=Path, help="also write tables and pictures into this file, as one page")
    parser.add_argument("--search", action="store_true", help="rank topologies and micro-batch sizes that fit")
    parser.add_argument("--sweep", action="store_true", help=f"plan more and more ranks, up to {MOST_RANKS:,}")
    parser.add_argument(
        "--calibrate",
        type=Path,
        help="measure this machine, write its rates into this file, and end; links are those of --hardware",
    )
    before, after = _split(arguments)
    options, launcher = parser.parse_known_args(before)
    options, flags = parser.parse_known_args(after, options)
    if options.world_size is None:
        options.world_size = _world_size(launcher)
    for name in ("world_size", "gpu_memory"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value:g}; it takes a positive number")
    return options, flags


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a command line that starts a run after the script."""
    script = next((i for i, word in enumerate(arguments) if word.endswith(".py") and not word.startswith("-")), -1)
    return arguments[: max(script, 0)], arguments[script + 1 :]


def _world_size(launcher: Sequence[str]) -> int:
    """Returns the number of ranks that a launcher's words ask for."""
    words = [part for word in launcher for part in word.replace("_", "-").split("=", 1)]
    given = dict(itertools.pairwise(words))
    counts = [given.get("--nproc-per-node", "1"), given.get("--nnodes", "1")]
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise ConfigError(f"the launcher asks for {' x '.join(counts)} ranks; say how many with --world-size")
    return int(counts[0]) * int(counts[1])


def _run(arguments: Sequence[str]) -> None:
    sys.exit(main(arguments))


if __name__ == "__main__":
    run_command(_run)
