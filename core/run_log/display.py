"""Progress of a run on standard error: a bar where that is a terminal, else a line for each logged step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ..base.text import readable_bytes

COLUMNS = 80
"""Most columns of the bar."""

_REFRESH_S = 0.2


class Display:
    """Shows steps and messages. The bar begins with the first step, below all messages before it.

    Without the package tqdm there are lines on a terminal too.

    Args:
        last: number of the last step; None if it is unknown.
        memory: kind of memory that is measured, ``GPU`` or ``RAM``.
    """

    def __init__(self, last: int | None, memory: str) -> None:
        self._last, self._memory = last, memory
        self._has_bar = sys.stderr.isatty() and find_spec("tqdm") is not None
        # None before the first step, and where lines are written. `step` makes it.
        self._bar: Any = None

    def step(self, step: int, figures: Mapping[str, Any] | None) -> None:
        """Shows a step. `figures`: those of `RunLog` if it is logged, else None."""
        texts = None if figures is None else self._texts(figures)
        if not self._has_bar:
            if texts is not None:
                of = "" if self._last is None else f"/{self._last}"
                self.message(f"step {step}{of}: {', '.join(texts.values())}")
            return
        with suppress(OSError):  # the output may be a file on a full disk
            if self._bar is None:
                self._bar = _bar(step, self._last)
            if texts is not None:
                shown = [text for name, text in texts.items() if name in ("loss", "tokens_per_s", "mfu", "memory")]
                self._bar.set_postfix_str(", ".join(shown), refresh=False)
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

    def _texts(self, figures: Mapping[str, Any]) -> dict[str, str]:
        """Formats what a logged step has of these figures, with units."""
        formats = {
            "loss": "loss {:.4g}",
            "lr": "lr {:.2e}",
            "grad_norm": "gradient {:.3g}",
            "step_s": "{:.3g} s/step",
            "tokens_per_s": "{:,.0f} tok/s",
            "mfu": "MFU {:.1%}",
        }
        texts = {n: form.format(figures[n]) for n, form in formats.items() if figures.get(n) is not None}
        if "memory_bytes" in figures:
            texts["memory"] = f"peak {readable_bytes(figures['memory_bytes'])} {self._memory}"
        if "skew" in figures:
            texts["skew"] = f"slowest rank {figures['slowest_rank']} ({figures['skew']:.2f} of the mean)"
        return texts


def _bar(step: int, last: int | None) -> Any:
    from tqdm import tqdm

    columns = min(COLUMNS, shutil.get_terminal_size().columns) - 1  # some terminals wrap a full line
    form = "step {n_fmt}{postfix}" if last is None else "{n_fmt}/{total_fmt} {bar} {remaining} left{postfix}"
    before = max(step - 1, 0)
    return tqdm(total=last, initial=before, ncols=columns, bar_format=form, mininterval=_REFRESH_S, file=sys.stderr)
