"""A full stream of weights and a round to a receiver, compared with their bytes over gloo.

    python benchmarks/weights_out.py [--rounds 15]

Two ranks, a model of 104 M parameters in bf16, under each wrapper. A stream is to the first rank, a round from there
on to a receiver in a third process. The time of the bytes is that of messages of half a bucket into memory that is
used again. By hand are the messages of the stream, in a loop of a few lines into memory that is used again, while rank
0 copies its own part of each tensor that is cut next to what it receives. All are in the same rounds. Memory is the
peak of what torch's allocator has handed out on rank 0 in a first pass. Exits with 1 when a stream takes more than
1.15 of its bytes, or of the messages and copies by hand.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _history import Parser, record
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
from core.weights import WeightReceiver, WeightSender, WeightStream
from tests.unit._spawn import run_distributed
from tests.unit.weights._live_bytes import LiveBytes

CONFIGS = {
    "DDP": DistributedDataParallelConfig(),
    "ZeRO-3": FullyShardedDataParallelConfig(),
    "FSDP2": TorchFullyShardedDataParallelConfig(),
}
BUCKET = 64 * 2**20
TIME_LIMIT = 1.15
MEMORY = torch.zeros(4 * BUCKET, dtype=torch.uint8)


def _model(name: str, group: Any = None) -> Any:
    modern: dict[str, Any] = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 2816}
    config = TransformerConfig(**sizes, **modern, bf16=True, params_dtype=torch.bfloat16)
    gpt = GPTModel(config, None, 1024, 64, share_embeddings_and_output_weights=True).bfloat16()
    return wrap_model(gpt, config, CONFIGS[name], process_group=group)


def _timed(run: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def _stream(stream: WeightStream) -> None:
    for _ in stream:
        pass


def _send(num_bytes: int, source: int, target: int) -> None:
    """Sends messages of half a bucket out of memory that is as large as all of them, into memory for two."""
    size = BUCKET // 2
    for number in range(max(1, round(num_bytes / size))):
        if dist.get_rank() == source:
            dist.send(MEMORY[number % (len(MEMORY) // size) * size :][:size], target)
        elif dist.get_rank() == target:
            dist.recv(MEMORY[number % 2 * size :][:size], source)


_Messages = tuple[list[dist.P2POp], list[tuple[torch.Tensor, torch.Tensor]]]
"""Of one bucket: what rank 1 sends or rank 0 receives, and rank 0's targets and values of copies."""


def _messages(stream: WeightStream, names: set[str]) -> _Messages:
    group, calls, copies = dist.group.WORLD, list[dist.P2POp](), list[tuple[torch.Tensor, torch.Tensor]]()
    for name in names if dist.get_rank() == 1 else ():
        calls += [dist.P2POp(dist.isend, piece, group=group, group_peer=0) for piece in stream.held[name].values()]
    for name in names if dist.get_rank() == 0 else ():
        view, owners = stream.views[name], stream.owners[name]
        memory = {box: torch.empty(box[1], dtype=view.dtype) for box, ranks in owners.items() if ranks == [1]}
        calls += [dist.P2POp(dist.irecv, piece, group=group, group_peer=1) for piece in memory.values()]
        if memory:
            copies += [(torch.empty_like(piece), piece) for piece in stream.held[name].values()]
    return calls, copies


def _exchange(buckets: list[_Messages]) -> None:
    for calls, copies in buckets:
        works = dist.batch_isend_irecv(calls) if calls else ()
        for target, values in copies:
            target.copy_(values)
        for work in works:
            work.wait()


