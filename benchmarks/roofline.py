"""Predicts a step of `gpt_throughput.py` on one GPU from rates, and what each change of the step would bring.

    python benchmarks/roofline.py [--presets 1b 3b 4b] [--devices h100 h200] [--micro-batches 1 8]
                                  [--products 700] [--attention 500] [--copy 4.1] [--launch 5]
    python benchmarks/roofline.py --measured FOLDER/gpt_throughput-cuda-1b-ddp-ladder-2026-11-28.json

A step is the sum of its parts: operations of products and of attention over their rates, and bytes of all else over
that of a copy; or what the host takes to launch it all, if that is longer. Operations are those of the formula of
`gpt_throughput.py`. Bytes are counted on this machine, operator by operator, from the code as it is
(`_step_bytes.py`); those of code that does not exist yet, and of compiled layers, are stated there.

Rates are assumptions until there are measured ones: `--help` says which. `--measured` takes reports of
`gpt_throughput.py`, which `make gpu-first` leaves, and the rates that each measured before its first row, and prints
measured milliseconds next to predicted ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1]))  # core, where it is not installed

from _history import Parser, record
from _llama import PRESETS, Preset, matrix_parameters, model_flops
from _step_bytes import compiled_layer, count, count_gradient_bytes, count_update_bytes, parameters

PRODUCTS_SHARE = 0.88
"""Of the rate of the best shape that products of a step reach. Assumed, as in the third reading of the GPU path."""

ATTENTION, ATTENTION_3 = 500.0, 605.0
"""TFLOP/s of cuDNN's and of FlashAttention-3's kernels with causal masks, backward included. Assumed: forward alone,
without a mask, reaches 609 and 638 for heads of width 128 (Shah et al., 2024, figure 5), and backward less."""

EXECUTED = 14 / 12
"""Operations that attention kernels run, over those of the formula: backward computes the scores again."""


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches."""

    products: float
    """TFLOP/s of the step's matrix products."""
    attention: float
    """TFLOP/s of attention kernels, of the products that these run."""
    attention_2: float
    """The same of FlashAttention-2."""
    attention_3: float
    """The same of FlashAttention-3."""
    copy: float
    """TB/s, read and written."""
    launch: float
    """Microseconds in which the host launches a kernel."""
    memory: int
    """Bytes of the GPU, by which the fused loss keeps its logits or computes them in parts."""


@dataclass(frozen=True)
class Choices:
    """The code of a step."""

    compiled: bool = True
    loss: str = "fused"
    """Of `_step_bytes.Counts.losses`."""
    wrapper: str = "ddp"
    update: float | None = None
    """Bytes a parameter. None counts them."""
    are_lent: bool = True
    """Whether products write weight gradients into the wrapper's memory."""
    kernel: str = "attention"
    """Of attention: a field of `Rates`."""


@dataclass(frozen=True)
class Step:
    """Milliseconds of the parts of a step."""

    products: float
    attention: float
    elementwise: float
    loss: float
    gradients: float
    update: float
    host: float
    """Time of all launches. The device does not wait for the host unless this is more than the rest."""

    @property
    def milliseconds(self) -> float:
        device = sum(getattr(self, one.name) for one in fields(self) if one.name != "host")
        return max(device, self.host)


ITEMS: dict[str, dict[str, Any]] = {"P5: FlashAttention-3": {"kernel": "attention_3"}}
"""What each change sets."""

DEFAULT, EAGER = Choices(), Choices(compiled=False)


def predict(preset: Preset, choices: Choices, rates: Rates) -> Step:
    """Returns the parts of a step."""
    counts, micro_batches = count(replace(preset, micro_batches=1), rates.memory), preset.micro_batches
    size, loss = parameters(preset), counts.losses[choices.loss]
    of_matrices = 6 * matrix_parameters(preset) * preset.tokens
    of_attention = EXECUTED * (model_flops(preset) - of_matrices)
    of_matrices += micro_batches * (loss.flops - counts.losses["plain"].flops)  # parts compute logits again
    layer = compiled_layer(preset) if choices.compiled else counts.layer
    elementwise = preset.layers * layer.nbytes + counts.ends.nbytes
    launches = loss.launches + preset.layers * layer.launches + counts.ends.launches
    first, later = count_gradient_bytes(are_lent=choices.are_lent) if choices.wrapper == "ddp" else (0.0, 6.0)
    update = count_update_bytes(choices.wrapper) if choices.update is None else choices.update

    def moves(nbytes: float) -> float:
        return 1e3 * nbytes / (rates.copy * 1e12)

    return Step(
        products=1e3 * of_matrices / (rates.products * 1e12),
        attention=1e3 * of_attention / (getattr(rates, choices.kernel) * 1e12),
        elementwise=micro_batches * moves(elementwise),
        loss=micro_batches * moves(loss.nbytes),
        gradients=moves(size * (first + later * (micro_batches - 1))),
        update=moves(size * update),
        host=micro_batches * launches * rates.launch / 1e3,
    )


