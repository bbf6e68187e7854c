"""Trackers of experiments, by the interfaces of their own packages.

(The classes of `accelerate.tracking` raise unless a `PartialState` exists, which starts a process group where a
launcher's environment is set. An instance of one that a program with an `Accelerator` has made may be given to
`RunLog` as it is.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import ConfigError, ShardstackError, import_extra
from ..base.text import choices, first_line


class Tracker(Protocol):
    """Receives the numbers of logged steps: a run of ``wandb`` or ``trackio``, or a tracker of `accelerate`."""

    def log(self, values: dict[str, Any], step: int) -> object:
        """Takes numbers by name. Steps do not decrease."""

    def finish(self) -> object:
        """Is called once, at the end."""


class TensorBoard:
    """Writes event files. Opens a new writer after an error, which the old one does not survive.

    Args:
        folder: of the event files.
        first: step from which on what earlier runs wrote there is hidden.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, first: int) -> None:
        import_extra("tensorboard", "trackers", "TensorBoard")
        self._folder = folder
        # None after an error, until `log` opens another.
        self._writer: Any = None
        self._open(first)

    def _open(self, first: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first)
        return self._writer

    def log(self, values: dict[str, Any], step: int) -> None:
        writer = self._writer or self._open(step)
        try:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        except OSError:
            self._writer = None
            raise

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _MLflow:
    def __init__(self, project: str, settings: Mapping[str, Any] | None) -> None:
        self._mlflow = import_extra("mlflow", "trackers", "The tracker 'mlflow'")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", project))
        self._run_id = self._mlflow.start_run().info.run_id
        self._mlflow.log_params(dict(settings or {}))

    def log(self, values: dict[str, Any], step: int) -> None:
        self._mlflow.log_metrics(values, step=step, run_id=self._run_id)

    def finish(self) -> None:
        self._mlflow.end_run()


def _init(package: str, project: str, settings: Mapping[str, Any] | None) -> Tracker:
    """Starts a run of ``wandb`` or ``trackio``, which have one interface."""
    module = import_extra(package, "trackers", f"The tracker {package!r}")
    project = os.environ.get(f"{package.upper()}_PROJECT", project)
    run: Tracker = module.init(project=project, config=dict(settings or {}))
    return run


def open_tracker(
    tracker: str | Tracker, folder: Path | None, first: int, settings: Mapping[str, Any] | None
) -> Tracker:
    """Starts the tracker of a name, or returns an object that has `log` and `finish`.

    The name of the run's folder is that of the project or experiment, unless an environment variable of the package
    says otherwise.

    Raises:
        ConfigError: an unknown name, TensorBoard without a folder, or a package that refuses to start.
        MissingExtraError: its package is not installed.
    """
    if not isinstance(tracker, str):
        if callable(getattr(tracker, "log", None)) and callable(getattr(tracker, "finish", None)):
            return tracker
        raise ConfigError(
            f"a tracker of type {type(tracker).__name__} has no methods log(values, step=...) and finish(); give a "
            "run of wandb.init(), a tracker of accelerate, or a name"
        )
    project = folder.resolve().name if folder is not None else "training"
    openers: dict[str, Callable[[], Tracker | None]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", first) if folder is not None else None,
        "wandb": partial(_init, "wandb", project, settings),
        "mlflow": partial(_MLflow, project, settings),
        "trackio": partial(_init, "trackio", project, settings),
    }
    if tracker not in openers:
        raise ConfigError(f"trackers has {tracker!r}; {choices(tracker, openers)}")
    try:
        opened = openers[tracker]()
    except ShardstackError:
        raise
    except Exception as error:  # each package has errors of its own
        raise ConfigError(f"the tracker {tracker!r} did not start ({first_line(error)}); see its settings") from error
    if opened is None:
        raise ConfigError("the tracker 'tensorboard' writes into the folder of the log, and there is none; give one")
    return opened
