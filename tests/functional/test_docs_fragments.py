"""The parts of programs that pages show, run with what they take for granted; and the commands, which exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from tests.unit._program import REPOSITORY, programs_in, run_program
from tests.unit._spawn import on_ranks
from tests.unit.adapters.accelerate._trainers import fresh_accelerate, pad, samples, tiny, trainer_of

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
RUN_ELSEWHERE = {
    "README": "test_readme.py",
    "coming-from-megatron-lm": "test_megatron_script.py",
    "torchtitan": "test_torchtitan.py",
}


Context = dict[str, Any]
"""Names that a fragment takes for granted."""


@contextmanager
def _zero3() -> Iterator[Context]:
    settings = FullyShardedDataParallelConfig()
    model = wrap_model(nn.Linear(4, 4), SimpleNamespace(), settings, process_group=dist.group.WORLD)
    yield {"torch": torch, "model": model}


@contextmanager
def _reproducible() -> Iterator[Context]:
    gpt = nn.Linear(4, 1)
    yield {
        "torch": torch,
        "nullcontext": nullcontext,
        "wrap_model": _wrap,
        "steps": 2,
        "count": 2,
        "DistributedDataParallelConfig": DistributedDataParallelConfig,
        "finalize_model_grads": finalize_model_grads,
        "gpt": gpt,
        "config": SimpleNamespace(gradient_accumulation_fusion=False),
        "optimizer": SimpleNamespace(step=lambda: None),
        "hash_of": lambda step, index: 10 * step + index,
        "samples": lambda step, index: torch.full((2, 4), float(step + index)),
        "loss_of": lambda model, samples: model(samples).mean(),
    }


def _wrap(*args: Any) -> nn.Module:
    return wrap_model(*args, process_group=dist.group.WORLD)


@contextmanager
def _accelerate() -> Iterator[Context]:
    from accelerate import Accelerator

    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    model = tiny("llama", tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    before = Path.cwd()
    os.chdir(names[0])
    try:
        with fresh_accelerate():
            yield {
                "Accelerator": partial(Accelerator, cpu=True),
                "ShardstackPlugin": ShardstackPlugin,
                "use_shardstack": use_shardstack,
                "trainer": trainer_of(tiny("llama", tied=True), names[0], None),
                "model": model,
                "optimizer": optimizer,
                "loader": DataLoader(samples(6), batch_size=1, collate_fn=pad),
                "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            }
    finally:
        os.chdir(before)
        dist.barrier()
        shutil.rmtree(names[0], ignore_errors=True)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Context]]] = {
    "fully-sharded": _zero3,
    "reproducible": _reproducible,
    "trainer-and-accelerate": _accelerate,
}


def _fragments() -> list[tuple[str, str]]:
    found = [(page.stem, program) for page in PAGES for program in programs_in(page)]
    return [(page, program) for page, program in found if not _imports(program) and page not in RUN_ELSEWHERE]


def _imports(program: str) -> bool:
    return any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(program).body)


@pytest.mark.parametrize(("page", "program"), _fragments(), ids=lambda value: value if value in CONTEXTS else "")
@on_ranks(2)
def test_a_fragment_runs_with_what_it_takes_for_granted(page: str, program: str) -> None:
    with CONTEXTS[page]() as context:
        exec(program, context)


def _commands() -> list[str]:
    """Finds the lines of indented blocks that call Python, a launcher or make, with the lines that continue them."""
    starts = r"(?:\.venv/bin/)?(?:python|torchrun|srun|make)"
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    return [line for text in texts for line in re.findall(rf"^    ({starts} .*)$", text, re.MULTILINE)]


def test_commands_name_files_modules_and_targets_that_exist() -> None:
    commands = _commands()
    assert len(commands) > 30
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        for path in re.findall(r"(?:examples|benchmarks|tests)/[\w./]+\.py", command):
            assert (REPOSITORY / path).is_file(), command
        for module in re.findall(r"-m (core\.[\w.]+)", command):
            path = REPOSITORY / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), command
        if command.startswith("make "):
            assert command.split()[1] in targets, command


def test_every_flag_of_an_example_that_a_command_shows_exists(tmp_path: Path) -> None:
    pytest.importorskip("cyclopts", reason="flags need the extra 'train'")
    for script in ("pretrain_gpt", "convert"):
        shown_help = run_program(script, "--help", folder=tmp_path, COLUMNS="240").out  # no flag is broken
        known = set(re.findall(r"--[a-z0-9_-]+", shown_help))
        assert "--load" in known
        shown = [command for command in _commands() if f"examples/gpt/{script}.py" in command]
        assert shown, script
        for command in shown:
            given = set(re.findall(r"--[a-z0-9_-]+", command.partition(f"{script}.py")[2]))
            assert given <= known, f"{given - known} in {command}"
