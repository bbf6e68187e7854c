"""Measures model parallelism: bytes on the wire, activation memory, and the time of long sequences.

    python benchmarks/parallel_layers.py [--only wire|memory|time] [--rounds 15] [--sequence S] [--width 512]

* ``wire``: forward and backward of a stack of layers cut by tensor, sequence or context parallelism; the bytes of a
  layer and step over the loopback interface compared with the printed formula. Limit: 2 % apart.
* ``memory``: what one rank's tensors hold between forward and backward of a GPT, for 1, 2 and 4 context-parallel
  ranks. Limit: within 10 % of the first over the number of ranks. The peak over both is shown next to it.
* ``time``: an optimizer step over one sequence on two context-parallel ranks compared with one rank, which takes turns
  with them while the other rests. Limit: 0.75 at 8192 tokens; 4096 are shown next to it.

Ranks are gloo processes with one thread each. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import Parser, record
from _measure import (
    PairedRatio,
    interleaved_seconds,
    machine,
    peak_allocation_above_start,
    run_on_ranks,
    section,
    wire_bytes_per_step,
)
from _report import MIB, exit_status

LAYERS, CHANNELS, HEADS_A_GROUP, VOCABULARY = 2, 64, 2, 4096
WIRE_SEQUENCE, MEMORY_SEQUENCE, TIME_SEQUENCES = 1024, 4096, (8192, 4096)
WIRE_LIMIT, MEMORY_LIMIT, TIME_LIMIT = 0.02, 0.10, 0.75


@dataclass(frozen=True)
class Cut:
    """A model cut over ranks."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    def __str__(self) -> str:
        return f"tp {self.tp}, cp {self.cp}{', sequence parallel' if self.sequence_parallel else ''}"

    def formula(self) -> str:
        if self.cp > 1:
            return "6 (cp - 1) x sequence x width of keys"  # gathered twice, their gradients reduced once; and values
        if self.sequence_parallel:
            return "10 (tp - 1) x sequence x width"  # 6 gathers, 2 of them repeated in backward; 4 reductions
        return "8 (tp - 1) x sequence x width"  # 4 all-reduces, each sends everything twice

    def expected_bytes(self, sequence: int, width: int) -> int:
        """Bytes that all ranks together send for a layer in a forward and a backward, in fp32."""
        if self.cp > 1:
            return 6 * (self.cp - 1) * sequence * (width // HEADS_A_GROUP) * 4
        return (10 if self.sequence_parallel else 8) * (self.tp - 1) * sequence * width * 4


CUTS = (
    Cut(tp=2),
    Cut(tp=2, sequence_parallel=True),
    Cut(cp=2),
    Cut(tp=4),
    Cut(tp=4, sequence_parallel=True),
    Cut(cp=4),
)


def transformer_config(cut: Cut, width: int) -> Any:
    from core.transformer import TransformerConfig

    heads = width // CHANNELS
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=width,
        num_attention_heads=heads,
        num_query_groups=heads // HEADS_A_GROUP,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=True,
        activation_func="silu",
        normalization="RMSNorm",
        ffn_hidden_size=3 * width,
        tensor_model_parallel_size=cut.tp,
        context_parallel_size=cut.cp,
        sequence_parallel=cut.sequence_parallel,
    )


def start_groups(cut: Cut) -> None:
    from core import parallel_state

    parallel_state.initialize_model_parallel(cut.tp, context_parallel_size=cut.cp)


