"""A full stream of weights, compared with a flat gather, with its bytes over gloo, and with gathering everything.

    python benchmarks/weights_out.py [--rounds 15]

Two ranks, a model of 104 M parameters in bf16, under each wrapper, to the first rank. A flat gather is the least that
puts as many bytes whole into new memory: messages of half a bucket from rank 1, and a copy of the half that rank 0
has. The time of the bytes is that of these messages alone, into memory that is used again. All are in the same rounds.
Memory is the peak of live tensor bytes on rank 0 on top of what it holds before. Exits with 1 when a stream takes
more than 1.15 of the flat gather.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _measure import PairedRatio
from _report import exit_status

from core import parallel_state
from core.adapters.bridge.checkpoints import whole_state_dict
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from core.models.gpt import GPTModel
from core.transformer.transformer_config import TransformerConfig
from core.weights import WeightStream
from tests.unit._spawn import run_distributed
from tests.unit.weights._live_bytes import LiveBytes

CONFIGS = {
    "DDP": DistributedDataParallelConfig(),
    "ZeRO-3": FullyShardedDataParallelConfig(),
    "FSDP2": TorchFullyShardedDataParallelConfig(),
}
BUCKET = 64 * 2**20
TIME_LIMIT = 1.15


def _model(name: str) -> Any:
    modern: dict[str, Any] = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 2816}
    config = TransformerConfig(**sizes, **modern, bf16=True, params_dtype=torch.bfloat16)
    gpt = GPTModel(config, None, 1024, 64, share_embeddings_and_output_weights=True).bfloat16()
    return wrap_model(gpt, config, CONFIGS[name])


def _timed(run: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def _stream(stream: WeightStream) -> None:
    for _ in stream:
        pass


def _measured(name: str, rounds: int) -> dict[str, Any]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    model = _model(name)
    stream = WeightStream(model, "module", receivers=[0], bucket_bytes=BUCKET)
    total = sum(view.numel() * view.element_size() for view in stream.views.values())
    owned = 0 if name == "DDP" else total // 2
    message = torch.empty(BUCKET // 2, dtype=torch.uint8)
    num_messages = max(1, round(owned / len(message)))

    def send() -> None:
        for _ in range(num_messages):
            dist.recv(message, 1) if dist.get_rank() == 0 else dist.send(message, 0)

    def gather_flat() -> None:
        """The least that a gather into new memory does: of one flat tensor, half of which is here."""
        for _ in range(num_messages):
            if dist.get_rank() == 0:
                whole = torch.empty(2, len(message), dtype=torch.uint8)
                whole[0] = message
                dist.recv(whole[1], 1)
            else:
                dist.send(message, 0)

    def gather_all() -> None:
        whole_state_dict(model, keep=dist.get_rank() == 0)

    candidates = {"stream": lambda: _stream(stream), "bytes": send, "flat": gather_flat, "gather all": gather_all}
    seconds: dict[str, list[float]] = {key: [] for key in candidates}
    for number in range(rounds + 2):
        for key in list(candidates)[:: 1 if number % 2 else -1]:
            took = _timed(candidates[key])
            if number >= 2:
                seconds[key].append(took)
    peaks = {}
    for key in ("stream", "gather all"):
        with LiveBytes() as live:
            candidates[key]()
        peaks[key] = live.peak
    return {"seconds": seconds, "peaks": peaks, "total": total, "sent": owned}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds, within = parser.parse_args().rounds, True
    for name in CONFIGS:
        result = run_distributed(_measured, 2, name, rounds)[0]
        seconds, peaks = result["seconds"], result["peaks"]
        print(f"{name}: {result['total'] / 2**20:.0f} MiB of weights, {result['sent'] / 2**20:.0f} MiB sent")
        if result["sent"]:
            ratio = PairedRatio.of(seconds["stream"], seconds["flat"])
            within &= ratio.holds(TIME_LIMIT)
            print(f"  time / a flat gather          {ratio}{ratio.verdict(TIME_LIMIT)}")
            print(f"  time / time of its bytes      {PairedRatio.of(seconds['stream'], seconds['bytes'])}")
        print(f"  time / gathering everything   {PairedRatio.of(seconds['stream'], seconds['gather all'])}")
        print(f"  seconds                       {statistics.median(seconds['stream']):.3f}")
        print(
            f"  peak, MiB                     {peaks['stream'] / 2**20:.1f} (all: {peaks['gather all'] / 2**20:.1f})"
        )
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
