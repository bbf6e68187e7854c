"""Makes a site of the pages of this folder, which are plain Markdown for GitHub too; `make docs` calls it.

The order of pages is that of the links in README.md. A page for each public package is generated from its docstrings,
and a file of the repository that a page links to is put next to the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
PUBLIC = (
    "core.distributed",
    "core.optimizer",
    "core.optimizer.averaged_weights",
    "core.optimizer.run_state",
    "core.optimizer_param_scheduler",
    "core.weights",
    "core.models.gpt",
    "core.transformer",
    "core.transformer.moe",
    "core.tensor_parallel",
    "core.pipeline_parallel",
    "core.dist_checkpointing",
    "core.verify",
    "core.planner",
    "core.run_log",
    "core.diagnostics",
    "core.adapters.accelerate",
    "core.adapters.lightning",
    "core.adapters.megatron_lm",
    "core.adapters.torchtitan",
    "core.adapters.nemo",
    "core.adapters.oumi",
    "core.adapters.optimus",
    "core.adapters.ml",
    "core.base.errors",
)
"""Packages whose names users import."""

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)\)")
"""A link to a file of the repository, outside of this folder."""


def on_config(config: Any) -> Any:
    """Sets the order of pages: that of README.md, section by section, then decisions and packages."""
    sections: list[Any] = ["README.md"]
    listed = sections
    for line in (HERE / "README.md").read_text().splitlines():
        if line.startswith("## "):
            listed = []
            sections.append({line.removeprefix("## "): listed})
        listed += re.findall(r"\]\(([a-z-]+\.md)\)", line)
    decisions = [f"decisions/{path.name}" for path in sorted((HERE / "decisions").glob("*.md"))]
    config.nav = [*sections, {"Decisions": decisions}, {"Packages": [{name: _page_of(name)} for name in PUBLIC]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each public package, and the files that pages link to."""
    for name in PUBLIC:
        files.append(File.generated(config, _page_of(name), content=f"# {name}\n\n::: {name}\n"))
    for page in HERE.glob("*.md"):
        for path in _OUTSIDE.findall(page.read_text()):
            files.append(File.generated(config, path, abs_src_path=str(HERE.parent / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into links to their copies."""
    return _OUTSIDE.sub(r"](\1)", markdown)


def _page_of(package: str) -> str:
    return f"packages/{package}.md"
