"""Writes the log of a run: progress bar, ``log.jsonl``, TensorBoard, pictures of model and loss. One rank writes."""

from .log_file import LOG_FILE, Stopwatch, read_log
from .run_log import RunLog

__all__ = ["LOG_FILE", "RunLog", "Stopwatch", "read_log"]
