"""Counts collectives and measures errors of other systems' training loops, with their wrapper and with this one.

    python benchmarks/trainers.py [megatron-lm | torchtitan | adapters] ...

Two gloo ranks train a small model with three micro-batches a step: under Megatron-LM's own schedule and optimizer,
under torchtitan's own trainer, and through each other adapter. Prints, for each, the reduce-scatters and all-gathers
of a step, and how far losses and weights are from those of one process that does the work of both ranks. It measures
no time: the counts and errors are the same on every machine, up to rounding. Where another system's own code raises,
the row has its error.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from _history import Parser, record
from _report import check_names
from torch.distributed.fsdp import FSDPModule

from tests.unit._spawn import run_distributed
from tests.unit.adapters import _adapters, _megatron, _titan

RANKS = 2
Row = tuple[float, float, float, float, float]
"""Reduce-scatters and all-gathers of a step; the largest error of a loss and of a weight, and the relative one of a
gradient's norm."""


def _row(
    calls: Counter[str],
    steps: int,
    losses: tuple[Any, Any],
    weights: tuple[Any, Any],
    norms: tuple[Any, Any] = ((1.0,), (1.0,)),
) -> Row:
    loss = max(abs(found - expected) for found, expected in zip(*losses, strict=True))
    norm = max(abs(found / expected - 1.0) for found, expected in zip(*norms, strict=True))
    weight = max((weights[0][name] - expected).abs().max().item() for name, expected in weights[1].items())
    return calls["foreach_reduce"] / steps, calls["foreach_all_gather"] / steps, loss, weight, norm


def _megatron_lm(ours: bool, tied: bool, per_token: bool) -> Row:
    from unittest import mock

    from core.adapters import megatron_lm
    from core.adapters.megatron_lm import TorchFullyShardedDataParallel

    class Stock(TorchFullyShardedDataParallel._replaced):  # type: ignore[misc, name-defined]
        def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
            """Takes the argument that `finalize_model_grads` of the same release passes, and the class does not."""

    mesh = mock.MagicMock()  # the class names CUDA
    mesh.from_group = lambda group, _: dist.DeviceMesh.from_group(group, "cpu")
    with (
        mock.patch("megatron.core.distributed.torch_fully_sharded_data_parallel.DeviceMesh", mesh),
        _megatron.groups(),
        _megatron.counted() as calls,
    ):
        model = _megatron.build(tied, calculate_per_token_loss=per_token)
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel if ours else Stock, model)
        losses, norms, _ = _megatron.train(model)
        expected, expected_norms, weights = _megatron.serial(RANKS, tied, per_token)
        found = (_megatron.weights(model), weights)
        return _row(calls, _megatron.STEPS, (losses, expected[dist.get_rank()]), found, (norms, expected_norms))


def _torchtitan(ours: bool, chunked: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder, _titan.cpu_is_the_device(), _megatron.counted() as calls:
        from core.adapters import torchtitan

        config = _titan.config_of(folder, chunked=chunked)
        if ours:
            config = torchtitan.with_fsdp2(config)
        else:  # its default demands DTensors, which it does not make on the CPU
            config.parallelism.spmd_backend = "partial_dtensor"
            config.model_spec.parallelize_fn = functools.partial(_summing, config.model_spec.parallelize_fn)
        losses, norms, trainer = _titan.train(config)
        expected, expected_norms, weights = _titan.serial(_titan.config_of(folder), RANKS)
        found = _megatron.weights(trainer.model_parts[0])
        return _row(calls, _titan.STEPS, (losses, expected), (found, weights), (norms, expected_norms))


def _summing(parallelize: Any, model: Any, **settings: Any) -> Any:
    """torchtitan's own function; gloo needs a setting more to sum gradients."""
    model = parallelize(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def _adapter(name: str) -> Row:
    micro_batches = 3
    with _megatron.counted() as calls:
        losses, _, weights = _adapters.train(_adapters.enter(name, _adapters.Net(), "full"), name, micro_batches)
    expected, _, expected_weights = _adapters.serial(RANKS, micro_batches)
    return _row(calls, _adapters.STEPS, (losses, expected[dist.get_rank()]), (weights, expected_weights))


TABLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "megatron-lm": {
        "its wrapper": (_megatron_lm, False, False, False),
        "this wrapper": (_megatron_lm, True, False, False),
        "its wrapper, loss per token": (_megatron_lm, False, False, True),
        "this wrapper, loss per token": (_megatron_lm, True, False, True),
        "its wrapper, tied embeddings": (_megatron_lm, False, True, False),
        "this wrapper, tied embeddings": (_megatron_lm, True, True, False),
    },
    "torchtitan": {
        "its parallelize_fn": (_torchtitan, False, False),
        "this one": (_torchtitan, True, False),
        "its parallelize_fn, loss in chunks": (_torchtitan, False, True),
        "this one, loss in chunks": (_torchtitan, True, True),
    },
    "adapters": {name: (_adapter, name) for name in ("fsdp2", "nvfsdp", "oumi", "optimus", "ml")},
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; by default all")
    asked = parser.parse_args().tables
    check_names(parser, asked, TABLES)
    for name in asked or TABLES:
        print(f"\n| {name} | reduce-scatters | all-gathers | error of a loss | of a weight | of a norm, relative |")
        print("| --- | --- | --- | --- | --- | --- |")
        for label, (measured, *arguments) in TABLES[name].items():
            try:
                rows = run_distributed(measured, RANKS, *arguments)
            except RuntimeError as error:
                if not label.startswith("its "):
                    raise
                last = [line for line in str(error).splitlines() if line and not line.startswith(" ")][-1]
                print(f"| {label} | {last} | | | | |")
                continue
            reduces, gathers, *errors = (max(values) for values in zip(*rows, strict=True))
            if reduces:
                record(f"{name}, {label}: all-gathers / reduce-scatters", gathers / reduces)
            print(f"| {label} | {reduces:g} | {gathers:g} | {' | '.join(f'{e:.1e}' for e in errors)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
