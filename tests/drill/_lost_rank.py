"""A rank of the GPT example that hangs at a SIGUSR1."""

from __future__ import annotations

import signal
import time

from core.training.launch.entry import run_command
from tests.functional._program import load_program

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *unused: time.sleep(10_000))
    run_command(load_program("pretrain_gpt").main)
