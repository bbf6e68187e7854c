"""The parts of programs that pages show, run with what they take for granted; and the commands, which exist."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.adapters.bridge.checkpoints import whole_state_dict
from tests.functional.test_docs import FRAGMENT
from tests.unit._program import REPOSITORY, programs_in, run_program
from tests.unit._spawn import on_ranks
from tests.unit.adapters.accelerate._trainers import fresh_accelerate, tiny, trainer_of

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
RUN_ELSEWHERE = {"coming-from-megatron-lm": "test_megatron_script.py", "own-script": "test_own_script_page.py"}


Context = dict[str, Any]
"""Names that a fragment takes for granted."""


@contextmanager
def _accelerate() -> Iterator[Context]:
    from core.adapters.accelerate import ShardstackPlugin, use_shardstack

    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    try:
        with fresh_accelerate():
            trainer = trainer_of(tiny("llama", tied=True), names[0], None)
            yield {"ShardstackPlugin": ShardstackPlugin, "use_shardstack": use_shardstack, "trainer": trainer}
    finally:
        dist.barrier()
        shutil.rmtree(names[0], ignore_errors=True)


@contextmanager
def _prime_rl() -> Iterator[Context]:
    """Stubs of prime-rl's classes and functions. What its wire and its folder hold in the end is the model."""
    from core.distributed import FullyShardedDataParallelConfig, wrap_model

    model = wrap_model(tiny("llama", tied=False), None, FullyShardedDataParallelConfig())
    world, sent = SimpleNamespace(is_master=dist.get_rank() == 0), list[Any]()
    sender = type("NCCLWeightBroadcastSender", (), {"world": world, "dtype": torch.float32, "communicator": sent})
    context: Context = {
        "NCCLWeightBroadcastSender": sender, "WeightBroadcast": SimpleNamespace, "get_world": lambda: world,
        "broadcast_integer": lambda number, wire: wire.append(number),
        "broadcast_state_dict": lambda tensors, wire: wire.append({name: t.clone() for name, t in tensors.items()}),
        "get_broadcast_dir": lambda folder: folder / "broadcasts",
        "get_step_path": lambda folder, step: folder / f"step_{step}",
    }  # fmt: skip
    yield context
    context["Sender"]().broadcast_weights(model, 1)
    weights = whole_state_dict(model)
    if world.is_master:
        assert sent.pop(0) == len(sent)
        got = {name: tensor for tensors in sent for name, tensor in tensors.items()}
        assert got.keys() == weights.keys() and all(torch.equal(got[name], t) for name, t in weights.items())
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    context["Files"](output_dir=Path(names[0])).broadcast_weights(model, 3)
    files = {path.name for path in Path(names[0], "broadcasts", "step_3").iterdir()} if world.is_master else set()
    dist.barrier()
    shutil.rmtree(names[0], ignore_errors=True)
    assert not world.is_master or files >= {"STABLE", "config.json", "model.safetensors"}, files


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Context]]] = {
    "trainer-and-accelerate": _accelerate,
    "post-training": _prime_rl,
}


def _fragments() -> list[tuple[str, str]]:
    found = [(page.stem, program) for page in PAGES for program in programs_in(page)]
    return [(page, block) for page, block in found if block.startswith(FRAGMENT) and page not in RUN_ELSEWHERE]


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the extra hf")
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
        for module in re.findall(r"-m (?:core|shardstack)\.([\w.]+)", command):
            path = REPOSITORY / "core" / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), command
        if command.startswith("make "):
            assert command.split()[1] in targets, command


def test_yaml_that_pages_show_names_programs_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    blocks = [block for page in PAGES for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    assert len(blocks) >= 2
    for block in blocks:
        assert isinstance(yaml.safe_load(block), (dict, list))
        for path in re.findall(r"\w[\w.]*/[\w./]+\.(?:py|sh|yaml)\b", block):
            assert (REPOSITORY / path).is_file(), path


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