def tflops(preset: Preset, step: Step) -> float:
    """Returns model TFLOP/s, causal attention, as `gpt_throughput.py` does."""
    return model_flops(preset) / step.milliseconds / 1e9


def default_rates(device: str, asked: argparse.Namespace) -> Rates:
    """Returns the rates of a device: those that were asked for, or else of the planner's presets."""
    from core.planner.hardware import find_hardware

    hardware = find_hardware(device)
    return Rates(
        products=asked.products or PRODUCTS_SHARE * hardware.matmul_flops / 1e12,
        attention=asked.attention or ATTENTION,
        attention_2=hardware.attention_flops / 1e12,
        attention_3=asked.attention_3 or ATTENTION_3,
        copy=asked.copy or hardware.memory_bandwidth / 1e12,
        launch=asked.launch or hardware.launch_s * 1e6,
        memory=hardware.memory_bytes,
    )


def print_parts(device: str, presets: dict[str, Preset], rates: Rates) -> None:
    """Prints the parts of a step of each preset, with compiled and with eager layers."""
    parts = [one.name for one in fields(Step)]
    print(
        f"\n{device}: products {rates.products:.0f}, attention {rates.attention:.0f} TFLOP/s, copy {rates.copy:.2f}",
        end="",
    )
    print(f" TB/s, launch {rates.launch:g} us; milliseconds of a step, fused loss, DDP")
    print(f"{'':22}" + "".join(f"{part:>12}" for part in (*parts, "step", "TFLOP/s")))
    for name, preset in presets.items():
        for layers, choices in (("compiled", DEFAULT), ("eager", EAGER)):
            step = predict(preset, choices, rates)
            values = [getattr(step, part) for part in parts] + [step.milliseconds, tflops(preset, step)]
            print(f"{f'{name}, {layers}':22}" + "".join(f"{value:12.1f}" for value in values))


def print_items(device: str, presets: dict[str, Preset], rates: Rates) -> None:
    """Prints what each item brings alone, in percent of the step, and all together."""
    print(f"\n{device}: the step, and how much less time it takes, in percent of itself, with")
    print(f"{'':34}" + "".join(f"{name:>12}" for name in presets))

    def line(name: str, of: Callable[[Preset], str]) -> None:
        print(f"{name:34}" + "".join(f"{of(preset):>12}" for preset in presets.values()))

    def saved(base: Choices, change: dict[str, Any]) -> Callable[[Preset], str]:
        def of(preset: Preset) -> str:
            before, after = (predict(preset, one, rates).milliseconds for one in (base, replace(base, **change)))
            return f"{100 * (1 - after / before):.1f}"

        return of

    def rate(choices: Choices, rates: Rates) -> Callable[[Preset], str]:
        return lambda preset: f"{tflops(preset, predict(preset, choices, rates)):.0f}"

    everything = {key: value for change in ITEMS.values() for key, value in change.items()}
    line("eager, TFLOP/s", rate(EAGER, rates))
    line("P4: compiled layers", saved(EAGER, {"compiled": True}))
    passes = count_update_bytes(DEFAULT.wrapper, compiles=False)
    line("P2: update in one pass", saved(replace(DEFAULT, update=passes), {"update": None}))
    line("P3: logits kept, if they may be", saved(replace(DEFAULT, loss="in parts"), {"loss": "fused"}))
    line("P7: gradients in place", saved(replace(DEFAULT, are_lent=False), {"are_lent": True}))
    line("compiled, TFLOP/s", rate(DEFAULT, rates))
    for name, change in ITEMS.items():
        line(name, saved(DEFAULT, change))
    line("all", saved(DEFAULT, everything))
    line("all, TFLOP/s", rate(replace(DEFAULT, **everything), rates))
    better = replace(rates, products=rates.products / PRODUCTS_SHARE * 0.93)
    line(f"all, products at {better.products:.0f}", rate(replace(DEFAULT, **everything), better))
    for name, preset in presets.items():
        before, after = (predict(preset, one, rates) for one in (DEFAULT, replace(DEFAULT, **everything)))
        record(f"{device}, {name}: step with all items / without", after.milliseconds / before.milliseconds)


