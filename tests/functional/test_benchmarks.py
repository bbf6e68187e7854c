"""Benchmarks run, each in the least time that its arguments allow. Of what they measure then only the counts of the
host's work are looked at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit._program import LIMIT_S, REPOSITORY, program_environment

FOLDER = REPOSITORY / "benchmarks"
ONCE = ("--rounds", "1")
LEAST: dict[str, tuple[str, ...]] = {
    "accelerate_trainer": ("--steps", "2", "--layers", "1", "--hidden", "32"),
    "checkpoints": ("--millions", "2", *ONCE, "--folder", "."),
    "chunked_loss": ("sharded, 4 x 1024 tokens", *ONCE, "--only", "time"),
    "compiled_units": ("DDP", *ONCE),
    "cpu_shortcuts": ("kept inboxes, ZeRO-3", *ONCE, "--only", "time", "--tokens", "128"),
    "data_index": (),
    "ddp_engine": ("--candidates", "torch DDP", "replicated", *ONCE, "--only", "time"),
    "deterministic": ONCE,
    "experts": (*ONCE, "--only", "product"),
    "fewer_bits": ("parameters in int8", *ONCE, "--only", "bytes"),
    "fully_sharded": ("128 tokens", *ONCE, "--only", "time"),
    "gpt_throughput": ("--preset", "small", "--steps", "2"),
    "held_memory": ("--ranks", "2"),
    "host_work": ("bare", "ZeRO-3", "--largest", "3"),
    "lightning_strategies": ("--steps", "2"),
    "lost_ranks": ("ZeRO-1", *ONCE, "--only", "memory"),
    "low_precision": ("--millions", "1", *ONCE),
    "meta_construction": ("--millions", "5", "--only", "gpt"),
    "moe_against_dense": ("--minutes", "0.01", "--calibration", "2"),
    "muon": (*ONCE, "--only", "time"),
    "offloaded_activations": ("--layers", "3", "--width", "64", "--sequence", "64", "--only", "DDP"),
    "parallel_layers": ("--width", "512", "--sequence", "64", *ONCE),
    "pipelines": (*ONCE, "--only", "memory"),
    "planner": ("--only", "21"),
    "reproducible": ("DDP", "--ranks", "2", *ONCE, "--only", "time"),
    "roofline": ("--presets", "small", "--devices", "h200", "--micro-batches", "1"),
    "run_log": ONCE,
    "trainers": ("adapters",),
    "two_checkouts": (str(REPOSITORY), "ZeRO-3, 128 tokens", *ONCE),
    "weights_out": ONCE,
    "wrapper_overhead": ("defaults, 128 tokens", *ONCE, "--only", "time"),
}
NEEDS = {"accelerate_trainer": "accelerate", "lightning_strategies": "lightning", "trainers": "lightning"}


def test_every_benchmark_is_here():
    assert LEAST.keys() == {path.stem for path in FOLDER.glob("[a-z]*.py")}


ROW = r"^(\S.*?)  +((?:\d+ +){2}\d+)$"
"""A row of the table: its name and three counts."""
ABOVE_BARE = {"DDP": (320, 75), "ZeRO-1": (355, 75), "ZeRO-3": (500, 75)}
"""The most calls of Python and the most dispatches of a layer's share of a step, above those of the bare model."""
FSDP2_OF_TORCH = 1.15
"""The most calls of Python under FSDP2, of those of bare `fully_shard`, most of which are torch's in both."""


def test_the_hosts_work_for_a_layer_does_not_grow(tmp_path: Path):
    rows = ("bare", "fully_shard", *ABOVE_BARE, "FSDP2")
    table = subprocess.run(
        [sys.executable, FOLDER / "host_work.py", *rows, "--history", tmp_path / "history.jsonl"],
        cwd=tmp_path,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout
    counts = {row: [int(number) for number in numbers.split()] for row, numbers in re.findall(ROW, table, re.M)}
    bare_calls, _, bare_dispatches = counts["bare"]
    for row, (calls, dispatches) in ABOVE_BARE.items():
        assert counts[row][0] <= bare_calls + calls and counts[row][2] <= bare_dispatches + dispatches, table
    assert counts["FSDP2"][0] <= FSDP2_OF_TORCH * counts["fully_shard"][0], table


@pytest.mark.long
@pytest.mark.parametrize("name", LEAST)
def test_a_benchmark_runs(name: str, tmp_path: Path):
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    written = tmp_path / "history.jsonl"
    ended = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *LEAST[name], "--history", written],
        cwd=tmp_path,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    # 1 and nothing else to say: above a limit, which one round does not decide.
    assert ended.returncode in (0, 1), ended.stderr[-4000:]
    assert not re.search("Traceback|a rank failed", ended.stderr), ended.stderr[-4000:]
    assert ended.stdout
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert lines and {line["benchmark"] for line in lines} == {name}
    assert len({line["row"] for line in lines}) == len(lines), "two rows have one name"
