"""Uses an installed wheel where another project's `core` is in the working folder: imports, commands, a training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.release.distributions import ReleaseError, run

TRAINING = Path(__file__).with_name("_training.py")
WRAPPERS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--micro-batch-size", "2", "--train-iters", "3", "--eval-iters", "1", "--lr", "1e-3"),
)
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
    command = str(python.with_name("shardstack"))
    ran = _run_there(folder, [command, "launch", "--nproc-per-node", "2", "train.py"])
    lines = [line for line in ran.splitlines() if line.startswith(WRAPPERS)]
    if [line.split(":")[0] for line in lines] != list(WRAPPERS) or len({line.split(": ")[1] for line in lines}) != 1:
        raise ReleaseError(f"the wrappers do not agree:\n{ran}")
    for name in (None, *_commands(python, folder)):
        words = [name, "--help"] if name else ["--help"]
        if f"shardstack {name or 'COMMAND'}" not in (shown := _run_there(folder, [command, *words])):
            raise ReleaseError(f"`shardstack {' '.join(words)}` prints no usage:\n{shown}")
    another = "core is another project's package here"
    _check_message([str(python), "-c", "import shardstack, core.optimizer"], another, folder)
    if has_extras:
        _pretrain(command, folder)
    else:
        _check_message([command, "train", *TINY], "shardstack[train]", folder)
        for adapter, extra in MISSING.items():
            statement = f"import shardstack.adapters.{adapter}"
            _check_message([str(python), "-c", statement], f"shardstack[{extra}]", folder)
    return "\n".join(lines)


def _commands(python: Path, folder: Path) -> list[str]:
    """Returns the commands of the package, which has to be the one that is installed."""
    code = "import shardstack; print(shardstack.__file__)"
    found = Path(_run_there(folder, [str(python), "-c", code]).strip()).parent
    if found.parent.name != "site-packages":
        raise ReleaseError(f"{found} is of the checkout, not of the wheel")
    return list(json.loads((found / "commands" / "commands.json").read_text(encoding="utf-8")))


def _pretrain(command: str, folder: Path) -> None:
    """Trains a few steps of a tiny GPT on two ranks from a text, and looks at its checkpoint."""
    (folder / "text.txt").write_text("\n".join(f"the square of {i} is {i * i}" for i in range(2000)))
    _run_there(
        folder,
        [
            command,
            "prepare-data",
            "--input",
            "text.txt",
            "--output-prefix",
            "squares",
            "--split-on",
            "line",
            "--tokenizer",
            "byte",
        ],
    )
    training = [command, "train", "--nproc-per-node", "2", "--data-path", "squares", "--save", "run", *TINY]
    _run_there(folder, [*training, "--save-interval", "3", "--use-torch-fsdp2"])
    if "iter_0000003" not in (shown := _run_there(folder, [command, "inspect", "run"])):
        raise ReleaseError(f"`shardstack inspect run` does not show the checkpoint of step 3:\n{shown}")


def _check_message(command: list[str], text: str, folder: Path) -> None:
    """Raises unless a command fails with a text in what it says."""
    try:
        _run_there(folder, command)
    except ReleaseError as error:
        if text not in str(error):
            raise ReleaseError(f"the error does not name {text}: {error}") from None
        return
    raise ReleaseError(f"{' '.join(command)} should fail, and say: {text}")


def _run_there(folder: Path, command: list[str]) -> str:
    """Runs a program in the folder, where nothing of the checkout is importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(command, folder=folder, environment={**kept, "SHARDSTACK_DEVICE": "cpu", "OMP_NUM_THREADS": "1"})
