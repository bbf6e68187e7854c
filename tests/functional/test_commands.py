"""The command `shardstack` as its users call it: in a folder of theirs, each command on something real.

Where nothing but the command itself is looked at it runs in a process that is forked, which has imported torch.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.training.config.arguments import parse_arguments
from tests.unit._program import LIMIT_S, REPOSITORY, Ended, load_program, one_line, program_environment, run_program

PAGE = REPOSITORY / "docs" / "command-line.md"
SETTINGS = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 48}
data: {data_path: data/corpus, seq_length: 32, micro_batch_size: 2}
run: {train_iters: 2, eval_iters: 1, log_interval: 1}
"""
MODULE = """
import torch


def build():
    model = torch.nn.Linear(4, 4)

    def loss(model, index):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        return (model(x) - x.flip(1)).square().mean()

    return model, loss
"""


def _shardstack(folder: Path, *words: object, before: tuple[str, ...] = ()) -> str:
    """Returns what a command prints in a new process, errors too."""
    command = [sys.executable, *before, "-m", "shardstack", *map(str, words)]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=program_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _forked(folder: Path, *words: object, ranks: int = 0, status: int = 0, device: str = "cpu") -> Ended:
    """Runs a command in a forked process, or in several as the ranks of a launcher."""
    ended = run_program(folder / "command.py", *words, folder=folder, ranks=ranks, SHARDSTACK_DEVICE=device)
    assert ended.status == status, ended
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with another `core`, and a corpus and a run of two ranks, made by the commands."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "core").mkdir()
    (folder / "core" / "__init__.py").write_text("raise RuntimeError('another project')")
    (folder / "run.yaml").write_text(SETTINGS)
    (folder / "my_module.py").write_text(MODULE)
    (folder / "command.py").write_text("import sys\nfrom shardstack.commands import main\nsys.exit(main())\n")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"def number_{number}():\n    return {number}\n" * 60)
    _forked(folder, "prepare-data", *(f"{n}.txt" for n in range(8)), "--output-prefix", "data/corpus")
    words = ("--nproc-per-node", "2", "--config", "run.yaml", "--save", "runs/a", "--split", "6,2,0")
    out = _shardstack(folder, "train", *words)
    assert "step 2/2" in out and "the model wrote" in out and "2 ranks" in out
    assert "-m shardstack generate --load runs/a" in out
    return folder


def _check_repeated(folder: Path, out: str) -> None:
    assert "step 2/2" in out and "2 ranks" in out
    again, first = (json.loads((folder / "runs" / name / "config.json").read_text()) for name in ("b", "a"))
    assert again["checkpoint"].pop("save") == "runs/b" and first["checkpoint"].pop("save") == "runs/a"
    assert again["ddp"].pop("use_distributed_optimizer") and not first["ddp"].pop("use_distributed_optimizer")
    assert again["optimizer"].pop("use_distributed_optimizer")
    assert first["optimizer"].pop("use_distributed_optimizer") is None
    assert again == first
    shutil.rmtree(folder / "runs" / "b")


REPEATED = ("train", "--config", "runs/a/config.json", "--use-distributed-optimizer", "--save", "runs/b")


def test_a_run_is_repeated_from_its_own_settings(folder: Path):
    """By two processes that a launcher started: each is a rank of the program."""
    ended = _forked(folder, *REPEATED, ranks=2)
    _check_repeated(folder, ended.out + ended.err)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["shardstack.training.launch", "torch.distributed.run"])
def test_launchers_start_the_command(folder: Path, launcher: str):
    _check_repeated(folder, _shardstack(folder, *REPEATED, before=("-m", launcher, "--nproc-per-node", "2")))


def test_mistakes_are_one_line_with_status_2(folder: Path):
    (folder / "wrong.yaml").write_text("model: {num_layers: two}\nlrr: 1\n")
    assert one_line(_forked(folder, "train", "--config", "wrong.yaml", ranks=2, status=2)) == (
        "error: --config wrong.yaml: model.num_layers is 'two'; it takes int; "
        "--config wrong.yaml: lrr is unknown; did you mean lr?"
    )
    ended = _forked(folder, "train", "--max-restarts", "1", ranks=2, status=2)
    assert "Unknown option: --max-restarts" in one_line(ended)
    ended = _forked(folder, "train", "--nproc-per-node", "x", status=2)
    assert one_line(ended) == "error: argument --nproc-per-node: invalid int value: 'x'; see --help"
    ended = _forked(folder, "verify", "my_module:build", "--nproc", "2", "--step-count=3", ranks=2, status=2)
    assert one_line(ended) == "error: unrecognized arguments: --step-count=3; did you mean --steps?"
    ended = _forked(folder, "verify", "my_module:build", status=2, device="tpu")
    assert "SHARDSTACK_DEVICE is 'tpu'" in one_line(ended)
    assert "missing: --num-layers" in one_line(_forked(folder, "plan", status=2))
    assert "error: " in one_line(_forked(folder, "inspect", "no", status=2))


def test_a_run_is_planned_from_its_own_settings(folder: Path):
    words = ("--config", "runs/a/config.json", "--world-size", "2", "--vocab-size", "257")
    out = _forked(folder, "plan", *words).out
    assert "on 2 h100" in out and all(name in out for name in ("replicated", "ZeRO-1", "ZeRO-3", "FSDP2"))
    assert "refused" not in out


def test_a_model_is_verified_on_ranks_of_its_own(folder: Path):
    out = _shardstack(folder, "verify", "my_module:build", "--steps", "2", "--wrappers", "ddp", "zero1")
    assert "my_module:build on 2 ranks" in out and "\nequal\n" in out


def test_a_program_of_the_user_is_launched(folder: Path):
    (folder / "mine.py").write_text(
        "import os, sys\nos.write(1, f'{os.environ[\"RANK\"]} {sys.argv[1:]}\\n'.encode())\n"
    )
    out = _shardstack(folder, "launch", "--nproc-per-node", "2", "mine.py", "--help")
    assert sorted(out.splitlines()) == ["0 ['--help']", "1 ['--help']"]


def test_a_checkpoint_is_inspected_converted_and_used(folder: Path):
    assert "iter_0000002" in _forked(folder, "inspect", "runs/a").out
    out = _forked(folder, "convert", "--load", "runs/a", "--save", "model").out
    assert "runs/a/iter_0000002 is model now" in out
    words = _forked(folder, "convert", "--load", "model", "--save", "runs/d").out.splitlines()[-1].split()
    assert words[:2] == ["shardstack", "train"]
    more = ("--config", "run.yaml", "--split", "6,2,0", "--train-iters", "1", "--save", "runs/e")
    ended = _forked(folder, *words[1:], *more, ranks=1)
    assert "model has no hashes" in ended.out and "step 1/1" in ended.err
    out = _forked(folder, "generate", "--load", "runs/a", "--prompt", "def ", "--num-tokens", "4").out
    assert out.startswith("def ") and len(out) > len("def \n")


def test_the_settings_on_the_page_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    config = parse_arguments(["--config", "run.yaml"], load_program("pretrain_gpt").DEFAULTS)
    assert config.use_torch_fsdp2 and config.model.bf16 and config.model.ffn_hidden_size == 4096
    assert (config.optimizer.lr, config.data.data_path) == (3e-4, Path("data/mine"))
    assert {*_commands_on_the_page()} == {*json.loads((REPOSITORY / "core/commands/commands.json").read_text())}


def _commands_on_the_page() -> list[str]:
    return re.findall(r"^\| `shardstack ([a-z-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
