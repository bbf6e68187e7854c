"""Measures the cost of `core.run_log.RunLog`: steps of a stranger's loop with it and without, interleaved.

.venv/bin/python benchmarks/run_log.py
"""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr

from _history import Parser, record

from _measure import PairedRatio, interleaved_seconds, machine, run_on_ranks, section  # isort: skip

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

LIMIT = 1.01
STEPS = 10
"""Steps of a round, of which one is logged."""


def measure(rounds: int, layer_norms: bool) -> dict[str, list[float]]:
    """Seconds of ten steps under torch's DDP, with the log and without."""
    from core.run_log import RunLog

    torch.manual_seed(1)
    width = 256
    layers = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    model = TorchDDP(nn.Sequential(*(module for layer in layers for module in layer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, width)
    number = 0

    def steps(log: RunLog | None = None) -> None:
        nonlocal number
        for _ in range(STEPS):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if log is not None:
                number += 1
                log.step(number, loss)

    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # its lines
        settings = {"model": model, "optimizer": optimizer, "tokens_per_step": 256, "layer_norms": layer_norms}
        log = RunLog(folder, every=STEPS, **settings)  # type: ignore[arg-type]
        seconds = interleaved_seconds({"with": lambda: steps(log), "without": steps}, rounds)
        log.close()
    return seconds


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    print(machine())
    for ranks, layer_norms in ((1, False), (2, False), (2, True)):
        with section(f"A log of every tenth step, {ranks} ranks{', with the norms of layers' if layer_norms else ''}"):
            seconds = run_on_ranks(measure, ranks, options.rounds, layer_norms)[0]
            ratio = PairedRatio.of(seconds["with"], seconds["without"])
            record("time", ratio)
            print(f"{ratio}{'' if layer_norms else ratio.verdict(LIMIT)}")


if __name__ == "__main__":
    main()
