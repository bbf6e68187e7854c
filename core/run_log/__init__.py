"""The log of a training, for any loop, model and wrapper: lines, trackers, progress and a loss curve.

log         `RunLog`, which a loop calls once a step
files       ``log.jsonl``, the loss curve, and files that wait for a full disk
trackers    TensorBoard, Weights & Biases, MLflow, trackio, or an object of the user's
display     a progress bar, or lines where there is no terminal
figures     memory, lead times of ranks, and speed of the device
"""

from .files import read_log
from .log import RunLog
from .trackers import Tracker

__all__ = ["RunLog", "Tracker", "read_log"]
