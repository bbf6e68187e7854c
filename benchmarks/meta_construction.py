"""Compares the peak memory of construction from the meta device with this rank's shard and the largest unit.

    python benchmarks/meta_construction.py [--millions 1000] [--only gpt|torch|first-rank]

Two gloo ranks wrap a model of that many million parameters in `TorchFullyShardedDataParallel`:

* ``gpt``: this project's GPT, built on meta on both ranks;
* ``torch``: a stack of torch's own linear layers and norms, built on meta, filled by their `reset_parameters`;
* ``first-rank``: the latter, which the first rank holds whole and sends; the figure is the other rank's.

A peak is the rise of the process's high-water mark (`VmHWM`) over construction. Exits with 1 when one is above the
shard and two of the largest unit. Memory that this needs: about 2 x 4 bytes a parameter for the last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import Parser, record
from _measure import high_water_bytes, machine, reset_high_water, run_on_ranks, section

from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig

RANKS, VOCABULARY, SEQUENCE = 2, 32_768, 1024
MIB = 2**20


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def gpt(millions: int) -> tuple[nn.Module, tuple[type[nn.Module], ...] | None]:
    """Layers of 12 width^2 parameters, as many as come nearest; the width grows with the model."""
    width = 2048 if millions >= 500 else 768
    layers = max(1, round((millions * 1e6 - 2 * VOCABULARY * width) / (12 * width**2)))
    config = TransformerConfig(num_layers=layers, hidden_size=width, num_attention_heads=width // 64)
    return GPTModel(config, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope"), None


def torchs(millions: int) -> tuple[nn.Module, tuple[type[nn.Module], ...] | None]:
    width = 2048 if millions >= 500 else 768
    return nn.Sequential(*(Layer(width) for _ in range(round(millions * 1e6 / (8 * width**2))))), (Layer,)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wrap(module: nn.Module, classes: tuple[type[nn.Module], ...] | None) -> TorchFullyShardedDataParallel:
    config, settings = getattr(module, "config", None), TorchFullyShardedDataParallelConfig()
    return TorchFullyShardedDataParallel(config, settings, module, classes, process_group=dist.group.WORLD)


def construct(start: str, millions: int) -> tuple[int, int, int, int]:
    """Elements of the model; bytes of this rank's shard, of the largest unit, and of the rise at the peak."""
    with torch.device("meta"):
        small = torchs(10)  # code that is loaded at first use, and gloo's connections
    wrap(*small)
    build = gpt if start == "gpt" else torchs
    torch.manual_seed(1)
    holds_values = start == "first-rank" and dist.get_rank() == 0
    with torch.device("cpu" if holds_values else "meta"):
        module, classes = build(millions)
    elements = sum(parameter.numel() for parameter in module.parameters())
    dist.barrier()
    before = resident_bytes()
    reset_high_water()
    model = wrap(module, classes)
    peak = high_water_bytes() - before
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    unit = max(sum(p.numel() for m in unit.modules for p in m.parameters()) for unit in model.engine.units[:-1])
    return elements, sum(shard.nbytes for shard in shards), 4 * unit, peak


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--millions", type=int, default=1000, help="parameters of the model, in millions")
    parser.add_argument("--only", choices=("gpt", "torch", "first-rank"))
    options = parser.parse_args()
    print(machine())
    is_above = False
    for start in [options.only] if options.only else ["gpt", "torch", "first-rank"]:
        with section(start):
            ranks = run_on_ranks(construct, RANKS, start, options.millions)
            elements, shard, unit, peak = max(
                ranks[1:] if start == "first-rank" else ranks, key=lambda found: found[3]
            )
            limit = shard + 2 * unit
            record("peak / shard and two units", peak / limit)
            print(
                f"{elements / 1e6:.0f} M parameters; shard {shard / MIB:.0f} MiB + 2 x unit of {unit / MIB:.0f} MiB "
                f"= {limit / MIB:.0f} MiB; peak {peak / MIB:.0f} MiB"
                f"{'' if peak <= limit else '  ABOVE'}"
            )
            is_above |= peak > limit
    raise SystemExit(is_above)


if __name__ == "__main__":
    main()
