"""Measures experts over ranks: time of a step, bytes of dispatch, the grouped product, and memory of a rank.

    python benchmarks/experts.py [--only time|wire|product|memory] [--rounds 15]

* ``time``: a step with experts over 2 and 4 ranks compared with the same step where each rank has all experts, and
  with the sum of its parts: computing, exchanging as many tokens, reducing as many gradients.
* ``wire``: bytes over the loopback interface of the dispatch of a forward compared with the printed formula. Limit:
  5 % apart.
* ``product``: `grouped_mm` compared with one product after the other, forward and backward, in one process.
* ``memory``: bytes of a rank's parameters and gradients compared with those of the plan, under every wrapper. Limit:
  equal, but for gradients under ZeRO-3, which keeps memory for a unit's whole gradients from step to step.

Ranks are gloo processes with one thread each. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import record
from _measure import PairedRatio, interleaved_seconds, machine, run_on_ranks, section, wire_bytes_per_step
from _report import MIB, arguments, exit_status

LAYERS, WIDTH, EXPERTS, TOPK, INNER = 4, 192, 8, 2, 256
SAMPLES, LENGTH = 4, 128
RANKS, WIRE_LIMIT = (2, 4), 0.05
FP32, INT64 = 4, 8  # bytes
DISPATCHERS = ("allgather", "alltoall")


def enter_groups(ep: int) -> Callable[[], None]:
    """Makes the groups of `ep` ranks that share experts, and returns what makes them current again."""
    from core import parallel_state, process_groups

    process_groups.set_groups(None)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    groups = process_groups.groups_or_none()
    return lambda: process_groups.set_groups(groups)


def build(ep: int, dispatcher: str = "alltoall") -> torch.nn.Module:
    from core.models.gpt import GPTModel
    from core.transformer import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=6,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=INNER,
        moe_aux_loss_coeff=0.01,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type=dispatcher,  # type: ignore[arg-type]
        expert_model_parallel_size=ep,
    )
    return GPTModel(config, vocab_size=2048, max_sequence_length=LENGTH, position_embedding_type="rope")


def tokens_of_rank() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 2048, (SAMPLES, LENGTH), generator=generator)


def step_of(ep: int, dispatcher: str = "alltoall") -> tuple[Callable[[], None], Callable[[], None], Any]:
    """Returns a step without an update under the replicated wrapper, the same without communication of gradients, and
    the wrapper."""
    from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model

    enter, tokens = enter_groups(ep), tokens_of_rank()
    module: Any = build(ep, dispatcher)
    model = wrap_model(module, module.config, DistributedDataParallelConfig())

    def step() -> None:
        enter()
        model.zero_grad_buffer()
        model(tokens, labels=tokens).mean().backward()
        finalize_model_grads([model])

    def compute() -> None:
        enter()
        with model.no_sync():
            model(tokens, labels=tokens).mean().backward()
        model.zero_grad_buffer()

    return step, compute, model


def parts_of(model: Any, ep: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns the exchange of a step's tokens at balance, and the reduction of its gradients, by torch's own calls."""
    rows = torch.zeros(SAMPLES * LENGTH * TOPK, WIDTH)
    arriving = torch.empty_like(rows)
    size = dist.get_world_size()
    pieces = [(group, unit.gradient_bytes // FP32) for unit in model.plan.units for group in [unit.kind == "expert"]]
    dense = torch.zeros(sum(n for is_expert, n in pieces if not is_expert))
    experts = torch.zeros(sum(n for is_expert, n in pieces if is_expert))

    def exchange() -> None:
        for _ in range(4 * LAYERS):  # there and back, in forward and in backward
            dist.all_to_all_single(arriving, rows)

    def reduce() -> None:
        dist.all_reduce(dense)
        if size > ep:
            dist.all_reduce(experts)

    return exchange, reduce


def measure_time(rounds: int) -> dict[str, list[float]]:
    ranks = dist.get_world_size()
    whole, compute, _ = step_of(1)
    over, _, model = step_of(ranks)
    gathered, _, _ = step_of(ranks, "allgather")
    exchange, reduce = parts_of(model, ranks)
    candidates = {"all experts": whole, "alltoall": over, "allgather": gathered}
    return interleaved_seconds({**candidates, "compute": compute, "exchange": exchange, "reduce": reduce}, rounds)


def report_time(rounds: int) -> None:
    for ranks in RANKS:
        seconds = run_on_ranks(measure_time, ranks, rounds)[0]
        parts = [seconds[name] for name in ("compute", "exchange", "reduce")]
        seconds["sum of parts"] = [sum(values) for values in zip(*parts, strict=True)]
        shown = ", ".join(f"{name} {1e3 * statistics.median(values):.0f}" for name, values in seconds.items())
        print(f"  {ranks} ranks, ms: {shown}")
        for name in ("alltoall", "allgather"):
            for baseline in ("all experts", "sum of parts"):
                ratio = PairedRatio.of(seconds[name], seconds[baseline])
                row = f"{ranks} ranks: {name} compared with {baseline}"
                record(row, ratio)
                print(f"  {row} {ratio}", flush=True)


def measure_wire(dispatcher: str) -> tuple[float, float]:
    """Returns the bytes that a layer's dispatch sends over all ranks in a forward, found and by the formula."""
    from core import parallel_state
    from core.transformer.moe.dispatch import dispatch

    ranks = dist.get_world_size()
    enter_groups(ranks)
    config: Any = build(ranks, dispatcher).config  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(dist.get_rank())
    number = SAMPLES * LENGTH
    tokens = torch.randn(number, WIDTH, generator=generator)
    scores = torch.rand(number, EXPERTS, generator=generator)
    probs, experts = scores.topk(TOPK)
    with torch.no_grad():
        found = wire_bytes_per_step(lambda: dispatch(tokens, probs, experts, lambda rows, _: rows, config))  # type: ignore[func-returns-value, arg-type, return-value]
    elsewhere = (experts // (EXPERTS // ranks) != parallel_state.get_expert_model_parallel_rank()).sum().double()
    dist.all_reduce(elsewhere)
    if dispatcher == "alltoall":  # rows there and back, and how many for each expert
        expected = 2 * elsewhere.item() * WIDTH * FP32 + ranks * INT64 * EXPERTS * (ranks - 1) / ranks
    else:  # tokens, partial sums back, probabilities and indices
        expected = ranks * (ranks - 1) * number * (2 * WIDTH * FP32 + TOPK * (FP32 + INT64))
    return found, expected


def report_wire() -> bool:
    formulas = {
        "allgather": "ranks (ranks - 1) tokens x (2 width x 4 + k x 12)",
        "alltoall": "2 rows of other ranks x width x 4",
    }
    within = True
    for ranks in RANKS:
        for dispatcher in DISPATCHERS:
            found, expected = run_on_ranks(measure_wire, ranks, dispatcher)[0]
            off = found / expected - 1
            within &= abs(off) <= WIRE_LIMIT
            record(f"{ranks} ranks {dispatcher} / formula", found / expected)
            print(
                f"  {ranks} ranks {dispatcher:9} MiB {found / MIB:6.3f}   formula {expected / MIB:6.3f} = "
                f"{formulas[dispatcher]}   {100 * off:+.1f} %{'' if abs(off) <= WIRE_LIMIT else '  EXCEEDED'}",
                flush=True,
            )
    return within


def measure_product(experts: int, rows: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    from core.transformer.moe.dispatch import sort_by_expert
    from core.transformer.moe.experts import grouped_matmul, looped_matmul

    torch.manual_seed(0)
    permutation = sort_by_expert(torch.randint(0, experts, (rows, 1)), experts)
    weight = torch.randn(experts, 2 * INNER, WIDTH, dtype=dtype, requires_grad=True)
    inputs = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    gradient = torch.randn(rows, 2 * INNER, dtype=dtype)

    def run(multiply: Any) -> Callable[[], None]:
        return lambda: multiply(inputs, weight, permutation).backward(gradient)

    return interleaved_seconds({"loop": run(looped_matmul), "grouped": run(grouped_matmul)}, rounds)


def report_product(rounds: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for experts in (8, 64):
            seconds = run_on_ranks(measure_product, 1, experts, 1024, dtype, rounds)[0]
            ratio = PairedRatio.of(seconds["grouped"], seconds["loop"])
            record(f"{experts} experts, {dtype}", ratio)
            shown = ", ".join(f"{name} {1e3 * statistics.median(values):.1f}" for name, values in seconds.items())
            print(f"  {experts:2} experts, 1024 rows, {dtype}: {ratio}   ms {shown}", flush=True)


def measure_memory(wrapper: str, ep: int) -> dict[str, tuple[int, int]]:
    """Returns the bytes of parameters and of gradients on this rank, found and planned."""
    from core.diagnostics.out_of_memory import memory_by_category
    from core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
        wrap_model,
    )

    enter_groups(ep)
    config: Any = TorchFullyShardedDataParallelConfig()
    if wrapper != "fsdp2":
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy=wrapper)  # type: ignore[arg-type]
    module: Any = build(ep)
    model = wrap_model(module, module.config, config)
    model.zero_grad_buffer()
    tokens = tokens_of_rank()
    model(tokens, labels=tokens).mean().backward()
    finalize_model_grads([model])
    table = memory_by_category(model, "cpu")
    parameters = table["parameters"] - sum(b.numel() * b.element_size() for b in module.buffers())
    gradients, planned = table["gradients"], model.plan.units
    return {
        "parameters": (parameters, sum(unit.kept_bytes for unit in planned)),
        "gradients": (gradients, sum(unit.gradient_bytes for unit in planned)),
    }


def report_memory() -> bool:
    within = True
    for ranks in RANKS:
        for wrapper in ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2"):
            for ep in (1, ranks):
                of_ranks = run_on_ranks(measure_memory, ranks, wrapper, ep)
                exact = {"parameters"} if wrapper == "optim_grads_params" else {"parameters", "gradients"}
                equal = all(found == planned for r in of_ranks for n, (found, planned) in r.items() if n in exact)
                within &= equal
                found, planned = (sum(pair[i] for r in of_ranks for pair in r.values()) for i in (0, 1))
                record(f"{ranks} ranks, {wrapper}, ep {ep} / plan", found / planned)
                shown = ", ".join(f"{n} {a / MIB:.2f} (plan {b / MIB:.2f})" for n, (a, b) in of_ranks[0].items())
                print(f"  {ranks} ranks, {wrapper:18} ep {ep}: MiB {shown}{'' if equal else '  EXCEEDED'}", flush=True)
    return within


def main() -> int:
    parser = arguments(__doc__, ("time", "wire", "product", "memory"))
    chosen = parser.parse_args()
    print(machine())
    within = True
    if chosen.only in (None, "time"):
        with section("A step with experts over all ranks"):
            report_time(chosen.rounds)
    if chosen.only in (None, "wire"):
        with section("Bytes of the dispatch of a layer's forward over all ranks"):
            within &= report_wire()
    if chosen.only in (None, "product"):
        with section("Grouped product compared with a loop"):
            report_product(chosen.rounds)
    if chosen.only in (None, "memory"):
        with section("Memory of a rank, compared with the plan"):
            within &= report_memory()
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
