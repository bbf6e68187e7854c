"""What ranks of a user's program print when it fails under the launcher, and what they write."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.base.errors import ConfigError, check_positive
from core.training.launch import tracebacks
from core.training.launch.__main__ import main

IMPORTS = "import os, sys, time\nfrom core.base.errors import check_positive\nrank = int(os.environ['RANK'])\n"
SECOND = (
    "from pathlib import Path\nkept = Path(os.environ['SHARDSTACK_TRACEBACKS'])\n"
    "while rank and not (kept.exists() and kept.stat().st_size):\n    time.sleep(0.05)\n"
)
"""Lets the second rank fail after the first one."""
MISTAKE = f"{IMPORTS}\ndef mine():\n    check_positive({{'size': 0}})\n\n"


@pytest.fixture
def launch(tmp_path: Path, capfd, monkeypatch):
    """Runs a program on two ranks, with files of tracebacks in a folder. Returns status, stderr, and those texts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()

    def run(text: str, *arguments: str, ranks: int = 2) -> tuple[int, str, list[str]]:
        (tmp_path / "program.py").write_text(text)
        status = main(["--nproc-per-node", str(ranks), *(arguments or [str(tmp_path / "program.py")])])
        kept = sorted((tmp_path / "kept").glob("shardstack-*.txt"))
        return status, capfd.readouterr().err, [path.read_text() for path in kept]

    return run


def test_one_rank_prints_its_traceback_without_core(launch):
    status, err, kept = launch(f"{MISTAKE}{SECOND}mine()\n")
    assert status == 1 and len(kept) == 1
    first, other = err.rstrip().split("\nrank 1 of 2: ")
    assert other == "the same error"
    lines = first.splitlines()
    assert lines[:2] == ["rank 0 of 2:", "Traceback (most recent call last):"]
    source = [line.strip() for line in lines if "File" not in line and line.strip("~^ ")]  # since 3.13 with marks
    assert source[2:4] == ["mine()", "check_positive({'size': 0})"]
    assert re.fullmatch(r"  \.\.\. 1 frame in shardstack: see \S+\.txt", lines[-2])
    assert lines[-1] == "shardstack.base.errors.ConfigError: size is 0; it takes a positive number"
    assert "core/base/errors.py" not in err and "tracebacks.py" not in err and "runpy" not in err
    assert kept[0].count("core/base/errors.py") == 2 and kept[0].count("rank 1 of 2:\nTraceback") == 1


def test_another_error_of_a_later_rank_is_one_line(launch):
    status, err, kept = launch(f"{MISTAKE}{SECOND}mine() if rank == 0 else [][3]\n")
    assert status == 1 and err.count("Traceback") == 1
    assert re.search(
        r"\nrank 1 of 2: IndexError: list index out of range \(after another rank's; see \S+\.txt\)\n", err
    )
    assert "IndexError: list index out of range" in kept[0]


def test_frames_of_a_user_and_causes_stay(launch):
    caught = (
        "try:\n    mine()\nexcept ValueError as error:\n    raise RuntimeError('my settings are wrong') from error\n"
    )
    _, err, _ = launch(f"{MISTAKE}{caught}", ranks=1)
    assert "ConfigError: size is 0; it takes a positive number" in err and "direct cause" in err
    assert err.rstrip().endswith("RuntimeError: my settings are wrong") and "in mine" in err
    assert "core/base/errors.py" not in err
    _, err, _ = launch("import json\njson.loads('{')\n", ranks=1)
    assert "json/decoder.py" in err and "..." not in err  # nothing of core is in it


def test_every_frame_is_printed_on_request(launch, monkeypatch):
    monkeypatch.setenv(tracebacks.FULL, "1")
    _, err, _ = launch(f"{MISTAKE}mine()\n", ranks=1)
    assert "core/base/errors.py" in err and " in core" not in err