def gpt(cut: Cut, width: int, sequence: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """Returns a GPT, and the mean loss of it, or of a wrapper around it, over this rank's part of one sequence."""
    from core.models.gpt import GPTModel
    from core.transformer import own_chunks

    torch.manual_seed(1)
    model = GPTModel(
        transformer_config(cut, width),
        vocab_size=VOCABULARY,
        max_sequence_length=sequence,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    text = torch.randint(0, VOCABULARY, (1, sequence + 1), generator=torch.Generator().manual_seed(2))
    tokens, labels = own_chunks(text[:, :-1]).contiguous(), own_chunks(text[:, 1:]).contiguous()

    def loss(wrapped: torch.nn.Module) -> torch.Tensor:
        mean: torch.Tensor = wrapped(tokens, labels=labels).mean()
        return mean

    return model, loss


def measure_wire(cut: Cut, width: int, sequence: int) -> float:
    from core.transformer import TransformerBlock

    start_groups(cut)
    layers = TransformerBlock(transformer_config(cut, width))
    held = sequence // cut.cp // (cut.tp if cut.sequence_parallel else 1)
    hidden = torch.randn(held, 1, width, requires_grad=True)

    def step() -> None:
        layers(hidden).sum().backward()

    step()
    return wire_bytes_per_step(step) / LAYERS


def measure_memory(cut: Cut, width: int, sequence: int) -> tuple[int, int]:
    """Bytes held between forward and backward, and the peak over both."""
    start_groups(cut)
    model, loss = gpt(cut, width, sequence)
    loss(model).backward()  # gradients exist from now on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = loss(model)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del kept
    return held, peak_allocation_above_start(lambda: loss(model).backward())


def measure_time(width: int, sequence: int, rounds: int) -> dict[str, list[float]]:
    from core import process_groups

    start_groups(Cut(cp=2))
    pair = training_step(Cut(cp=2), width, sequence)
    with mock.patch.object(process_groups, "_groups", None):  # a rank alone, in the process of one of two
        single = training_step(Cut(), width, sequence)

    def alone() -> None:
        if dist.get_rank() == 0:
            with mock.patch.object(process_groups, "_groups", None):
                single()

    return interleaved_seconds({"one rank": alone, "two ranks": pair}, rounds, warmup=1)


def training_step(cut: Cut, width: int, sequence: int) -> Callable[[], None]:
    """Returns an optimizer step over one sequence; of several ranks under `DistributedDataParallel`."""
    from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    module, loss = gpt(cut, width, sequence)
    model: Any = module
    if cut.ranks > 1:
        model = wrap_model(module, module.config, DistributedDataParallelConfig(overlap_grad_reduce=True))  # type: ignore[arg-type]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=0.0), [model])

    clear = model.zero_grad_buffer if cut.ranks > 1 else optimizer.zero_grad

    def step() -> None:
        loss(model).backward()
        if cut.ranks > 1:
            finalize_model_grads([model])
        optimizer.step()
        clear()

    return step


def report_wire(width: int, sequence: int) -> bool:
    within = True
    for cut in CUTS:
        found = run_on_ranks(measure_wire, cut.ranks, cut, width, sequence)[0]
        expected = cut.expected_bytes(sequence, width)
        off = found / expected - 1
        within &= abs(off) <= WIRE_LIMIT
        record(f"{cut} / formula", found / expected)
        print(
            f"  {cut!s:30} MiB {found / MIB:8.2f}   formula {expected / MIB:8.2f} = 4 bytes x {cut.formula()}   "
            f"{100 * off:+.1f} %{'' if abs(off) <= WIRE_LIMIT else '  EXCEEDED'}",
            flush=True,
        )
    return within


def report_memory(width: int, sequence: int) -> bool:
    within, whole = True, 0
    for cp in (1, 2, 4):
        cut = Cut(cp=cp)
        ranks = run_on_ranks(measure_memory, cp, cut, width, sequence)
        held, peak = max(rank[0] for rank in ranks), max(rank[1] for rank in ranks)
        whole = whole or held
        off = held * cp / whole - 1
        within &= off <= MEMORY_LIMIT
        record(f"cp {cp}: bytes held x cp / whole", held * cp / whole)
        print(
            f"  cp {cp}  MiB held {held / MIB:8.1f}   x cp / first {held * cp / whole:.3f}   peak {peak / MIB:8.1f}"
            f"{'' if off <= MEMORY_LIMIT else '  EXCEEDED'}",
            flush=True,
        )
    return within


def report_time(width: int, sequence: int, rounds: int, limit: float) -> bool:
    seconds = run_on_ranks(measure_time, 2, width, sequence, rounds)[0]
    for name, values in seconds.items():
        print(f"  {name:10} s   median {statistics.median(values):7.2f}   {min(values):.2f} to {max(values):.2f}")
    ratio = PairedRatio.of(seconds["two ranks"], seconds["one rank"])
    record("time", ratio)
    print(f"  ratio {ratio}{ratio.verdict(limit)}", flush=True)
    return ratio.holds(limit)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=("wire", "memory", "time"), help="measure one of the three")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of the timing; a limit needs 15")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence, in place of each measurement's own")
    parser.add_argument("--width", type=int, default=512, help="of the model; a multiple of 512")
    asked = parser.parse_args()
    width, sequence = asked.width, asked.sequence
    print(machine())
    within = True
    if asked.only in (None, "wire"):
        length = sequence or WIRE_SEQUENCE
        with section(f"bytes on the wire of a layer and step, all ranks: {length} tokens, width {width}"):
            within &= report_wire(width, length)
    if asked.only in (None, "memory"):
        length = sequence or MEMORY_SEQUENCE
        with section(f"activations of a rank between forward and backward: {length} tokens, width {width}"):
            within &= report_memory(width, length)
    if asked.only in (None, "time"):
        for length in (sequence,) if sequence else TIME_SEQUENCES:
            with section(f"an optimizer step over {length} tokens, cp 2 on two ranks, cp 1 on one"):
                within &= report_time(width, length, asked.rounds, TIME_LIMIT if length >= 8192 else float("inf"))
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