def compare(path: Path, asked: argparse.Namespace) -> None:
    """Prints the rows of a report, predicted by its own rates and measured.

    Raises:
        ValueError: it is no report of `gpt_throughput.py`.
    """
    from core.planner.hardware import find_hardware

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        shape = {one.name: report["preset"][one.name] for one in fields(Preset) if one.name in report["preset"]}
        matmul, copied = report["matmul_tflops"]["before"], report["copy_gb_per_second"]["before"]
        rows, device = report["rows"], report["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no report of gpt_throughput.py with its rates ({error!r}); give one of this version"
        ) from None
    known = find_hardware("h100" if "H100" in device else "h200")
    scale = matmul / (known.matmul_flops / 1e12)  # for what the report has not
    rates = Rates(
        products=asked.products or PRODUCTS_SHARE * matmul,
        attention=asked.attention or ATTENTION * scale,
        attention_2=known.attention_flops / 1e12 * scale,
        attention_3=asked.attention_3 or ATTENTION_3 * scale,
        copy=asked.copy or copied / 1e3,
        launch=asked.launch or known.launch_s * 1e6,
        memory=known.memory_bytes,
    )
    print(f"\n{path.name}, {device}: products {rates.products:.4g}, attention {rates.attention:.4g} TFLOP/s, ", end="")
    print(f"copy {rates.copy:.4g} TB/s")
    print(f"{'':40}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for row in rows:
        preset = Preset(**shape | {"samples": row["samples"], "micro_batches": row["micro_batches"]})
        choices, left_out = choices_of(row)
        if choices is None:
            print(f"{row['name']:40}{'-':>12}{1e3 * row['seconds']:9.1f} ms   {left_out}")
            continue
        predicted, measured = predict(preset, choices, rates).milliseconds, 1e3 * row["seconds"]
        print(f"{row['name']:40}{predicted:9.1f} ms{measured:9.1f} ms{measured / predicted:8.2f}")
        record(f"{path.stem}, {row['name']}: measured / predicted", measured / predicted)


def choices_of(row: dict[str, Any]) -> tuple[Choices | None, str]:
    """Returns the choices of a report's row, or None and what the model leaves out of it."""
    techniques = set(row["techniques"])
    kernels = {"fused attention": "attention", "flash attention": "attention_2", "flash3 attention": "attention_3"}
    if strays := sorted(techniques - {"plain", "compiled layers", "loss in parts", *kernels}):
        return None, f"{', '.join(strays)}: not predicted"
    return Choices(
        compiled="compiled layers" in techniques,
        loss="fused" if "loss in parts" in techniques else "plain",
        wrapper=row["wrapper"],
        update=(row.get("update") or {}).get("bytes_per_parameter"),
        kernel=next((kernels[one] for one in kernels if one in techniques), "attention"),
    ), ""


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    large = [name for name in PRESETS if name != "small"]
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=large, help="default: all but small")
    parser.add_argument("--devices", nargs="+", default=["h100", "h200"], help="hardware of the planner, or its files")
    parser.add_argument("--micro-batches", nargs="+", type=_positive_int, default=[1, 8], help="of a step")
    parser.add_argument("--samples", type=_positive_int, help="sequences of a micro-batch instead of the preset's")
    for name, text in (
        ("products", f"TFLOP/s of the step's products (default: {PRODUCTS_SHARE:.0%} of the planner's best shape)"),
        ("attention", f"TFLOP/s of what attention kernels run, backward included (default: {ATTENTION:g}, assumed)"),
        ("attention-3", f"the same of FlashAttention-3 (default: {ATTENTION_3:g}, assumed)"),
        ("copy", "TB/s read and written by a copy (default: the planner's, 85 percent of the datasheet)"),
        ("launch", "us in which the host launches a kernel (default: the planner's)"),
    ):
        parser.add_argument(f"--{name}", type=_positive, help=text.replace("%", "%%"))
    parser.add_argument("--measured", nargs="+", type=Path, metavar="FILE", help="compare with these reports instead")
    return parser.parse_args()


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _positive_int(text: str) -> int:
    value = _positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(value)


def main() -> int:
    asked = parse()
    if asked.measured:
        for path in asked.measured:
            try:
                compare(path, asked)
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
        return 0
    presets = {}
    for name in asked.presets:
        for number in asked.micro_batches:
            preset = replace(PRESETS[name], micro_batches=number)
            presets[f"{name} x {number}"] = replace(preset, samples=asked.samples) if asked.samples else preset
    for device in asked.devices:
        rates = default_rates(device, asked)
        print_parts(device, presets, rates)
        print_items(device, presets, rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
