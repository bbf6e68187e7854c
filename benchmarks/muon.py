"""Measures Muon: the time of its update, its bytes on the wire, its memory, and loss against steps next to AdamW.

    python benchmarks/muon.py [--only time|wire|memory|noise|curves] [--rounds N] [--iterations N] [--figure FILE.svg]

* ``time``: the update of the example's model over 2 and 4 ranks compared with every rank orthogonalizing all matrices.
  Limit: 1 / ranks + 0.15.
* ``wire``: bytes of an update over the loopback interface compared with the printed formula. Limit: 5 % apart.
* ``memory``: bytes of momentum on the rank that has most, with momentum at the shards and at the owners.
* ``noise``: what another order of adding four micro-batches' gradients changes in them, and in orthogonal updates, as
  shares of their norms: the matrix that differs most.
* ``curves``: trains the example with AdamW and with Muon, with equal settings, and draws the loss against steps.

Ranks are gloo processes with one thread each. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import record
from _measure import PairedRatio, interleaved_seconds, machine, run_on_ranks, section, wire_bytes_per_step
from _report import MIB, arguments, exit_status

SIZES = {"num_layers": 4, "hidden_size": 192, "num_attention_heads": 6, "ffn_hidden_size": 512}
WRAPPERS, RANKS = ("ddp", "zero1", "fsdp2"), (2, 4)
TIME_SLACK, WIRE_LIMIT = 0.15, 0.05
WIRE_BYTES = 2  # an element in bf16
REPOSITORY = Path(__file__).resolve().parents[1]


def example_model() -> torch.nn.Module:
    from core.models.gpt import GPTModel
    from core.transformer import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(**SIZES, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm")  # type: ignore[arg-type]
    return GPTModel(config, vocab_size=2048, max_sequence_length=128, position_embedding_type="rope")


def update_of(wrapper: str, holder: str = "shards") -> tuple[Callable[[], None], Any]:
    """Returns Muon's update with gradients of random numbers, and its rule; every rank's own without a wrapper."""
    from core import parallel_state
    from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    model: Any = example_model()
    if wrapper != "alone":
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        configs = {
            "ddp": DistributedDataParallelConfig(),
            "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
            "fsdp2": TorchFullyShardedDataParallelConfig(),
        }
        model = wrap_model(model, model.config, configs[wrapper])
    config = OptimizerConfig(optimizer="muon", lr=1e-3, muon_momentum_holder=holder)  # type: ignore[arg-type]
    rule = get_megatron_optimizer(config, [model]).optimizer
    for group in rule.param_groups:
        for main in group["params"]:
            main.grad = torch.randn_like(main)
    rule.model = model  # type: ignore[attr-defined]  # its parameters are views of the model's memory
    return lambda: rule.step(), rule


def measure_time(wrapper: str, rounds: int) -> dict[str, list[float]]:
    alone, _ = update_of("alone")
    shared, _ = update_of(wrapper)
    return interleaved_seconds({"alone": alone, "shared": shared}, rounds)


def measure_wire(wrapper: str) -> tuple[float, int]:
    """Returns the bytes of an update over all ranks, and the elements of all matrices."""
    update, rule = update_of(wrapper)
    update()
    elements = sum(rows * columns for rows, columns in (matrix.shape for matrix in rule._matrices))
    return wire_bytes_per_step(update), elements


def measure_memory(wrapper: str, holder: str) -> int:
    update, rule = update_of(wrapper, holder)
    update()
    states = [rule.state[main] for main in rule._mains]
    return sum(t.numel() * t.element_size() for s in states for t in s.values() if isinstance(t, torch.Tensor))


def report_time(rounds: int) -> bool:
    within = True
    for ranks in RANKS:
        for wrapper in WRAPPERS:
            seconds = run_on_ranks(measure_time, ranks, wrapper, rounds)[0]
            ratio, limit = PairedRatio.of(seconds["shared"], seconds["alone"]), 1 / ranks + TIME_SLACK
            within &= ratio.holds(limit)
            record(f"{ranks} ranks {wrapper}", ratio)
            milliseconds = {name: f"{1e3 * statistics.median(values):.0f}" for name, values in seconds.items()}
            print(f"  {ranks} ranks {wrapper:6} {ratio}{ratio.verdict(limit)}   ms {milliseconds}", flush=True)
    return within


def report_wire() -> bool:
    within = True
    for ranks in RANKS:
        for wrapper in ("ddp", "fsdp2"):
            found, elements = run_on_ranks(measure_wire, ranks, wrapper)[0]
            passes = ranks - 1 if wrapper == "ddp" else 2 * (ranks - 1) / ranks
            formula = "(ranks - 1)" if wrapper == "ddp" else "2 (ranks - 1) / ranks"
            expected = WIRE_BYTES * elements * passes
            off = found / expected - 1
            within &= abs(off) <= WIRE_LIMIT
            record(f"{ranks} ranks {wrapper} / formula", found / expected)
            print(
                f"  {ranks} ranks {wrapper:6} MiB {found / MIB:6.2f}   formula {expected / MIB:6.2f} = 2 bytes x "
                f"elements x {formula}   {100 * off:+.1f} %{'' if abs(off) <= WIRE_LIMIT else '  EXCEEDED'}",
                flush=True,
            )
    return within


def report_memory() -> None:
    for ranks in RANKS:
        for wrapper in WRAPPERS:
            held = {h: max(run_on_ranks(measure_memory, ranks, wrapper, h)) for h in ("shards", "owners")}
            record(f"{ranks} ranks {wrapper}: owners / shards", held["owners"] / held["shards"])
            shown = "   ".join(f"{holder} {nbytes / MIB:5.2f}" for holder, nbytes in held.items())
            print(f"  {ranks} ranks {wrapper:6} MiB of momentum at {shown}", flush=True)


def report_noise() -> None:
    from core.optimizer.muon.matrices import orthogonalize
    from core.optimizer.muon_recipe import PRESETS

    model, gradients = example_model(), list[list[torch.Tensor]]()
    matrices = [p for name, p in model.named_parameters() if "linear_" in name and p.ndim == 2]
    for seed in range(4):
        tokens = torch.randint(0, 2048, (2, 129), generator=torch.Generator().manual_seed(seed))
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        gradients.append(list(torch.autograd.grad(loss, matrices)))
    orders = [(((a + b) + c) + d, (a + b) + (c + d)) for a, b, c, d in zip(*gradients, strict=True)]
    print(f"  gradient            {max((a - b).norm() / a.norm() for a, b in orders):.1e}")
    for precision in ("highest", "medium"):
        recipe = dataclasses.replace(PRESETS["moonlight"], fp32_matmul_prec=precision)
        pairs = [tuple(orthogonalize(g.contiguous(), recipe).float() for g in pair) for pair in orders]
        print(f"  update, {precision:11} {max((a - b).norm() / a.norm() for a, b in pairs):.1e}", flush=True)


def losses(optimizer: str, iterations: int, folder: Path) -> tuple[list[int], list[float]]:
    """Trains the example on two ranks under FSDP2; returns steps and training losses."""
    from core.run_log.files import LOG_FILE, read_log

    program = REPOSITORY / "examples" / "gpt" / "pretrain_gpt.py"
    launch = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", "2", str(program), "--use-torch-fsdp2"]
    flags = ["--optimizer", optimizer, "--train-iters", str(iterations), "--eval-iters", "0", "--save", str(folder)]
    if optimizer == "muon":  # many CPUs have no instructions for products in bf16
        flags += ["--muon-fp32-matmul-prec", "highest"]
    subprocess.run([*launch, *flags], check=True, cwd=REPOSITORY)
    lines = [line for line in read_log(folder / LOG_FILE) if "loss" in line]
    return [line["step"] for line in lines], [line["loss"] for line in lines]


def draw_curves(iterations: int, target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    with tempfile.TemporaryDirectory() as folder:
        for optimizer, label in (("adam", "AdamW"), ("muon", "Muon (moonlight)")):
            steps, values = losses(optimizer, iterations, Path(folder) / optimizer)
            axes.plot(steps, values, label=label)
            print(f"  {label:16} loss {values[-1]:.4f} at step {steps[-1]}", flush=True)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(target, metadata={"Date": None})


def main() -> int:
    parser = arguments(__doc__, ("time", "wire", "memory", "noise", "curves"))
    parser.add_argument("--iterations", type=int, default=300, help="steps of each training of `curves`")
    parser.add_argument("--figure", type=Path, help="file that `curves` draws; without it nothing is trained")
    chosen = parser.parse_args()
    print(machine())
    within = True
    if chosen.only in (None, "time"):
        with section("Update over ranks, compared with all matrices on every rank"):
            within &= report_time(chosen.rounds)
    if chosen.only in (None, "wire"):
        with section("Bytes of an update over all ranks"):
            within &= report_wire()
    if chosen.only in (None, "memory"):
        with section("Momentum on the rank that has most"):
            report_memory()
    if chosen.only in (None, "noise"):
        with section("Noise of another order of addition"):
            report_noise()
    if chosen.figure is not None:
        with section("Loss against steps"):
            draw_curves(chosen.iterations, chosen.figure)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