def test_a_program_is_what_python_would_run(launch, tmp_path: Path):
    (tmp_path / "beside.py").write_text("value = 3\n")
    text = (
        (
            "import os, pickle, sys\nimport beside\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Mine:\n    a: int\n"
            "assert __name__ == '__main__' and sys.modules['__main__'].Mine is Mine and __file__ == sys.argv[0]\n"
            "assert pickle.loads(pickle.dumps(Mine(3))) == Mine(beside.value)\n"
            "assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)) and sys.argv[1:] == ['--x', '1']\n"
            "import multiprocessing\n"
            "if __name__ == '__main__':\n"
            "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
            "        assert pool.map(Mine, [5]) == [Mine(5)]\n"
        )
        .replace("assert sys.path", "if __name__ == '__main__': assert sys.path")
        .replace("assert __name__ == '__main__' and", "if __name__ == '__main__': assert")
    )
    assert launch(text, str(tmp_path / "program.py"), "--x", "1", ranks=1) == (0, "", [])


@pytest.mark.parametrize("kind", ["folder", "zip", "module"])
def test_a_program_is_a_folder_zip_or_module_too(launch, tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "beside.py").write_text("value = 3\n")
    find = "from .beside" if kind == "module" else "from beside"
    (tmp_path / "thing" / "__main__.py").write_text(
        f"import pickle, sys\n{find} import value\nclass Mine:\n    pass\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--x'] and value == 3\n"
        "assert type(pickle.loads(pickle.dumps(Mine()))) is Mine\n"
    )
    shutil.make_archive("thing", "zip", "thing")
    program = {"folder": ["thing"], "zip": ["thing.zip"], "module": ["-m", "thing"]}[kind]
    assert launch("", *program, "--x") == (0, "", [])


def test_an_error_of_ours_is_not_cut(launch):
    text = f"{MISTAKE}from core.base.errors import OutOfStepError\n{SECOND}"
    _, err, _ = launch(f"{text}if rank:\n    raise OutOfStepError('x' * 400 + ' end')\nraise ValueError(1)\n")
    assert "x end (after another rank's" in err
    _, err, _ = launch(f"{text}raise ValueError(f'{{rank}} ' + 'x' * 400 + ' end')\n")
    assert "x (after another rank's" in err


def test_a_program_that_is_missing_or_no_python_is_said(launch, tmp_path: Path):
    status, err, _ = launch("", str(tmp_path / "none.py"))
    assert (
        status == 2
        and err.count("none.py cannot be run: No such file or directory; give a script, or -m and a module\n") == 1
    )
    status, err, _ = launch("x = = 1\n", ranks=1)
    assert status == 1 and 'program.py", line 1' in err and "tracebacks.py" not in err


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["-m", "none"], "none cannot be run: No module named none; give a script, or -m and a module"),
        (["-m", "os.none"], "os.none cannot be run: Error while finding module specification for 'os.none'"),
        (["-m", "folder"], "folder cannot be run: No module named folder.__main__; 'folder' is a package"),
        (["folder"], "folder cannot be run: can't find '__main__' module in 'folder'; give a script"),
    ],
)
def test_what_python_cannot_start_is_one_line(launch, tmp_path: Path, monkeypatch, program: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    status, err, _ = launch("", *program)
    assert status == 2 and err.startswith(f"error: {said}") and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["folder", "module"])
def test_an_import_that_a_program_lacks_is_its_crash(launch, tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "__main__.py").write_text("import none\n")
    status, err, _ = launch("", *(["-m", "thing"] if kind == "module" else ["thing"]), ranks=1)
    assert status == 1 and '__main__.py", line 1' in err and err.endswith("No module named 'none'\n")


def test_a_module_runs_as_by_python(tmp_path: Path):
    (tmp_path / "thing.py").write_text("import sys\nprint(__name__, sys.argv[1:])\nraise KeyError('gone')\n")
    command = [sys.executable, tracebacks.__file__, "-m", "thing", "a"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (1, "__main__ ['a']\n")
    assert ended.stderr.endswith("KeyError: 'gone'\n") and "runpy" not in ended.stderr


def test_what_cannot_be_written_is_not_shortened(monkeypatch, tmp_path: Path):
    monkeypatch.setenv(tracebacks.FILE, str(tmp_path / "no" / "file"))
    try:
        check_positive({"size": 0})
    except ConfigError as error:
        text, before = tracebacks.shorten(error)
    assert "errors.py" in text and before == ""
