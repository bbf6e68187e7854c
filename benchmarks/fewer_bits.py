"""Measures messages in fewer bits: bytes that a rank sends in a step, and the time of a step, next to fp32.

    python benchmarks/fewer_bits.py [FORMAT ...] [--ranks 2] [--only time|bytes] [--rounds 15]

Two gloo ranks of one thread each train a GPT of 8 layers and width 512 in fp32, 4 micro-batches of one sequence of 128
tokens a step. Bytes are counted from the record of collectives. Between processes of one machine bytes cost little, so
that the time is that of encoding and decoding, which a network has to earn back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import MICRO_BATCHES, backward, build_model, micro_batches
from _history import record
from _measure import interleaved_seconds, machine, run_on_ranks, section
from _report import MIB, arguments, check_names, judge

VOCABULARY, SEQUENCE = 8192, 128
SHARDED = ("optim_grads_params", "fsdp2")
FORMATS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "parameters in int8": (SHARDED, {"param_comm_dtype": "int8"}),
    "parameters in fp8": (SHARDED, {"param_comm_dtype": "fp8"}),
    "gradients in bf16": (("no_shard", "optim", *SHARDED), {"grad_comm_dtype": "bf16"}),
    "gradients in int8": (("no_shard", "optim", *SHARDED), {"grad_comm_dtype": "int8"}),
    "both in int8": (SHARDED, {"param_comm_dtype": "int8", "grad_comm_dtype": "int8"}),
}
"""Strategies and settings, by name."""


def _step(strategy: str, fields: dict[str, str]) -> Callable[[], None]:
    from core import parallel_state
    from core.distributed import wrap_model
    from core.distributed.fully_sharded_data_parallel_config import config_of
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    module = build_model(SEQUENCE, VOCABULARY)
    model = wrap_model(module, module.config, config_of(strategy, **fields))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, clip_grad=1.0), [model])
    data = [tokens % VOCABULARY for tokens in micro_batches(1, SEQUENCE)]

    def step() -> None:
        model.zero_grad_buffer()
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        model.finish_grad_sync()
        optimizer.step()

    return step


def measure_time(strategy: str, fields: dict[str, str], rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({"fp32": _step(strategy, {}), "fewer bits": _step(strategy, fields)}, rounds)


def measure_bytes(strategy: str, fields: dict[str, str]) -> int:
    from core.comm.call import Collective, CollectiveRecord
    from core.distributed.plan.parts import sent_bytes

    step, sent, collective = _step(strategy, fields), list[int](), CollectiveRecord.collective
    step()  # engines set themselves up in the first

    def note(of: CollectiveRecord, kind: str, what: str, num_bytes: int, **options: Any) -> Collective:
        sent.append(sent_bytes(kind, num_bytes, of.num_ranks))
        return collective(of, kind, what, num_bytes, **options)

    with mock.patch.object(CollectiveRecord, "collective", note):
        step()
    return sum(sent)


def _report(strategy: str, name: str, fields: dict[str, str], options: Any) -> None:
    what = f"{strategy}, {name}"
    if options.only != "time":
        whole, fewer = (run_on_ranks(measure_bytes, options.ranks, strategy, of)[0] for of in ({}, fields))
        print(f"  {what}: {whole / MIB:.1f} MiB a step, {fewer / MIB:.1f}: {fewer / whole:.3f} x", flush=True)
        record(f"bytes, {what}", fewer / whole)
    if options.only != "bytes":
        seconds = run_on_ranks(measure_time, options.ranks, strategy, fields, options.rounds)[0]
        judge(f"time, {what}", seconds["fewer bits"], seconds["fp32"])


def main() -> int:
    parser = arguments(__doc__, ("time", "bytes"), FORMATS, of="format")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    check_names(parser, options.formats, FORMATS)
    print(machine())
    with section(f"steps of {MICRO_BATCHES} micro-batches on {options.ranks} ranks"):
        for name in options.formats or FORMATS:
            strategies, fields = FORMATS[name]
            for strategy in strategies:
                _report(strategy, name, fields, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
