"""How tests are named, where they are and what they import, and how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import core

CORE = Path(core.__file__).parent
TESTS = Path(__file__).parents[1]
LONGEST_NAME = 60
TESTED_WITH_OTHERS = {"pipeline_parallel"}
"""By `test_megatron_names.py`."""
LARGE = 60
"""Lines of code above which a module has a test file at its own path."""
TESTED_IN = {
    "adapters/accelerate/prepared.py": "adapters/accelerate/test_accelerator.py",
    "adapters/lightning/shared.py": "adapters/lightning/test_trainer_strategy.py",
    "base/_torch_compat.py": "distributed/fsdp2/test_torch_private.py",
    "base/initialization.py": "tensor_parallel/test_initialization.py",
    "model_parallel_config.py": "transformer/test_transformer_config.py",
    "models/common/embeddings/language_model_embedding.py": "transformer/test_dropout.py",
    "models/gpt/architecture.py": "models/gpt/test_hugging_face.py",
    "models/gpt/hf_config.py": "models/gpt/test_hugging_face.py",
    "process_groups_config.py": "distributed/test_foreign_arguments.py",
    "training/config/build.py": "training/config/test_arguments.py",
    "transformer/attention.py": "models/gpt/test_gpt_model.py",
    "transformer/document_attention.py": "transformer/test_piecewise_attention.py",
    "verify/__main__.py": "../functional/test_verify.py",
    "weights/messages.py": "weights/test_link.py",
    "weights/names.py": "weights/test_stream.py",
    "weights/sender.py": "weights/test_receiver.py",
    **dict.fromkeys(
        ("pipeline_parallel/schedules.py", "pipeline_parallel/stages.py"), "../functional/test_pipelines.py"
    ),
    **{f"training/launch/{name}.py": "training/launch/test_nodes.py" for name in ("follower", "joining", "lines")},
    "training/launch/messages.py": "training/launch/test_main.py",
}
"""Modules that are tested with what uses them, and where."""
LIBRARY = ("comm", "dist_checkpointing", "distributed", "optimizer")
"""Rooms in which every module has a test of its own."""
TOOLS = ("planner",)
"""Folders whose modules are tested as one program."""
NOT_OF_CORE = {
    "examples": "tests the parts of `examples/gpt`",
    "distributed/outside_the_loop": "has the scenarios of `distributed/test_outside_the_loop.py`, and no tests",
}
"""Folders of `tests/unit` that mirror no folder of `core`, and what each is for."""
IMPORTS_A_LAYER = {
    "test_mutations.py": "checks the faults of `tests/mutation`",
    "distributed/test_outside_the_loop.py": "has lanes that are late, of `tests/streams`",
}


def test_names_of_tests_are_short():
    texts = (file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))
    names = {name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)}
    assert len(names) > 1000, "the tests were not found"
    assert {name for name in names if len(name) > LONGEST_NAME} == set()


def test_every_package_has_a_folder_or_a_file_of_tests():
    packages = {file.parent.relative_to(CORE) for file in CORE.rglob("__init__.py")} - {Path()}
    unit = TESTS / "unit"
    untested = {
        package.as_posix()
        for package in packages
        if not (unit / package).is_dir() and not (unit / package.parent / f"test_{package.name}.py").is_file()
    }
    assert len(packages) > 30, "the packages were not found"
    assert untested == TESTED_WITH_OTHERS


def test_every_folder_of_tests_is_a_folder_of_core():
    unit = TESTS / "unit"
    folders = {file.parent.relative_to(unit).as_posix() for file in unit.rglob("*.py")} - {"."}
    assert len(folders) > 20, "the folders were not found"
    assert {folder for folder in folders if not (CORE / folder / "__init__.py").is_file()} == NOT_OF_CORE.keys()


def _code_lines(file: Path) -> int:
    """Counts lines of a module that are no docstring, comment or empty line."""
    text = file.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
    entries = [entry for body in bodies if isinstance(body, list) for entry in body]
    texts = [e for e in entries if isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant)]
    in_texts = sum((e.end_lineno or 0) - e.lineno + 1 for e in texts if isinstance(e.value.value, str))  # type: ignore[attr-defined]
    return sum(bool(line) and not line.startswith("#") for line in lines) - in_texts


def test_a_large_module_has_its_test_at_its_path():
    modules = [file for file in CORE.rglob("*.py") if file.name != "__init__.py" and _code_lines(file) > LARGE]
    assert len(modules) > 100, "the modules were not found"
    without = set()
    for module in modules:
        path = module.relative_to(CORE)
        test = path.with_name(f"test_{module.stem.strip('_')}.py")
        if path.parts[0] not in TOOLS and not (TESTS / "unit" / test).is_file():
            without.add(path.as_posix())
    assert without == TESTED_IN.keys(), (
        f"a module of core/a/b.py has tests/unit/a/test_b.py: {without ^ TESTED_IN.keys()}"
    )
    assert not [name for name in TESTED_IN if name.startswith(LIBRARY)]
    assert [test for test in TESTED_IN.values() if not (TESTS / "unit" / test).is_file()] == []


def _imported(file: Path) -> Iterator[str]:
    """Yields the modules of `tests` that a file imports, with the names that it takes of them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests"))


def test_unit_tests_import_no_other_layer():
    above = ("functional", "compositions", "drill", "fuzz", "gpu_first", "mutation", "release", "streams")
    found = {
        (file.relative_to(TESTS / "unit").as_posix(), name)
        for file in (TESTS / "unit").rglob("*.py")
        for name in _imported(file)
    }
    assert len(found) > 500, "the imports were not found"
    found = {(file, name) for file, name in found if name.split(".")[1] in above}
    assert {file for file, _ in found} == IMPORTS_A_LAYER.keys(), found


def _first_paragraphs(file: Path) -> Iterator[str]:
    """Yields the first paragraph of each docstring in a file, of attributes too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for entry in body if isinstance(body, list) else ():
            if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant):
                yield str(entry.value.value).split("\n\n")[0]


def test_docstrings_begin_with_whole_sentences():
    paragraphs = [
        (file.relative_to(CORE).as_posix(), text) for file in CORE.rglob("*.py") for text in _first_paragraphs(file)
    ]
    assert len(paragraphs) > 1500, "the docstrings were not found"
    assert [(name, text) for name, text in paragraphs if ";" in text] == []
