"""The command `shardstack` without running a program: its help, its errors, and what it imports."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import core
from core import commands
from core.commands import main, program
from core.training.launch.__main__ import _parse
from tests.unit._program import REPOSITORY, program_environment

COMMANDS = json.loads(Path(commands.__file__).with_name("commands.json").read_text(encoding="utf-8"))
PAGES = json.loads(Path(commands.__file__).with_name("help.json").read_text(encoding="utf-8"))


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flags", REPOSITORY / "docs" / "flags.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flags(title: str, command: str = "train") -> set[str]:
    return {name for flag in PAGES[command]["groups"][title] for name in flag["names"]}


def test_help_has_the_flags_of_the_real_parsers():
    pages = _generator().help_pages()
    assert PAGES.keys() == {"", *COMMANDS}
    assert pages == PAGES, "run make help"
    assert _flags("Launcher") >= {"--nproc-per-node", "--max-restarts"}
    assert _flags("Run") >= {"--config", "--train-iters"}
    assert _flags("Flags", "convert") >= {"--load", "--no-verify-checkpoint"}


def test_help_is_printed_without_torch():
    line = (
        "import sys; from core.commands import main; "
        f"[main([*command, '--help']) for command in {[[], *([name] for name in COMMANDS)]}]; "
        "found = {'torch', 'numpy', 'cyclopts', 'matplotlib'} & sys.modules.keys(); sys.exit(str(found or ''))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", line],
        env=program_environment(COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stderr == "\n", ended
    for name in COMMANDS:
        assert f"usage: shardstack {name} " in ended.stdout
    assert (
        ended.stdout.index("\nTrain:") < ended.stdout.index("\nBefore a run:") < ended.stdout.index("\nCheckpoints:")
    )
    assert "\nOptimizer:\n" in ended.stdout and "[default 0.0015]" in ended.stdout  # the program's own learning rate


def test_help_has_the_width_of_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    lines = {}
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["generate", "--help"]) == 0
        lines[columns] = capsys.readouterr().out.splitlines()
        assert columns - 20 < max(map(len, lines[columns])) < columns
    assert len(lines[60]) > len(lines[100])


def test_only_the_first_rank_prints_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--help"]) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 'trian' is none of the commands ") and error.endswith("; did you mean train?\n")
    assert error.count("\n") == 1
    assert all(name in error for name in COMMANDS)
    assert main([]) == 0
    assert "\n  train " in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardstack {core.__version__}\n"


def test_a_missing_program_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert program("convert.py") == REPOSITORY / "examples" / "gpt" / "convert.py"
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "core" / "commands" / "__init__.py"))
    monkeypatch.setattr(commands, "_table", {"commands.json": COMMANDS}.get)
    assert main(["convert"]) == 2
    assert "install shardstack again" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["launch", "verify", "inspect"])
def test_an_error_of_a_command_line_is_one_line(name: str, capsys: pytest.CaptureFixture[str]):
    for words, said in (([], "error: the following arguments are required: "), (["x", "--no-such"], "error: ")):
        with pytest.raises(SystemExit) as end:
            main([name, *(words if name != "launch" else words[1:])])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and error.endswith("; see --help\n") and error.count("\n") == 1


def test_launcher_and_program_share_no_flag():
    launcher = _flags("Launcher")
    others = {name for title in PAGES["train"]["groups"] if title != "Launcher" for name in _flags(title)}
    assert len(launcher) > 10 and len(others) > 200
    assert not launcher & others


def test_train_takes_the_launchers_flags_by_whole_name():
    words = [
        "--lr",
        "-1",
        "--max",
        "3",
        "--nproc-per-node=2",
        "--node",
        "x",
        "--max-restarts",
        "1",
        "--freeze",
        "a",
        "b",
    ]
    options: argparse.Namespace = _parse(words, "shardstack train", "program.py")
    assert (options.nproc_per_node, options.max_restarts, options.script, options.m) == (2, 1, "program.py", False)
    assert options.arguments == ["--lr", "-1", "--max", "3", "--node", "x", "--freeze", "a", "b"]
