"""Progress: a bar of at most 80 columns on a terminal, and lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from core.run_log import RunLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[str]:
    """Returns what each carriage return or line end separates."""
    monkeypatch.setattr(sys, "stderr", stream)
    with RunLog(steps=range(30), tokens_per_step=123_456, **settings) as log:
        log.message("| a table | " * 12)
        for step in range(30):
            log.step(step, 2.0 / (step + 1), lr=1e-3, grad_norm=0.5)
            if step == 15:
                log.message("saved")
    return stream.getvalue().replace("\r", "\n").split("\n")


def test_without_a_terminal_each_logged_step_is_a_line(monkeypatch):
    stream = io.StringIO()
    texts = _run(stream, monkeypatch, peak_flops=1e12, flops_per_token=1e6)
    assert "\r" not in stream.getvalue()
    lines = [text for text in texts if text.startswith("step")]
    assert [line.split(":")[0] for line in lines] == ["step 0/29", "step 10/29", "step 20/29", "step 29/29"]
    for part in ("loss ", "lr 1.00e-03", "gradient 0.5", " s/step", " tok/s", "MFU ", "peak ", "iB RAM"):
        assert part in lines[-1]


@pytest.mark.parametrize(("columns", "most"), [(200, 80), (60, 60)])
def test_a_terminal_has_a_bar_that_fits(monkeypatch, columns, most):
    pytest.importorskip("tqdm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    texts = _run(stream, monkeypatch)
    assert "29/29" in texts[-2] and "loss " in texts[-2]
    bars = [text for text in texts if "/29" in text]
    assert bars and max(map(len, bars)) < most
    assert max(texts.index(text) for text in texts if "a table" in text) < texts.index(bars[0])
    assert "saved" in texts


def test_without_tqdm_a_terminal_has_lines(monkeypatch):
    monkeypatch.setattr("core.run_log.display.find_spec", lambda name: None)
    assert any(text.startswith("step 29/29: loss") for text in _run(Terminal(), monkeypatch))


def test_an_unknown_number_of_steps_has_no_end(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with RunLog() as log:
        log.step(10, 1.0)
    assert stream.getvalue().startswith("step 10: loss 1, ")
