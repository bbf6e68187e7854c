"""Command lines of tiny runs."""

from __future__ import annotations

from core.planner import Simulation, simulate
from core.training.config.arguments import parse_arguments

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 250 "
    "--train-iters 2 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0"
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"


def simulated(
    flags: str, world_size: int = 2, *, pipeline_rank: int = 0, on_gpu: bool = False, memory: int = 80 * 2**30
) -> Simulation:
    config = parse_arguments(f"{TINY} {flags}".split())
    return simulate(config, world_size, pipeline_rank=pipeline_rank, on_gpu=on_gpu, memory=memory)
