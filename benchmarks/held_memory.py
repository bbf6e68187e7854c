"""Counts each rank's memory under every wrapper when a step's gradients are complete, as a table and a picture.

    python benchmarks/held_memory.py [--ranks 4] [--picture docs/what-a-rank-holds.svg]

The GPT of the other benchmarks trains for two steps of two micro-batches with AdamW on gloo ranks. Then, between
`finalize_model_grads` and the optimizer's step, rank 0 counts the bytes of its parameters, gradients and optimizer
state. They are exact, and depend on no machine. Memory in which units take turns to be gathered and reduced is left
out: ZeRO-3 on our buffers keeps it over steps, torch's FSDP2 takes and frees it in each, and neither is state.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import backward, build_model, micro_batches
from _history import Parser, record
from _measure import run_on_ranks

from core.diagnostics.out_of_memory import memory_by_category
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer

SETTINGS = {
    "DDP": DistributedDataParallelConfig(),
    "ZeRO-1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    "ZeRO-2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", bucket_size=2_000_000),
    "ZeRO-3": FullyShardedDataParallelConfig(),
    "FSDP2": TorchFullyShardedDataParallelConfig(),
}
KINDS = ("parameters", "gradients", "optimizer state")
MIB = 2**20


def held(name: str) -> dict[str, int]:
    """Bytes of each kind on this rank."""
    model = wrap_model(build_model(), object(), SETTINGS[name], process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
    for _ in range(2):
        model.zero_grad_buffer()
        batches = micro_batches(samples=1, sequence=64)[:2]
        for index, tokens in enumerate(batches):
            with model.no_sync() if index < len(batches) - 1 else nullcontext():
                backward(model, tokens)
        finalize_model_grads([model])
        found = memory_by_category(model, "cpu")
        if SETTINGS[name].shards_parameters:
            found["gradients"] = sum(model.engine.gradients.of(param).nbytes for param in model.parameters())
        optimizer.step()
    return {kind: sum(size for name, size in found.items() if name.startswith(kind)) for kind in KINDS}


def draw(table: dict[str, dict[str, int]], ranks: int, picture: Path) -> None:
    """A bar for each wrapper, as SVG."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "held"  # the same numbers give the same file
    figure, axes = pyplot.subplots(figsize=(7, 2.8))
    left = [0.0] * len(table)
    for kind, colour in zip(KINDS, ("#4c72b0", "#dd8452", "#8c8c8c"), strict=True):
        widths = [sizes[kind] / MIB for sizes in table.values()]
        axes.barh(list(table), widths, left=left, label=kind, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"MiB on each of {ranks} ranks, gradients complete")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    table = {name: run_on_ranks(held, options.ranks, name)[0] for name in SETTINGS}
    replicas = sum(table["DDP"].values())
    for name, sizes in table.items():
        if name != "DDP":
            record(f"{options.ranks} ranks, {name} / DDP", sum(sizes.values()) / replicas)
        parts = ", ".join(f"{kind} {size / MIB:.0f}" for kind, size in sizes.items())
        print(f"{name:>7}: {sum(sizes.values()) / MIB:.0f} MiB ({parts})")
    if options.picture is not None:
        draw(table, options.ranks, options.picture)


if __name__ == "__main__":
    main()
