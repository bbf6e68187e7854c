"""Makes the page of flags from what the programs themselves read: dataclasses of settings, and tables of flags."""

from __future__ import annotations

import html
import inspect
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, get_args, get_origin

import cyclopts

from shardstack.distributed.fully_sharded_data_parallel_config import FSDP2
from shardstack.training.config import build, section_types
from shardstack.training.config.arguments import collector

ZERO3 = "optim_grads_params"

HEAD = """# Flags

Every flag of the programs, with its type and default, from the settings that the programs read. A setting of Python
has the name of its flag with underscores, unless the flag says another one here.

## pretrain_gpt.py

    python -m shardstack.training.launch --nproc-per-node 2 examples/gpt/pretrain_gpt.py --help

`python -m shardstack.planner` takes the same flags. Defaults are those of the settings; the example has its own for a
model that two CPU cores train in minutes, which its `--help` shows.
"""

TABLES = {
    "shardstack.training.launch": "Starts the ranks of a program: [Runs that survive failures](runs.md).",
    "shardstack.verify": "Compares wrappers with one process: [Verify](verify.md).",
}
"""Programs whose flags are a JSON table."""


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    groups: dict[str, list[cyclopts.Argument]] = {}
    for argument in arguments():
        groups.setdefault(argument.parameter.group[0].name, []).append(argument)
    for title, members in groups.items():
        parts.append(f"### {title}\n\n{_fields_of(title)}\n\n{_list(map(_entry, members))}")
    for program, what in TABLES.items():
        table = json.loads((files(program) / "flags.json").read_text(encoding="utf-8"))
        entries = (_table_entry(program, name, options) for name, options in table.items())
        parts.append(f"## {program}\n\n{what}\n\n{_list(entries)}")
    return "\n".join(parts)


def arguments() -> list[cyclopts.Argument]:
    """Returns the flags of `pretrain_gpt.py`, in the order of their groups in `--help`."""
    app = cyclopts.App()
    app.default(collector({}))
    found = list(app.assemble_argument_collection())
    return sorted(found, key=lambda argument: argument.parameter.group[0].sort_key)


def _fields_of(title: str) -> str:
    """Returns which dataclasses have the flags of a group as fields."""
    (section,) = (name for name, heading in build.TITLES.items() if heading == title)
    kinds = dict.fromkeys(section_types(strategy)[section].__name__ for strategy in ("no_shard", ZERO3, FSDP2))
    return f"Fields of {', '.join(f'`{kind}`' for kind in kinds)}."


def _entry(argument: cyclopts.Argument) -> str:
    negatives = set(argument.negatives)
    names = [name for name in argument.names if name not in negatives] + sorted(negatives)
    default = argument.field_info.default
    shown = "required" if default is inspect.Parameter.empty else f"default {_code(_value(default))}"
    return _item(names[0], names, _type(argument.hint), shown, argument.parameter.help or "")


def _table_entry(program: str, name: str, options: dict[str, Any]) -> str:
    flag = f"--{name.replace('_', '-')}"
    kind = " | ".join(options["choices"]) if "choices" in options else options.get("type", "str")
    default = f"default {_code(_value(options['default']))}" if "default" in options else ""
    return _item(f"{program}-{flag.strip('-')}", [flag], kind, default, options["help"])


def _item(anchor: str, names: list[str], kind: str, default: str, text: str) -> str:
    shown = " · ".join(filter(None, [", ".join(map(_code, names)), _code(kind), default]))
    link = f'<a class="headerlink" href="#{anchor.strip("-")}" title="Permanent link">&para;</a>'
    term = f'<dt id="{anchor.strip("-")}">{shown} {link}</dt>'
    return f'{term}\n<dd markdown="span">{text[:1].upper()}{text[1:]}</dd>'


def _list(entries: Iterator[str]) -> str:
    return '<dl class="flags" markdown="1">\n' + "\n".join(entries) + "\n</dl>\n"


def _type(hint: Any) -> str:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if str(get_origin(hint)) == "typing.Literal":
        return " | ".join(map(str, get_args(hint)))
    if kinds and type(None) in get_args(hint):
        return " | ".join(map(_type, kinds))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _value(default: Any) -> str:
    if isinstance(default, (tuple, list)):
        return " ".join(map(str, default)) or "none"
    return {"None": "none", "True": "on", "False": "off"}.get(str(default), str(default))


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"
