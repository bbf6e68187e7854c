"""Trackers of experiments, by the interfaces of their own packages.

(The classes of `accelerate.tracking` raise unless a `PartialState` exists, which starts a process group where a
launcher's environment is set. An instance that a program with an `Accelerator` has made may be given to `RunLog`.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

from ..base.errors import ConfigError, import_extra
from ..base.text import choices, first_line

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


@runtime_checkable
class Tracker(Protocol):
    """Receives the numbers of logged steps: a run of ``wandb`` or ``trackio``, or a tracker of `accelerate`."""

    def log(self, values: dict[str, Any], *, step: int) -> object:
        """Takes numbers by name. Steps do not decrease."""

    def finish(self) -> object:
        """Is called once, at the end."""


class TensorBoard:
    """Writes event files. Opens a new writer after an error, which the old one does not survive.

    Args:
        folder: of the event files.
        first: step from which on TensorBoard hides what earlier runs wrote there.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, first: int) -> None:
        import_extra("tensorboard", "trackers", "The tracker 'tensorboard'")
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(folder))
        # None after an error, until `log` opens another.
        self._writer: Any = self._open(purge_step=first)

    def log(self, values: dict[str, Any], *, step: int) -> None:
        writer, self._writer = self._writer or self._open(purge_step=step), None
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        self._writer = writer

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_tracker(
    tracker: str | Tracker, folder: Path | None, first: int, settings: Mapping[str, Any] | None
) -> Tracker:
    """Starts the tracker of a name, or returns the tracker that it is given.

    The name of the run's folder is that of the project or experiment, unless an environment variable says otherwise:
    WANDB_PROJECT, TRACKIO_PROJECT, MLFLOW_EXPERIMENT_NAME.

    Raises:
        ConfigError: an unknown name, TensorBoard without a folder, or a package that refuses to start.
        MissingExtraError: its package is not installed.
    """
    if isinstance(tracker, Tracker):
        return tracker
    if tracker not in NAMES:
        raise ConfigError(
            f"trackers has {tracker!r}; {choices(str(tracker), NAMES)}, or an object with log and finish"
        )
    if tracker == "tensorboard":
        if folder is None:
            raise ConfigError("the tracker 'tensorboard' writes into the log's folder, and there is none; give one")
        return TensorBoard(folder / "tensorboard", first)
    package, config = import_extra(tracker, "trackers", f"The tracker {tracker!r}"), dict(settings or {})
    variable = "MLFLOW_EXPERIMENT_NAME" if tracker == "mlflow" else f"{tracker.upper()}_PROJECT"
    project = os.environ.get(variable, "training" if folder is None else folder.resolve().name)
    try:
        if tracker != "mlflow":
            return cast(Tracker, package.init(project=project, config=config))
        package.set_experiment(project)
        package.start_run()
        package.log_params(config)
        return cast(Tracker, SimpleNamespace(log=package.log_metrics, finish=package.end_run))
    except Exception as error:  # each package has errors of its own
        raise ConfigError(f"the tracker {tracker!r} did not start ({first_line(error)}); see its settings") from error
