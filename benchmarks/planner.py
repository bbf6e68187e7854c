"""Predicted peak memory and wire bytes of a step compared with those of the same step, run for real on gloo ranks.

    .venv/bin/python benchmarks/planner.py [--only N ...]
    .venv/bin/python benchmarks/planner.py --published
    .venv/bin/python benchmarks/planner.py --growth docs/planner-growth.svg

Runs 42 configurations on 1, 2 and 4 ranks, with every wrapper: depth, width, batch, recomputation, accumulation,
precision, topology, experts, pipelines, offloaded activations and offloaded shards change. Of a pipeline each rank
that differs is compared. Exits with 1 if a predicted peak is below the measured one by more than 1 %, or above it by
more than 3 %, or if other bytes are sent than predicted.

The second compares predictions with published step times and memory. The third draws and prints the predicted
throughput of Llama 3 8B on 8 to 16,384 H100s, under each wrapper but the replicated one, under which it does not fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

from _history import Parser, record
from _measure import PairedRatio, machine, run_on_ranks, section
from _planned_step import real_steps

from core.planner.estimates import Estimate, estimate, wrapper_configs
from core.planner.hardware import find_hardware
from core.planner.search import scalings
from core.planner.simulation import pipeline_ranks, simulate
from core.planner.step_time import step_time
from core.planner.tables import sweep_table
from core.training.config import PretrainConfig, validate
from core.training.config.arguments import parse_arguments, parse_values

BASE = "--num-attention-heads 8 --train-iters 10 --lr 1e-3 --vocab-size 1000 --hidden-dropout 0 --attention-dropout 0"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
WRAPPERS = {
    "replicated": "",
    "ZeRO-1": "--data-parallel-sharding-strategy optim",
    "ZeRO-2": "--data-parallel-sharding-strategy optim_grads",
    "ZeRO-3": "--data-parallel-sharding-strategy optim_grads_params",
    "FSDP2": "--use-torch-fsdp2",
}
SMALL = "--num-layers 2 --hidden-size 128 --seq-length 128 --micro-batch-size 2"
DEEP = "--num-layers 8 --hidden-size 128 --seq-length 128 --micro-batch-size 1"
WIDE = "--num-layers 2 --hidden-size 512 --seq-length 64 --micro-batch-size 1"
LARGE_BATCH = "--num-layers 2 --hidden-size 128 --seq-length 256 --micro-batch-size 4"
ACCUMULATED = "--num-layers 3 --hidden-size 256 --seq-length 128 --micro-batch-size 1 --global-batch-size 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
SPREAD = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"
PIPELINE = "--pipeline-model-parallel-size 2"

CONFIGURATIONS: list[tuple[int, str, str]] = [
    *((2, wrapper, SMALL) for wrapper in WRAPPERS),
    *((2, wrapper, f"{WIDE} --activation-checkpointing full") for wrapper in WRAPPERS),
    *((2, wrapper, f"{ACCUMULATED} {LLAMA} --bf16") for wrapper in WRAPPERS),
    *((4, wrapper, f"{DEEP} {LLAMA} --activation-checkpointing selective") for wrapper in WRAPPERS),
    (1, "replicated", LARGE_BATCH),
    (1, "ZeRO-3", f"{WIDE} {LLAMA} --bf16"),
    (1, "FSDP2", f"{DEEP} --activation-checkpointing full"),
    (4, "ZeRO-1", f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel {LLAMA}"),
    (4, "FSDP2", f"{LARGE_BATCH} --context-parallel-size 2 {LLAMA}"),
    (4, "ZeRO-3", f"{WIDE} --num-distributed-optimizer-instances 2"),
    (4, "ZeRO-2", f"{ACCUMULATED} --untie-embeddings-and-output-weights"),
    (4, "FSDP2", f"{LARGE_BATCH} --torch-fsdp2-no-reshard-after-forward"),
    (2, "replicated", f"{DEEP} --optimizer muon"),
    (2, "ZeRO-3", f"{ACCUMULATED} --reduce-every-micro-batch"),
    (2, "ZeRO-1", f"{SMALL} {LLAMA} {EXPERTS}"),
    (2, "FSDP2", f"{SMALL} {LLAMA} {EXPERTS} --moe-grouped-gemm --activation-checkpointing full"),
    (2, "ZeRO-2", f"{SMALL} {LLAMA} {EXPERTS} {SPREAD} alltoall"),
    (4, "ZeRO-3", f"{SMALL} {LLAMA} {EXPERTS} {SPREAD} alltoall --moe-shared-expert-intermediate-size 256"),
    (4, "FSDP2", f"{SMALL} {LLAMA} {EXPERTS} {SPREAD} allgather"),
    (2, "replicated", f"{DEEP} {PIPELINE} --global-batch-size 8"),
    (2, "ZeRO-1", f"{DEEP} {PIPELINE} {LLAMA} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16"),
    (4, "FSDP2", f"{DEEP} {PIPELINE} {LLAMA} --activation-checkpointing full --global-batch-size 8"),
    (2, "ZeRO-1", f"{LARGE_BATCH} --offload-activations"),
    (2, "FSDP2", f"{DEEP} {LLAMA} --offload-activations --activation-checkpointing full"),
    (2, "ZeRO-3", f"{WIDE} {LLAMA} --bf16 --cpu-offload"),
    (2, "FSDP2", f"{ACCUMULATED} --cpu-offload"),
]
"""Ranks, wrapper and flags of each."""


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these configurations, from 1")
    parser.add_argument(
        "--growth", type=Path, metavar="FILE.svg", help="draw throughput over numbers of ranks instead"
    )
    parser.add_argument("--published", action="store_true", help="compare with published runs instead")
    options = parser.parse_args()
    if options.published:
        compare_published()
        return 0
    if options.growth is not None:
        draw_growth(options.growth)
        return 0
    numbers = options.only or range(1, len(CONFIGURATIONS) + 1)
    print(machine())
    with section("Predicted and measured peak of tensors of rank 0, and the bytes that it sends in a step"):
        return compare(numbers)


def compare(numbers: Sequence[int]) -> int:
    lines = {number: command_line(number) for number in numbers}
    for number, line in lines.items():
        validate(parse_arguments(line), CONFIGURATIONS[number - 1][0])
    real: dict[int, list[tuple[int, int]]] = {}
    for ranks in sorted({CONFIGURATIONS[number - 1][0] for number in numbers}):
        own = [number for number in numbers if CONFIGURATIONS[number - 1][0] == ranks]
        of_ranks = run_on_ranks(real_steps, ranks, [lines[n] for n in own])
        real.update({number: [steps[index] for steps in of_ranks] for index, number in enumerate(own)})
    ratios, others = [], 0
    print("| # | ranks | wrapper | flags | predicted, MiB | measured, MiB | predicted / measured | bytes sent |")
    print("| ---: | ---: | --- | --- | ---: | ---: | ---: | --- |")
    for number in numbers:
        ranks, wrapper, flags = CONFIGURATIONS[number - 1]
        config = parse_arguments(lines[number])
        for stage in pipeline_ranks(config):
            with redirect_stderr(StringIO()):
                simulated = simulate(config, ranks, pipeline_rank=stage, on_gpu=False)
            (measured, sent), predicted = real[number][simulated.rank], simulated.peak.nbytes
            ratios.append(predicted / measured)
            planned = sum(simulated.wire().values())
            others += planned != sent
            bytes_sent = f"{sent:,}" if planned == sent else f"{planned:,} predicted, {sent:,} sent"
            of_stage = f", stage {stage}" if simulated.schedule else ""
            print(
                f"| {number} | {ranks} | {wrapper}{of_stage} | `{flags}` | {predicted / 2**20:.2f} "
                f"| {measured / 2**20:.2f} | {ratios[-1]:.4f} | {bytes_sent} |"
            )
    record("predicted / measured", PairedRatio(tuple(ratios)))
    below = sum(ratio < 1 for ratio in ratios)
    print(
        f"\npredicted / measured: minimum {min(ratios):.4f}, median {statistics.median(ratios):.4f}, maximum "
        f"{max(ratios):.4f}; below one in {below} of {len(ratios)}; other bytes sent than predicted in {others}"
    )
    return int(not 0.99 <= min(ratios) <= max(ratios) <= 1.03 or others > 0)


GROWN = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
    "--vocab-size 128256 --untie-embeddings-and-output-weights --seq-length 8192 --micro-batch-size 1 --bf16 "
    f"--activation-checkpointing selective --hidden-dropout 0 --train-iters 10 --lr 1e-3 {LLAMA}"
)
LLAMA_8B = GROWN.replace("--micro-batch-size 1", "--micro-batch-size 2")
LAYERS_OF_70B = (
    "--num-layers 12 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 "
    "--vocab-size 128256 --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 1 --bf16 "
    "--sequence-parallel --hidden-dropout 0 --train-iters 10 --lr 1e-3 --data-parallel-sharding-strategy optim "
    f"{LLAMA}"
)


PUBLISHED: list[tuple[str, int, str, str, dict[str, float], float, float]] = [
    (
        "Llama 3.1 8B, FSDP2, 8 H100, local batch 2 x 8192, selective recomputation, eager",
        *(8, "h100", f"{LLAMA_8B} --use-torch-fsdp2"),
        *({"memory_bandwidth": 0.85 * 2.4e12}, 2 * 8192 / 5762, 82.4),
    ),
    (
        "the same on 128 H100",
        *(128, "h100", f"{LLAMA_8B} --use-torch-fsdp2"),
        *({"memory_bandwidth": 0.85 * 2.4e12}, 2 * 8192 / 5605, 67.0),
    ),
    (
        "12 layers of Llama 3 70B, tensor-parallel 2, ZeRO-1, 4 micro-batches of 4096, 8 B200",
        *(8, "b200", f"{LAYERS_OF_70B} --tensor-model-parallel-size 2 --global-batch-size 16", {}, 0.7255, 60.68),
    ),
    (
        "the same, tensor-parallel 8",
        *(8, "b200", f"{LAYERS_OF_70B} --tensor-model-parallel-size 8 --global-batch-size 4", {}, 0.2809, 28.29),
    ),
]
"""Name, ranks, preset, flags, changed rates, published seconds of a step, and published GiB of a rank."""


def compare_published() -> None:
    """Prints predictions next to published figures, as torchtitan's and SimuMax's pages have them."""
    assumed: list[str] = []
    print("| published | | predicted | error |\n| --- | --- | --- | --- |")
    for name, ranks, preset, flags, changed, step_s, gib in PUBLISHED:
        hardware = replace(find_hardware(preset), **changed)
        with redirect_stderr(StringIO()):
            planned = estimate("", parse_arguments(flags.split()), ranks, hardware)
        taken, predicted_gib = planned.time.step_s, planned.peak_bytes / 2**30
        print(f"| {name} | {1e3 * step_s:.1f} ms | {1e3 * taken:.1f} ms | {100 * (taken / step_s - 1):+.0f} % |")
        print(f"| | {gib:.2f} GiB | {predicted_gib:.2f} GiB | {100 * (predicted_gib / gib - 1):+.0f} % |")
        if preset == "b200":
            assumed += [f"{name}:", *errors_of_rates(planned, step_s)]
            full = parse_arguments([*flags.split(), "--activation-checkpointing", "full"])
            with redirect_stderr(StringIO()):
                planned = estimate("", full, ranks, hardware)
            error = 100 * (planned.time.step_s / step_s - 1)
            assumed.append(f"  layers recomputed: {error:+.0f} %, {planned.peak_bytes / 2**30:.1f} GiB")
    print("\nWith other assumptions:", *assumed, sep="\n")


def errors_of_rates(planned: Estimate, step_s: float) -> list[str]:
    """Returns a line for each rate of the hardware that is assumed: the error of the step with another value."""
    hardware, lines = planned.hardware, []
    for rate, value in (
        ("matmul_flops", 0.7 * hardware.matmul_flops),
        ("memory_bandwidth", 0.5 * hardware.memory_bandwidth),
        ("link_bandwidth", 0.5 * hardware.link_bandwidth),
        ("launch_s", 20e-6),
    ):
        taken = step_time([planned.simulation], replace(hardware, **{rate: value})).step_s
        lines.append(f"  {rate} {value:.3g}: {100 * (taken / step_s - 1):+.0f} %")
    return lines


def draw_growth(picture: Path) -> None:
    """Draws tokens a second of a rank over numbers of ranks, a line for each wrapper, as SVG, and prints the table."""
    from matplotlib import pyplot

    hardware = find_hardware("h100")
    configs = wrapper_configs(parse_values(GROWN.split()), [name for name in WRAPPERS if name != "replicated"])
    planned = {name: config for name, config in configs.items() if isinstance(config, PretrainConfig)}
    with redirect_stderr(StringIO()):
        sweep = scalings(planned, 8, hardware)
    print(*sweep_table(sweep).lines(200), sep="\n")
    pyplot.rcParams["svg.hashsalt"] = "planner"  # the same numbers give the same file
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for scaling in sweep:
        ranks = [point.world_size for point in scaling.points]
        style = "--" if scaling.name.startswith("hybrid") else "-"
        axes.plot(ranks, [point.tokens_per_second for point in scaling.points], style, label=scaling.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{number:,}" for number in ranks], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s of a rank")
    axes.set_xlabel("H100s, 8 a node")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def command_line(number: int) -> list[str]:
    """Returns the flags of a configuration, counted from 1."""
    _, wrapper, flags = CONFIGURATIONS[number - 1]
    return f"{BASE} {flags} {WRAPPERS[wrapper]}".split()


if __name__ == "__main__":
    raise SystemExit(main())
