"""Measures pipeline stages: bubbles of schedules, bytes between stages, memory of a stage, and reductions of a step.

    python benchmarks/pipelines.py [--only bubble|wire|memory|reductions] [--rounds 5]

* ``bubble``: time that stages wait in a step, as a share of the time that they compute, compared with the formula. A
  layer sleeps instead of computing, so that ranks may outnumber cores.
* ``wire``: bytes over the loopback interface of a step compared with the printed formula. Limit: 5 % apart.
* ``memory``: bytes of a stage's parameters and gradients compared with those of the plan, under every wrapper. Limit:
  equal, but for gradients under ZeRO-3, which keeps memory for a unit's whole gradients from step to step.
* ``reductions``: collectives of a stage's replicas in a step of 2 and of 8 micro-batches. Limit: equally many
  reductions of gradients.

Ranks are gloo processes with one thread each. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import record
from _measure import machine, run_on_ranks, section, wire_bytes_per_step
from _report import MIB, arguments, exit_status

LAYERS, WIDTH, LENGTH, BATCH, VOCABULARY = 4, 128, 64, 2, 512
FP32 = 4  # bytes
WIRE_LIMIT = 0.05
FORWARD_S, INPUT_S, WEIGHT_S = 0.02, 0.02, 0.02
"""Of all of a rank's layers in one micro-batch: forward, and the gradients of the input and of weights."""
SCHEDULES = (("GPipe", None), ("1F1B", None), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2))
WRAPPERS = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        time.sleep(FORWARD_S * share)
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        from core.tensor_parallel.weight_gradients import weight_gradient

        def compute(memory: torch.Tensor | None) -> torch.Tensor:
            time.sleep(WEIGHT_S * ctx.share)
            return gradient.new_zeros(1)

        time.sleep(INPUT_S * ctx.share)
        return gradient, weight_gradient(ctx, None, compute), None


class Sleeping(torch.nn.Module):
    """A pipeline stage that sleeps."""

    def __init__(self, config: Any, share: float) -> None:
        super().__init__()
        self.config, self.share, self.hidden = config, share, torch.zeros(1, 1, 4)
        self.weight = torch.nn.Parameter(torch.ones(1))

    def set_input_tensor(self, hidden: list[torch.Tensor]) -> None:
        (self.hidden,) = hidden

    def forward(self) -> torch.Tensor:
        return _Sleep.apply(self.hidden, self.weight, self.share)  # type: ignore[no-any-return]


def config_of(schedule: str | None, virtual: int | None, pp: int, **fields: Any) -> Any:
    from core.transformer import TransformerConfig

    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4}
    return TransformerConfig(
        **(sizes | fields),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_parallel_schedule=schedule,
    )


def measure_bubble(schedule: str, virtual: int | None, micro_batches: int, rounds: int) -> float:
    """Returns how much longer a step takes than the computation of a rank, as a share of that."""
    from core import parallel_state
    from core.pipeline_parallel.stages import run_stages

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(1, ranks, virtual)
    config = config_of(schedule, virtual, ranks, num_layers=4 * ranks, hidden_size=4)
    chunks = [Sleeping(config, 1 / (virtual or 1)) for _ in range(virtual or 1)]
    last = {None: ranks - 1, 2: 0 if schedule == "ZBVZeroBubble" else ranks - 1}[virtual]
    is_last = dist.get_rank() == last

    def run(chunk: Any, index: int) -> torch.Tensor:
        output: torch.Tensor = chunk()
        return output.sum() if is_last and index == len(chunks) - 1 else output

    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        run_stages(chunks, run, micro_batches, shape=(1, 1))
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]) / (micro_batches * (FORWARD_S + INPUT_S + WEIGHT_S)) - 1


