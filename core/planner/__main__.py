"""The command ``python -m shardstack.planner --world-size 1024 --hardware h100 --num-layers ...``.

It takes the flags of a run, or a whole command line that starts one: what is before the script is read for the number
of ranks. The exit status is 0 if the wrapper that the flags choose fits, 1 if it does not, and 2 for what the run
would refuse.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..base.errors import ConfigError
from ..training.config import validate
from ..training.config.arguments import parse_call, parse_known, parse_values
from ..training.config.build import build_config
from ..training.launch.entry import environment_rank, run_command
from .estimates import NAMES, WRAPPERS, Estimate, estimate, wrapper_configs
from .hardware import calibrate, find_hardware
from .search import candidates, scalings, search, single_changes
from .tables import as_html, as_text, headline, recommendation, search_table, sweep_table, wrapper_tables

DOES_NOT_FIT_STATUS = 1

DESCRIPTION = """Says what a run would cost under every wrapper: memory, bytes on the wire and time of a step. All
other flags are those of `shardstack train`; a command line that starts the run may follow as it is."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The planner's own flags. All others are the run's."""

    world_size: int | None = None
    """Number of ranks. By default the given launcher's, or 1."""
    hardware: str = "h100"
    """a100, h100, h200, b200, or a file that --calibrate wrote."""
    gpu_memory: float | None = None
    """GiB of an accelerator, instead of the hardware's."""
    wrappers: str = ",".join(WRAPPERS)
    """Only these wrappers."""
    json: Path | None = None
    """Also write all numbers into this file."""
    html: Path | None = None
    """Also write tables and pictures into this file, as one page."""
    search: bool = False
    """Rank topologies, micro-batch sizes and recomputation that fit."""
    sweep: bool = False
    """Plan more and more ranks."""
    calibrate: Path | None = None
    """Measure this machine, write its rates into this file, and end. Under a launcher its links are measured too."""

    def __post_init__(self) -> None:
        for name in ("world_size", "gpu_memory"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it takes a positive number")


def main(arguments: Sequence[str], program: str = "python -m shardstack.planner") -> int:
    """Runs the command, and returns the exit status. An error is one line, and ends the process."""
    run_command(lambda words: sys.exit(plan(words, program)), arguments)
    return 0


def plan(arguments: Sequence[str], program: str = "") -> int:
    """Prints the costs of a run, and returns the exit status.

    Raises:
        ConfigError: what the run would refuse.
    """
    options, flags, world_size = _parse(arguments, program)
    hardware = find_hardware(options.hardware)
    if options.calibrate is not None:
        machine, warning = calibrate(hardware)
        if environment_rank() == 0:
            _write(options.calibrate, machine.to_json())
            sys.stdout.write(f"{machine.to_json()}{warning}")
        return 0
    # Neither changes a plan: a command line without them can be planned too.
    values, wrappers = parse_values(flags, {"lr": 1.0, "train_iters": 1}), options.wrappers.split(",")
    own = build_config(values)
    validate(own, world_size)
    if options.gpu_memory is not None:
        hardware = replace(hardware, memory_bytes=int(options.gpu_memory * 2**30))
    configs = wrapper_configs(values, wrappers)
    results: dict[str, Estimate | ConfigError] = {}
    for name, config in configs.items():
        try:
            results[name] = config if isinstance(config, ConfigError) else estimate(name, config, world_size, hardware)
        except ConfigError as error:
            results[name] = error
    own_result = results.get(NAMES[own.ddp.strategy], next(iter(results.values())))
    if isinstance(own_result, ConfigError):
        raise own_result
    found = [result for result in results.values() if isinstance(result, Estimate)]
    refused = [f"refused: {name}: {result}" for name, result in results.items() if isinstance(result, ConfigError)]
    tables, advice = [*wrapper_tables(found, refused)], recommendation(found)
    if not own_result.fits:
        change = next(iter(candidates(values, single_changes(values), world_size, hardware)), None)
        if change is None:
            advice += f" No single change makes {own_result.wrapper} fit."
        else:
            advice += f" {own_result.wrapper} does not fit; the cheapest change that fits: {change.name}."
    if options.search:
        tables.append(search_table(search(values, wrappers, world_size, hardware)))
    feasible = {result.wrapper: result.config for result in found}
    sweep = [*scalings(feasible, world_size, hardware)] if options.sweep else []
    tables += [sweep_table(sweep)] if sweep else []
    title = headline(found[0])
    sys.stdout.write(as_text(title, advice, tables))
    if options.json is not None:
        values = {
            "wrappers": {
                name: result.as_json() if isinstance(result, Estimate) else {"refused": str(result)}
                for name, result in results.items()
            },
            "sweep": [asdict(scaling) for scaling in sweep],
            "recommendation": advice,
        }
        _write(options.json, json.dumps(values, indent=2) + "\n")
    if options.html is not None:
        _write(options.html, as_html(title, advice, tables, found, sweep))
    return 0 if own_result.fits else DOES_NOT_FIT_STATUS


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give a path in a folder that exists"
        ) from error


def _parse(arguments: Sequence[str], program: str) -> tuple[Options, list[str], int]:
    """Returns the planner's options, the flags of the run, and the number of ranks."""
    options, words = parse_known(Options, arguments)
    if {"-h", "--help"} & {*words}:
        parse_call(Options, ["--help"], description=DESCRIPTION, name=program)
    script = next((i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), -1)
    ranks = _world_size(words[: max(script, 0)]) if options.world_size is None else options.world_size
    return options, words[script + 1 :], ranks


def _world_size(launcher: Sequence[str]) -> int:
    """Returns the number of ranks that a launcher's words ask for."""

    def read(*, nproc_per_node: str = "1", nnodes: str = "1") -> tuple[str, str]:
        return nproc_per_node, nnodes

    counts, _ = parse_known(read, launcher)
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise ConfigError(f"the launcher asks for {' x '.join(counts)} ranks; say how many with --world-size")
    return int(counts[0]) * int(counts[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
