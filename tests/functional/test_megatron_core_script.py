"""An own pretraining script on megatron-core as released: unchanged, and with this library's wrappers in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.unit._program import run_program
from tests.unit._quick import needs

pytestmark = needs("megatron")
SCRIPT = Path(__file__).with_name("_megatron_pretrain.py")
LINE = re.compile(r"iteration (\d+) \| lm loss: (\S+) \| grad norm: (\S+)")
RUN = """
import runpy, sys
from tests.unit.adapters._megatron import cuda_is_cpu

del sys.argv[0]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
with cuda_is_cpu():
    run(sys.argv[0], run_name="__main__", **({} if run is runpy.run_path else {"alter_sys": True}))
"""
"""Runs a script as `python SCRIPT` does, or `python -m core.adapters.megatron_lm SCRIPT`."""


@cache
def _run(folder: Path, ranks: int, *words: str) -> tuple[str, list[tuple[float, float]]]:
    """Returns the class that was built, and loss and norm of each iteration."""
    program = folder / "run.py"
    program.write_text(RUN)
    ended = run_program(program, *words, folder=folder, ranks=ranks)
    assert ended.status == 0, ended.err
    (built,) = re.findall(r"^built: (.*)$", ended.out, re.MULTILINE)
    return built, [(float(loss), float(norm)) for _, loss, norm in LINE.findall(ended.out)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.mark.parametrize(
    ("chosen", "wrapper"),
    [
        ("", "DistributedDataParallel"),
        ("--use-distributed-optimizer", "DistributedDataParallel"),
        ("--data-parallel-sharding-strategy optim_grads", "DistributedDataParallel"),
        ("--data-parallel-sharding-strategy optim_grads_params", "FullyShardedDataParallel"),
        ("--use-torch-fsdp2", "TorchFullyShardedDataParallel"),
    ],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_script_runs_unchanged(folder: Path, ranks: int, chosen: str, wrapper: str) -> None:
    stock, expected = _run(folder, ranks, str(SCRIPT))
    built, found = _run(folder, ranks, "core.adapters.megatron_lm", str(SCRIPT), *chosen.split())
    assert stock == "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
    assert built == f"shardstack.adapters.megatron_lm.wrappers.{wrapper}"
    assert len(found) == len(expected) == 5
    # Two ranks add two numbers, in any order. Norms are summed in another order, and clipping scales gradients by
    # them; Adam carries that on, at a learning rate of 0.01.
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6 if ranks == 2 else 1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5 if ranks == 2 else 1e-4)