def _measured(name: str, rounds: int) -> dict[str, Any]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    model = _model(name)
    stream = WeightStream(model, "module", receivers=[0], bucket_bytes=BUCKET)
    total = sum(view.numel() * view.element_size() for view in stream.views.values())
    cut = [name for name, boxes in stream.owners.items() if all(len(ranks) < 2 for ranks in boxes.values())]
    pieces = [piece for name in cut for piece in stream.held[name].values()]
    sent = sum(stream.views[name].numel() * stream.views[name].element_size() for name in cut)
    sent -= sum(piece.numel() * piece.element_size() for piece in pieces)
    by_hand = [
        _messages(stream, {meta.name for meta in metas}.intersection(cut)) for metas in stream.bucket_metadata()
    ]

    def gather_all() -> None:
        whole_state_dict(model, keep=dist.get_rank() == 0)

    candidates = {
        "stream": lambda: _stream(stream),
        "bytes": lambda: _send(sent, 1, 0),
        "by hand": lambda: _exchange(by_hand),
        "gather all": gather_all,
    }
    seconds = _seconds(candidates, rounds)
    stream, peaks = WeightStream(model, "module", receivers=[0], bucket_bytes=BUCKET), {}
    for key in ("stream", "gather all"):
        with LiveBytes() as live:
            candidates[key]()
        peaks[key] = live.peak
    return {"seconds": seconds, "peaks": peaks, "total": total, "sent": 0 if name == "DDP" else sent}


def _seconds(candidates: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {key: [] for key in candidates}
    for number in range(rounds + 2):
        for key in list(candidates)[:: 1 if number % 2 else -1]:
            took = _timed(candidates[key])
            if number >= 2:
                seconds[key].append(took)
    return seconds


def _round(name: str, rounds: int, sent: int, total: int, store: Path) -> dict[str, list[float]]:
    """Returns the seconds of rounds of two trainers to one receiver, and of their bytes over gloo."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    trainers, address = dist.new_group([0, 1]), dist.FileStore(str(store), -1)
    if dist.get_rank() == 2:
        receiver = WeightReceiver(address, 0, 1)
        run: Any = receiver.receive
    else:
        stream = WeightStream(
            _model(name, trainers), "module", receivers=[0], bucket_bytes=BUCKET, process_group=trainers
        )
        sender = WeightSender(stream, address, 1)

        def run() -> None:
            sender.send(0)

    def send() -> None:
        if sent:
            _send(sent, 1, 0)
        _send(total, 0, 2)

    return _seconds({"round": run, "bytes": send}, rounds)


def main() -> int:
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds, within = parser.parse_args().rounds, True
    for name in CONFIGS:
        result = run_distributed(_measured, 2, name, rounds)[0]
        seconds, peaks = result["seconds"], result["peaks"]
        print(f"{name}: {result['total'] / 2**20:.0f} MiB of weights, {result['sent'] / 2**20:.0f} MiB sent")
        if result["sent"]:
            ratio = PairedRatio.of(seconds["stream"], seconds["by hand"])
            within &= ratio.holds(TIME_LIMIT)
            record(f"{name}: time / by hand", ratio)
            print(f"  time / by hand                {ratio}{ratio.verdict(TIME_LIMIT)}")
            alone = PairedRatio.of(seconds["stream"], seconds["bytes"])
            within &= alone.holds(TIME_LIMIT)
            record(f"{name}: time / bytes alone", alone)
            print(f"  time / bytes alone            {alone}{alone.verdict(TIME_LIMIT)}")
        ratio = PairedRatio.of(seconds["stream"], seconds["gather all"])
        record(f"{name}: time / gathering everything", ratio)
        print(f"  time / gathering everything   {ratio}")
        shown = ", ".join(f"{key} {statistics.median(times):.3f}" for key, times in seconds.items())
        print(f"  seconds                       {shown}")
        print(
            f"  peak, MiB                     {peaks['stream'] / 2**20:.1f} (all: {peaks['gather all'] / 2**20:.1f})"
        )
        with tempfile.TemporaryDirectory() as folder:
            sizes = result["sent"], result["total"]
            of_round = run_distributed(_round, 3, name, rounds, *sizes, Path(folder) / "store")[0]
        ratio = PairedRatio.of(of_round["round"], of_round["bytes"])
        record(f"{name}: a round / its bytes", ratio)
        print(f"  a round / its bytes           {ratio}")
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
