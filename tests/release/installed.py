"""Uses an installed wheel where another project's `core` is in the working folder: imports, commands, a training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.release.distributions import REPOSITORY, ReleaseError, run

TRAINING = Path(__file__).with_name("_training.py")
WRAPPERS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
MISSING = {"accelerate": "hf", "lightning": "lightning", "megatron_lm": "megatron", "torchtitan": "titan"}
"""Adapters, and the extra that each names where it is not installed."""


def check_installed(python: Path, folder: Path, *, has_extras: bool) -> str:
    """Checks the package that a Python has, in an empty folder.

    Args:
        python: of an environment with the wheel, and nothing of the checkout.
        folder: an empty one.
        has_extras: whether the environment has the extra `train`; without it there must be no extra at all.

    Returns:
        The lines that the training prints.

    Raises:
        ReleaseError: what is wrong.
    """
    stranger = folder / "core"
    stranger.mkdir()
    (stranger / "__init__.py").write_text('OWNER = "another project"\n')
    (stranger / "distributed.py").write_text("")
    shutil.copy(TRAINING, folder / "train.py")
    ran = _run_there(folder, [str(python), "-m", "shardstack.training.launch", "--nproc-per-node", "2", "train.py"])
    lines = [line for line in ran.splitlines() if line.startswith(WRAPPERS)]
    if [line.split(":")[0] for line in lines] != list(WRAPPERS) or len({line.split(": ")[1] for line in lines}) != 1:
        raise ReleaseError(f"the wrappers do not agree:\n{ran}")
    program = _installed_folder(python, folder) / "examples" / "gpt" / "pretrain_gpt.py"
    if has_extras:
        shown = _run_there(folder, [str(python), str(program), "--help"])
        if "--num-layers" not in shown:
            raise ReleaseError(f"pretrain_gpt.py --help does not show its flags:\n{shown}")
    else:
        _check_message([str(python), str(program), "--help"], "shardstack[train]", folder)
        for adapter, extra in MISSING.items():
            _check_message(
                [str(python), "-c", f"import shardstack.adapters.{adapter}"], f"shardstack[{extra}]", folder
            )
    command = python.with_name("shardstack")
    if command.exists() and "launch" not in _run_there(folder, [str(command), "--help"]):
        raise ReleaseError("`shardstack --help` does not name its commands")
    return "\n".join(lines)


def _installed_folder(python: Path, folder: Path) -> Path:
    found = _run_there(folder, [str(python), "-c", "import shardstack; print(shardstack.__file__)"]).strip()
    if REPOSITORY in Path(found).parents and python.parent.parent not in Path(found).parents:
        raise ReleaseError(f"{found} is of the checkout, not of the wheel")
    return Path(found).parent


def _check_message(command: list[str], text: str, folder: Path) -> None:
    """Raises unless a command fails with a text in what it says."""
    try:
        _run_there(folder, command)
    except ReleaseError as error:
        if text not in str(error):
            raise ReleaseError(f"the error does not name {text}: {error}") from None
        return
    raise ReleaseError(f"{' '.join(command)} should fail without an extra")


def _run_there(folder: Path, command: list[str]) -> str:
    """Runs a program in the folder, where nothing of the checkout is importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(command, folder=folder, environment={**kept, "SHARDSTACK_DEVICE": "cpu", "OMP_NUM_THREADS": "1"})
