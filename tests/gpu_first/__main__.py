"""Runs the stages, or those that are named, and prints and packs what each has shown.

    make gpu-first PYTHON=python3 RESULTS=folder                  # all stages, about half an hour
    make gpu-first PYTHON=python3 RESULTS=folder ONLY='speed'     # one, in at most eight minutes
    python3 -m tests.gpu_first --only speed kernels --results folder

A command that fails, or takes longer than its limit, does not end the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.gpu_first.checkout import this_checkout
from tests.gpu_first.commands import Outcome, run_command, without_a_test
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
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(stage.name for stage in known)}")
    asked = [names[name] for name in options.only] or known
    options.only = [stage for stage in known if stage in asked]
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs stages; returns 0 if every command passed, 1 if one did not, 2 where nothing can run."""
    options = parse(arguments, stages())
    if (reason := reason_against()) is not None:
        return _refuse(reason)
    now = datetime.now(tz=timezone.utc)
    folder = options.results or ROOT / "build" / f"gpu-first-{now:%Y%m%d-%H%M%S}"
    if folder.exists():
        return _refuse(f"the results folder {folder} exists; give --results the name of a new one")
    unpacked = unpack_missing()
    missing = {command.name: missing_packages(command.needs) for stage in options.only for command in stage.commands}
    if any(missing.values()):
        can_run = not all(missing.values())
        print(f"{'warning' if can_run else 'error'}: {_explain(missing)}", file=sys.stderr)
        if not can_run:
            return 2
    checkout = this_checkout()
    environment = _environment(checkout.commit)
    results = Results(folder, checkout, this_machine(environment), began=now)
    results.write(f"{results.machine.device}, {results.machine.versions}; {checkout}\n")
    if unpacked:
        results.write(f"unpacked {', '.join(unpacked)}\n")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for stage in options.only:
            _run_stage(stage, results, environment, options.update_golden)
    except KeyboardInterrupt:
        results.write("\n==== interrupted; what there is by now is packed\n")
        return 130
    finally:
        results.save()
        results.write(f"==== results: {results.archive}; `make gpu-results ARCHIVE=...` takes them in\n")
    return _conclude(results)


def _run_stage(stage: Stage, results: Results, environment: dict[str, str], update_golden: bool) -> None:
    results.write(f"\n==== {stage.name} (at most {stage.minutes:g} min): {stage.tells}\n")
    for command in stage.commands:
        outcome = _run(command, results, environment, update_golden)
        results.add(stage.name, command.name, outcome)
        why = f", {outcome.why}" if outcome.why else ""
        results.write(f"---- {stage.name}, {command.name}: {outcome.status}{why} ({outcome.seconds:g} s)\n")


def _run(command: Command, results: Results, environment: dict[str, str], update_golden: bool) -> Outcome:
    if missing := missing_packages(command.needs):
        return Outcome("not run", why=f"this Python lacks {', '.join(missing)}")
    more: tuple[str, ...] = ()
    if command.is_golden:
        try:
            more = golden_arguments(gpu_slug(results.machine.device), update=update_golden)
        except ValueError as error:
            return Outcome("not run", why=str(error))
    filled = [part.replace("{parts}", str(results.parts.resolve())) for part in (*command.arguments, *more)]
    outcome = run_command([sys.executable, *filled], 60 * command.minutes, environment, results.write)
    report = next((part.partition("=")[2] for part in filled if part.startswith("--junitxml=")), None)
    if outcome.status == "passed" and report is not None and (why := without_a_test(Path(report))):
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
    """Describes what is missing, by command, and which stages need none of it."""
    packages = list(dict.fromkeys(package for of_one in missing.values() for package in of_one))
    lacking = ", ".join(name for name, of_one in missing.items() if of_one)
    fit = [s.name for s in stages() if not any(missing_packages(command.needs) for command in s.commands)]
    return (
        f"this Python lacks {', '.join(packages)}, without which there are no {lacking}; {how_to_bring(packages)}; "
        f"stages that run without: {', '.join(fit)}"
    )


def _environment(commit: str | None) -> dict[str, str]:
    """Returns the environment of commands: the checkout and the unpacked packages are importable, and are compiled
    once, not by each of some hundred processes."""
    path = [str(ROOT), str(ROOT / UNPACKED), *filter(None, [os.environ.get("PYTHONPATH")])]
    named = {"SHARDSTACK_COMMIT": commit} if commit else {}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": os.pathsep.join(path), **named}


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
