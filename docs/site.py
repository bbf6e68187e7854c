"""Makes a site of the pages of this folder, which are plain Markdown for GitHub too; `make docs` calls it.

The first page is the repository's README.md. Sections, groups and titles are those of README.md here. Pages of flags
and of packages are generated, so that they cannot go stale. A file of the repository that a page links to is put next
to the pages.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import flags
import history
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

import shardstack

REPOSITORY = Path(__file__).parent.parent
_by_name = tempfile.TemporaryDirectory()  # of this process, has the folder `core` by the name `shardstack`
OVERVIEW = "docs/README.md"
PLACES = {"README.md": "index.md", OVERVIEW: "all-pages.md"}
"""Where pages of the repository are on the site, if elsewhere than at their path, without `docs/`."""

PUBLIC = {
    "Wrappers": (
        "shardstack.distributed",
        "shardstack.parallel_state",
        "shardstack.verify",
        "shardstack.planner",
        "shardstack.diagnostics",
    ),
    "Optimizers": (
        "shardstack.optimizer",
        "shardstack.optimizer.averaged_weights",
        "shardstack.optimizer.layer_norms",
        "shardstack.optimizer_param_scheduler",
    ),
    "Checkpoints and weights": ("shardstack.dist_checkpointing", "shardstack.weights"),
    "Models": (
        "shardstack.models.gpt",
        "shardstack.transformer",
        "shardstack.transformer.moe",
        "shardstack.transformer.moe.router_replay",
        "shardstack.tensor_parallel",
        "shardstack.fp8",
        "shardstack.pipeline_parallel",
    ),
    "Training": (
        "shardstack.run_log",
        "shardstack.training",
        "shardstack.training.config",
        "shardstack.training.state",
        "shardstack.training.train_step",
        "shardstack.training.loop",
        "shardstack.training.checkpointing",
        "shardstack.training.recovery",
        "shardstack.training.launch",
        "shardstack.training.launch.entry",
        "shardstack.training.launch.generations",
        "shardstack.rendezvous.default_group",
        "shardstack.base.device",
        "shardstack.base.errors",
    ),
    "Data": (
        "shardstack.datasets",
        "shardstack.datasets.indexed_dataset",
        "shardstack.datasets.gpt_dataset",
        "shardstack.datasets.data_samplers",
    ),
    "Adapters": (
        "shardstack.adapters.accelerate",
        "shardstack.adapters.lightning",
        "shardstack.adapters.megatron_lm",
        "shardstack.adapters.torchtitan",
        "shardstack.adapters.verl",
        "shardstack.adapters.nemo",
        "shardstack.adapters.oumi",
        "shardstack.adapters.optimus",
        "shardstack.adapters.ml",
    ),
}
"""Packages and modules whose names users import, in groups. Each has a page."""

ALSO_SHOWN = {"shardstack.distributed": ("shardstack.distributed.data_parallel_base._BaseDataParallel",)}
"""What a package's page shows besides its public names: what `wrap_model` returns has Megatron-LM's name."""

_LINK = re.compile(r"\]\((?!\w+:)([^)#]+)(#[^)]*)?\)")
"""A link to a file of the repository, and its anchor."""


_BY_PATH = re.compile(r"\]\[([^]]+)\]")
"""A link of the repository's README.md: its address is at the end, under its path in the repository."""


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: Any) -> Any:
    """Sets what the navigation has, and the version in the title."""
    config.nav = navigation((REPOSITORY / OVERVIEW).read_text(encoding="utf-8"))
    config.site_name += f" {shardstack.__version__}"
    # The reference reads sources and imports nothing: it has to find the folder by the package's name.
    Path(_by_name.name, "shardstack").symlink_to(REPOSITORY / "core")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_by_name.name]
    return config


def navigation(overview: str) -> list[Any]:
    """Returns the navigation: sections and groups of the overview by its headings, with its links' texts as titles."""
    sections: dict[str, list[Any]] = {}
    entries: list[Any] = []
    for line in overview.splitlines():
        if line.startswith("## "):
            entries = sections[line.removeprefix("## ")] = []
            group = entries
        elif line.startswith("### "):
            group = []
            entries.append({line.removeprefix("### "): group})
        for title, path in re.findall(r"\[([^]]+)\]\(([^)#:]+\.md)\)", line):
            group.append({title: place_of(posixpath.normpath(f"docs/{path}"))})
    first, *_ = sections
    sections[first] = [PLACES["README.md"], *sections[first], {"All pages": PLACES[OVERVIEW]}]
    decisions = sorted(path.name for path in (REPOSITORY / "docs/decisions").glob("[0-9]*.md"))
    sections["Testing"].append({"Decisions": ["decisions/README.md", *(f"decisions/{name}" for name in decisions)]})
    sections["Reference"].insert(0, {"Flags": "flags.md"})
    sections["Reference"] += [{group: [{name: _page_of(name)} for name in names]} for group, names in PUBLIC.items()]
    return [{title: pages} for title, pages in sections.items()]


def place_of(path: str) -> str:
    """Returns where a file of the repository is on the site."""
    return PLACES.get(path, path.removeprefix("docs/"))


def on_files(files: Files, config: Any) -> Files:
    """Adds generated pages, and the files that pages link to."""
    for name in (name for names in PUBLIC.values() for name in names):
        shown = "\n".join(f"::: {subject}\n" for subject in (name, *ALSO_SHOWN.get(name, ())))
        files.append(File.generated(config, _page_of(name), content=f"# {name}\n\n{shown}"))
    files.append(File.generated(config, "flags.md", content=flags.page()))
    for name, measured in _measured().items():
        files.append(File.generated(config, f"history/{name}.svg", content=history.picture(measured)))
    waiting, seen = ["README.md", OVERVIEW, *(f"docs/{file.src_uri}" for file in files.documentation_pages())], set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (REPOSITORY / path).is_file():
            continue
        seen.add(path)
        if files.get_file_from_path(place_of(path)) is None:
            files.append(File.generated(config, place_of(path), abs_src_path=str(REPOSITORY / path)))
        if path.endswith(".md"):
            text = _with_paths(path, (REPOSITORY / path).read_text(encoding="utf-8"))
            waiting += [_target(path, link) for link, _ in _LINK.findall(text)]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between their places on the site, and adds pictures."""
    if history.MARKER in markdown:
        pictures = "\n".join(history.section(name, measured) for name, measured in _measured().items())
        markdown = markdown.replace(history.MARKER, pictures)
    source = {place: path for path, place in PLACES.items()}.get(page.file.src_uri)
    if source is None:
        source = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"
    folder = posixpath.dirname(page.file.src_uri) or "."

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        if not (REPOSITORY / target).exists():  # of a generated page, or no link but code
            return link[0]
        place = place_of(target)
        return f"]({posixpath.relpath(place, folder)}{link[2] or ''})"

    return _LINK.sub(moved, _with_paths(source, markdown))


def _with_paths(page: str, markdown: str) -> str:
    """Returns a page with its links as paths; those of the first page are addresses, for the package index."""
    return _BY_PATH.sub(r"](\1)", markdown) if page == "README.md" else markdown


def _measured() -> dict[str, list[dict[str, Any]]]:
    return history.by_benchmark(history.HISTORY.read_text(encoding="utf-8").splitlines())


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _page_of(package: str) -> str:
    return f"packages/{package}.md"