def report_bubble(rounds: int) -> None:
    for ranks in (2, 4):
        for micro_batches in (ranks, 4 * ranks):
            for schedule, virtual in SCHEDULES:
                found = run_on_ranks(measure_bubble, ranks, schedule, virtual, micro_batches, rounds)[0]
                # A zero bubble is left where ranks wait for the first forwards of one stage each: here a third of half
                # the time of a rank's micro-batch. It takes 2P - 1 micro-batches.
                stages = 6 if schedule == "ZBVZeroBubble" else virtual or 1
                formula = (ranks - 1) / (micro_batches * stages)
                record(f"{ranks} ranks, {micro_batches} micro-batches, {schedule} / formula", found / formula)
                is_known = schedule != "ZBVZeroBubble" or micro_batches >= 2 * ranks - 1
                shown = f"   formula {100 * formula:5.1f} %" if is_known else "   (too few micro-batches)"
                print(
                    f"  {ranks} ranks, {micro_batches:2} micro-batches, {schedule:16} {100 * found:5.1f} %{shown}",
                    flush=True,
                )


def step_of(
    wrapper: str, virtual: int | None, micro_batches: int, pp: int = 2
) -> tuple[Callable[[], None], list[Any]]:
    """Returns a step, and the wrappers of this rank's stages."""
    from core import parallel_state
    from core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
        wrap_model,
    )
    from core.models.gpt import GPTModel
    from core.optimizer import OptimizerConfig, get_megatron_optimizer
    from core.pipeline_parallel import get_forward_backward_func
    from core.transformer.pipeline_stages import pipeline_stage

    parallel_state.initialize_model_parallel(1, pp, virtual)
    config = config_of(None, virtual, pp)
    config.finalize_model_grads_func = finalize_model_grads
    ddp_config: Any = TorchFullyShardedDataParallelConfig()
    if wrapper != "fsdp2":
        ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=wrapper)  # type: ignore[arg-type]
    torch.manual_seed(1)
    chunks = []
    for turn in [None] if virtual is None else range(virtual):
        stage = pipeline_stage(config, turn)
        model = GPTModel(
            config,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            pre_process=stage.is_first,
            post_process=stage.is_last,
            vp_stage=turn,
        )
        chunks.append(wrap_model(model, config, ddp_config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1e-3, clip_grad=0.0), chunks)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def forward_step(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return model(tokens, labels=tokens), lambda losses: (losses.mean(), None)

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(()) for _ in chunks],
            model=chunks,
            num_microbatches=micro_batches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        optimizer.step()

    return step, chunks


def measure_wire(virtual: int | None, micro_batches: int) -> float:
    step, _ = step_of("no_shard", virtual, micro_batches, dist.get_world_size())
    step()
    return wire_bytes_per_step(step)


def report_wire() -> bool:
    within = True
    for ranks in (2, 4):
        for virtual in (None, 2) if ranks == 2 else (None,):
            micro_batches = 8
            found = run_on_ranks(measure_wire, ranks, virtual, micro_batches)[0]
            boundaries = ranks * (virtual or 1) - 1
            expected = 2 * boundaries * micro_batches * LENGTH * BATCH * WIDTH * FP32
            off = found / expected - 1
            within &= abs(off) <= WIRE_LIMIT
            record(f"{ranks} ranks, {virtual or 1} stages each / formula", found / expected)
            print(
                f"  {ranks} ranks, {virtual or 1} stages each: MiB {found / MIB:.3f}   formula {expected / MIB:.3f} = "
                "2 x boundaries x micro-batches x s x b x h x 4   "
                f"{100 * off:+.1f} %{'' if abs(off) <= WIRE_LIMIT else '  EXCEEDED'}",
                flush=True,
            )
    return within


def measure_memory(wrapper: str) -> dict[str, tuple[int, int]]:
    """Returns the bytes of parameters and of gradients of this rank's stage, found and planned."""
    from core.diagnostics.out_of_memory import memory_by_category

    step, (chunk,) = step_of(wrapper, None, 4)
    step()
    table = memory_by_category(chunk, "cpu")
    units = chunk.plan.units
    return {
        "parameters": (table["parameters"], sum(unit.kept_bytes for unit in units)),
        "gradients": (table["gradients"], sum(unit.gradient_bytes for unit in units)),
    }


