"""Progress of a run on standard error: a bar where that is a terminal, else a line for each logged step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ..base.device import device_type
from ..base.text import readable_bytes

COLUMNS = 80
"""Most columns of the bar."""

_REFRESH_S = 0.2
_FORMATS = {
    "loss": "loss {:.4g}",
    "lr": "lr {:.2e}",
    "grad_norm": "gradient {:.3g}",
    "step_s": "{:.3g} s/step",
    "tokens_per_s": "{:,.0f} tok/s",
    "mfu": "MFU {:.1%}",
    "peak": "peak {}",
    "skew": "skew {:.2f}",
    "slowest_rank": "slowest rank {}",
}
"""How a line shows figures of `RunLog`, in this order."""
_IN_BAR = ("loss", "tokens_per_s", "mfu", "peak")


class Display:
    """Shows steps and messages. The bar begins with the first step, below all messages before it.

    Without the package tqdm there are lines on a terminal too.

    Args:
        last: number of the last step; None if it is unknown.
    """

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._has_bar = sys.stderr.isatty() and find_spec("tqdm") is not None
        # None before the first step, and where lines are written. `step` makes it.
        self._bar: Any = None

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Shows a step. `figures`: those of `RunLog` if it is logged, else none."""
        texts = _texts(figures) if figures else {}
        if not self._has_bar and texts:
            of = "" if self._last is None else f"/{self._last}"
            self.message(f"step {step}{of}: {', '.join(texts.values())}")
        if not self._has_bar:
            return
        with suppress(OSError):  # the output may be a file on a full disk
            self._bar = self._bar if self._bar is not None else _bar(step, self._last)
            if texts:
                self._bar.set_postfix_str(", ".join(texts[name] for name in _IN_BAR if name in texts), refresh=False)
            self._bar.update(step - self._bar.n)

    def message(self, text: str) -> None:
        """Shows text above the bar."""
        with suppress(OSError):
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        with suppress(OSError):
            if self._bar is not None:
                self._bar.close()


def _texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Formats the figures of a step, with units, and the kind of memory."""
    kind = "GPU" if device_type() == "cuda" else "RAM"
    shown = {**figures, "peak": f"{readable_bytes(figures['memory_bytes'])} {kind}"}
    return {name: form.format(shown[name]) for name, form in _FORMATS.items() if shown.get(name) is not None}


def _bar(step: int, last: int | None) -> Any:
    from tqdm import tqdm

    columns = min(COLUMNS, shutil.get_terminal_size().columns) - 1  # some terminals wrap a full line
    form = "step {n_fmt}{postfix}" if last is None else "{n_fmt}/{total_fmt} {bar} {remaining} left{postfix}"
    before = max(step - 1, 0)
    return tqdm(total=last, initial=before, ncols=columns, bar_format=form, mininterval=_REFRESH_S, file=sys.stderr)
