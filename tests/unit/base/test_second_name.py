"""Two names of one package: `shardstack`, and `core` wherever that is no package of another project."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import core
import core.base.errors
import core.dist_checkpointing.global_view
import shardstack
import shardstack.base.errors
from core.base import text as by_second_name
from tests.unit._program import REPOSITORY

MINE = "enums = 'mine'\n"


def python(folder: Path, *arguments: str, path: str = str(REPOSITORY)) -> tuple[int, str]:
    """Runs Python in a folder. Returns its status, and all that it printed."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_both_names_have_the_same_modules_and_classes() -> None:
    assert core is shardstack and core.base.errors is shardstack.base.errors
    assert by_second_name is sys.modules["shardstack.base.text"]
    own = {name: module for name, module in sys.modules.items() if name.startswith("shardstack.")}
    assert [name for name, module in own.items() if (module.__name__, module.__spec__.name) != (name, name)] == []
    kind = core.base.errors.ConfigError
    assert kind.__module__ == "shardstack.base.errors" and type(pickle.loads(pickle.dumps(kind("no")))) is kind
    assert pickle.loads(b"ccore.base.errors\nConfigError\n.") is kind


def test_a_function_with_the_name_of_its_module_stays() -> None:
    assert callable(shardstack.dist_checkpointing.global_view)
    assert callable(sys.modules["core.dist_checkpointing.global_view"].global_view)


@pytest.mark.parametrize("first", ["core", "shardstack"])
def test_either_name_may_be_imported_first(first: str, tmp_path: Path) -> None:
    second = {"core": "shardstack", "shardstack": "core"}[first]
    code = (
        f"import sys, {first}.base.files, {second}.base.files\n"
        f"assert {first} is {second} and {first}.base.files.__name__ == 'shardstack.base.files'\n"
        "files = [getattr(module, '__file__', None) for module in {*sys.modules.values()}]\n"
        "assert sum(str(file).endswith('core/base/files.py') for file in files) == 1 and 'torch' not in sys.modules\n"
    )
    assert python(tmp_path, "-c", code) == (0, "")


@pytest.mark.parametrize("name", ["core", "shardstack"])
def test_the_package_may_be_reloaded(name: str, tmp_path: Path) -> None:
    code = (
        f"import importlib, {name} as first\n"
        "assert importlib.reload(importlib.reload(first)) is first and first.__file__.endswith('core/__init__.py')\n"
        "import core.base.files, shardstack.base.files\n"
        "assert core is shardstack is first and core.base.files is shardstack.base.files\n"
    )
    assert python(tmp_path, "-c", code) == (0, "")


def test_a_module_runs_by_either_name(tmp_path: Path) -> None:
    for name in ("core", "shardstack"):  # a module that imports no torch
        module = f"{name}.training.launch.tracebacks"
        assert python(tmp_path, "-m", module, "-c", "import sys; print(sys.argv)") == (0, "['-c']\n")
    status, said = python(tmp_path, "-m", "core.training.launch", "--help")  # of a package
    assert (
        status == 0 and said.startswith("usage: python -m shardstack.training.launch ") and "--nproc-per-node" in said
    )
    status, said = python(tmp_path, "-m", "core.nonsense")
    assert status == 1 and said.endswith("No module named core.nonsense\n")


def test_a_thread_waits_for_the_import_of_another(tmp_path: Path) -> None:
    (tmp_path / "shardstack").symlink_to(REPOSITORY / "core")  # as it is installed
    (tmp_path / "core.py").write_bytes((REPOSITORY / "alias/core.py").read_bytes())
    code = (
        "import sys, threading, time\n"
        "begun = threading.Event()\n"
        "class Slow:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'shardstack.base.second_name': begun.set() or time.sleep(0.5)\n"
        "sys.meta_path.insert(0, Slow)\n"
        "other = threading.Thread(target=__import__, args=['core'])\n"
        "other.start(), begun.wait()\n"
        "import core.enums, shardstack.enums\n"
        "other.join()\n"
        "assert core is shardstack and core.enums is shardstack.enums\n"
    )
    assert python(tmp_path, "-c", code, path=str(tmp_path)) == (0, "")


def test_a_module_that_fails_is_imported_anew(tmp_path: Path) -> None:
    code = (
        "import sys, core.base.files\n"
        "sys.modules['torch'] = None\n"
        "for _ in range(2):\n"
        "    try: import core.base.device\n"
        "    except ImportError as error: assert 'torch' in str(error)\n"
        "    else: raise SystemExit('imported')\n"
        "assert not {'core.base.device', 'shardstack.base.device'} & sys.modules.keys()\n"
        "del sys.modules['torch']\n"
        "import core.base.device, shardstack.base.device\n"
        "assert core.base.device is shardstack.base.device\n"
    )
    assert python(tmp_path, "-c", code) == (0, "")


def test_another_projects_core_is_left_alone_and_named(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core/__init__.py").write_text(MINE)
    (tmp_path / "core/text.py").write_text(MINE)
    code = "import core.text, shardstack.base.files\nassert core.enums == core.text.enums == 'mine'\n"
    assert python(tmp_path, "-c", code) == (0, "")
    status, said = python(tmp_path, "-c", f"{code}import core.distributed.groups\n")
    *_, last = said.splitlines()
    assert status == 1 and last == (
        f"ModuleNotFoundError: there is no core.distributed: core is another project's package here, "
        f"{tmp_path}/core/__init__.py; import shardstack.distributed"
    )
    status, said = python(tmp_path, "-c", f"{code}import core.theirs\n")
    assert status == 1 and said.endswith("ModuleNotFoundError: No module named 'core.theirs'\n")
    status, said = python(tmp_path, "-m", "shardstack.training.launch", "--nproc-per-node", "2", "-m", "core.text")
    assert (status, said) == (0, "")  # a program's modules are its own


def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "core").mkdir(parents=True)
    for name in ("shardstack.py", "core/__init__.py"):
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    (copy / "core/base").symlink_to(REPOSITORY / "core/base")
    code = f"import shardstack, sys; sys.path.insert(0, {str(copy)!r}); import core"
    status, said = python(tmp_path, "-c", code)
    *_, last = said.splitlines()
    assert status == 1 and last == (
        f"ImportError: there are two copies of shardstack: {REPOSITORY / 'core'}, which was imported, and "
        f"{copy / 'core'}, which the name core finds; leave one of them on the path"
    )
