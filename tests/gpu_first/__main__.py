"""Runs the stages, or those that are named, and prints and packs what each has shown.

    make gpu-first PYTHON=python3 RESULTS=folder ONLY=speed       # one, in at most eight minutes
    make gpu-first PYTHON=python3 RESULTS=folder                  # all stages
    python3 -m tests.gpu_first --only speed kernels --results folder

A command that fails, or takes longer than its limit, does not end the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu_first.checkout import this_checkout
from tests.gpu_first.commands import Outcome, reason_for_no_test, run_command
from tests.gpu_first.results import Results, golden_arguments, this_machine
from tests.gpu_first.stages import Command, Stage, stages
from tests.gpu_first.wheels import unpack_missing
from tests.gpu_machine import ROOT, UNPACKED, gpu_slug, how_to_bring, missing_packages, reason_against


def parse(arguments: Sequence[str], known: Sequence[Stage]) -> argparse.Namespace:
    """Parses the command line; `only` has the stages that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_first", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "; ".join(f"{number} {stage.name}: {stage.tells}" for number, stage in enumerate(known, start=1))
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help=f"names or numbers of {listed}")
    parser.add_argument("--results", type=Path, help="folder for what they show; default: build/gpu-first-TIME")
    parser.add_argument(
        "--update-golden", action="store_true", help="write all golden values of this GPU again, compared with none"
    )
    options = parser.parse_args(arguments)
    names = {name: stage for number, stage in enumerate(known, start=1) for name in (stage.name, str(number))}
    if unknown := [name for name in options.only if name not in names]:
        listed = ", ".join(stage.name for stage in known)
        parser.error(f"there is no stage {', '.join(map(repr, unknown))}; there are {listed}")
    if options.only:
        options.only = [stage for stage in known if stage in [names[name] for name in options.only]]
    else:
        options.only = list(known)
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs stages; returns 0 if each command passed, 1 if one did not, 2 where nothing can run, 130 if interrupted."""
    options = parse(arguments, stages())
    if (reason := reason_against()) is not None:
        return _refuse(reason)
    now = datetime.now(tz=UTC)
    folder = options.results or ROOT / "build" / f"gpu-first-{now:%Y%m%d-%H%M%S}"
    if folder.exists():
        return _refuse(f"the results folder {folder} exists; give --results the name of a new one")
    unpacked = unpack_missing()
    missing = {command.name: missing_packages(command.needs) for stage in options.only for command in stage.commands}
    if all(missing.values()):
        return _refuse(_explain(missing))
    if any(missing.values()):
        print(f"warning: {_explain(missing)}", file=sys.stderr)
    checkout = this_checkout()
    environment = _environment(checkout.commit)
    try:
        results = Results(folder, checkout, this_machine(environment), began=now)
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"the results folder {folder} cannot be made: {error.strerror}; give --results another name")
    results.write(f"{results.machine.device}, {results.machine.versions}; {checkout}\n")
    if unpacked:
        results.write(f"unpacked {', '.join(unpacked)}\n")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for stage in options.only:
            _run_stage(stage, results, environment, options.update_golden)
    except KeyboardInterrupt:
        results.write("\n==== interrupted\n")
        return 130
    finally:
        results.save()
        results.write(f"==== results: {results.archive}; `make gpu-results ARCHIVE=...` takes them in\n")
    return _conclude(results)


def _run_stage(stage: Stage, results: Results, environment: dict[str, str], update_golden: bool) -> None:
    results.write(f"\n==== {stage.name} (at most {stage.minutes:g} min): {stage.tells}\n")
    for command in stage.commands:
        outcome = Outcome("interrupted")
        try:
            outcome = _run(command, results, environment, update_golden)
        finally:
            results.add(stage.name, command.name, outcome)
        why = f", {outcome.why}" if outcome.why else ""
        results.write(f"---- {stage.name}, {command.name}: {outcome.status}{why} ({outcome.seconds:g} s)\n")


def _run(command: Command, results: Results, environment: dict[str, str], update_golden: bool) -> Outcome:
    if missing := missing_packages(command.needs):
        return Outcome("not run", why=f"this Python lacks {', '.join(missing)}")
    arguments = [part.replace("{parts}", str(results.parts.resolve())) for part in command.arguments]
    if command.is_golden:
        try:
            arguments += golden_arguments(gpu_slug(results.machine.device), update=update_golden)
        except ValueError as error:
            return Outcome("not run", why=str(error))
    outcome = run_command(arguments, 60 * command.minutes, environment, results.write)
    report = next((part.partition("=")[2] for part in arguments if part.startswith("--junitxml=")), None)
    if outcome.status == "passed" and report is not None and (why := reason_for_no_test(Path(report))):
        return Outcome("failed", outcome.seconds, why)
    return outcome


def _conclude(results: Results) -> int:
    wrong = [
        f"{stage}, {name} ({outcome.status})"
        for stage, commands in results.outcomes.items()
        for name, outcome in commands.items()
        if outcome.status != "passed"
    ]
    print(f"==== {'; '.join(wrong)}" if wrong else "==== all passed")
    return 1 if wrong else 0


def _explain(missing: dict[str, list[str]]) -> str:
    """Describes the packages that are missing, by command, and the stages that need none of them."""
    packages = list(dict.fromkeys(package for one in missing.values() for package in one))
    lacking = ", ".join(name for name, one in missing.items() if one)
    complete = [s.name for s in stages() if not any(missing_packages(command.needs) for command in s.commands)]
    return (
        f"this Python lacks {', '.join(packages)}, which {lacking} need{'s' if ',' not in lacking else ''}; "
        f"{how_to_bring(packages)}; stages that run without: {', '.join(complete)}"
    )


def _environment(commit: str | None) -> dict[str, str]:
    """Returns the environment of commands: the checkout and the unpacked packages are importable, and are compiled
    once, not by each of some hundred processes."""
    path = [str(ROOT), str(ROOT / UNPACKED), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment | ({"SHARDSTACK_COMMIT": commit} if commit else {})


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
