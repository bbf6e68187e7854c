"""The GPT example with a planted crash: rank `CRASH_RANK` raises in its third step, while the others go on.

With `CRASH_ROUND` only in that round of a launcher that restarts ranks.
"""

import os

from core.training import loop
from core.training.launch.entry import run_command
from tests.unit._program import load_program

_train_step = loop.train_step
_calls = 0


def _step_that_fails(*arguments, **settings):
    global _calls
    _calls += 1
    in_round = os.environ.get("CRASH_ROUND") in (None, os.environ.get("TORCHELASTIC_RESTART_COUNT"))
    if _calls == 3 and in_round and os.environ["RANK"] == os.environ["CRASH_RANK"]:
        if os.environ.get("CRASH_SIGNAL"):
            os.kill(os.getpid(), int(os.environ["CRASH_SIGNAL"]))
        raise ZeroDivisionError("a planted crash")
    return _train_step(*arguments, **settings)


if __name__ == "__main__":
    loop.train_step = _step_that_fails
    run_command(load_program("pretrain_gpt").main)