def report_memory() -> bool:
    within = True
    for wrapper in WRAPPERS:
        of_ranks = run_on_ranks(measure_memory, 4, wrapper)
        exact = {"parameters"} if wrapper == "optim_grads_params" else {"parameters", "gradients"}
        equal = all(found == planned for r in of_ranks for n, (found, planned) in r.items() if n in exact)
        within &= equal
        found, planned = (sum(pair[i] for r in of_ranks for pair in r.values()) for i in (0, 1))
        record(f"{wrapper} / plan", found / planned)
        for rank, name in ((0, "first stage"), (3, "last stage")):
            shown = ", ".join(f"{n} {a / MIB:.3f} (plan {b / MIB:.3f})" for n, (a, b) in of_ranks[rank].items())
            print(f"  {wrapper:18} {name}: MiB {shown}{'' if equal else '  EXCEEDED'}", flush=True)
    return within


@contextmanager
def collectives_counted() -> Iterator[Counter[str]]:
    """Counts what this rank's groups of replicas are called for, by kind."""
    from core import parallel_state
    from core.comm import record

    counts: Counter[str] = Counter()
    replicas = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    collective = record.CollectiveRecord.collective

    def counted(self: Any, kind: str, what: str, *args: Any, **kwargs: Any) -> Any:
        if list(self.ranks) == replicas and what != "the gradient norm":
            counts[kind] += 1
        return collective(self, kind, what, *args, **kwargs)

    record.CollectiveRecord.collective = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        record.CollectiveRecord.collective = collective  # type: ignore[method-assign]


def measure_reductions(wrapper: str, virtual: int | None, micro_batches: int) -> tuple[Counter[str], int]:
    """Returns the collectives of a step of this rank, and its units with parameters."""
    step, chunks = step_of(wrapper, virtual, micro_batches)
    step()
    with collectives_counted() as counts:
        step()
    return counts, sum(any(piece.is_trained for piece in unit.pieces) for chunk in chunks for unit in chunk.plan.units)


def report_reductions() -> bool:
    within = True
    for wrapper in WRAPPERS:
        for virtual in (None, 2):
            few, many = (run_on_ranks(measure_reductions, 4, wrapper, virtual, number)[0] for number in (2, 8))
            reductions = [sum(n for kind, n in counts.items() if "reduce" in kind) for counts in (few[0], many[0])]
            within &= reductions[0] == reductions[1]
            record(
                f"{wrapper}, {virtual or 1} stages a rank: of 8 micro-batches / of 2", reductions[1] / reductions[0]
            )
            gathers = [counts["all-gather"] for counts in (few[0], many[0])]
            print(
                f"  {wrapper:18} {virtual or 1} stages a rank, {few[1]} units: reductions {reductions[0]} of 2 "
                f"micro-batches, {reductions[1]} of 8; gathers of parameters {gathers[0]} and {gathers[1]}"
                f"{'' if reductions[0] == reductions[1] else '  EXCEEDED'}",
                flush=True,
            )
    return within


def main() -> int:
    parser = arguments(__doc__, ("bubble", "wire", "memory", "reductions"))
    parser.set_defaults(rounds=5)
    chosen = parser.parse_args()
    print(machine())
    within = True
    if chosen.only in (None, "bubble"):
        with section("Waiting as a share of computing"):
            report_bubble(chosen.rounds)
    if chosen.only in (None, "wire"):
        with section("Bytes between stages in a step"):
            within &= report_wire()
    if chosen.only in (None, "memory"):
        with section("Memory of a stage on two replicas, compared with the plan"):
            within &= report_memory()
    if chosen.only in (None, "reductions"):
        with section("Collectives of a stage's two replicas in a step"):
            within &= report_reductions()
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
