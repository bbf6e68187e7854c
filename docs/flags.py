"""Makes the page of flags, and the help of the command `shardstack`, from what the programs themselves read.

`make help` runs it, and it writes `core/commands/help.json`: for each command its flags, in groups, with names, type,
default and help.
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import cyclopts

from shardstack import commands
from shardstack.dist_checkpointing import inspect as inspect_checkpoint
from shardstack.distributed.fully_sharded_data_parallel_config import FSDP2
from shardstack.planner import __main__ as planner
from shardstack.training.config import build, section_types
from shardstack.training.config.arguments import collector
from shardstack.training.config.pretrain_config import type_text
from shardstack.training.launch import __main__ as launch
from shardstack.verify import __main__ as verify

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

_COMMANDS = json.loads((files("shardstack.commands") / "commands.json").read_text(encoding="utf-8"))


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    groups: dict[str, list[cyclopts.Argument]] = {}
    for argument in arguments(collector({})):
        groups.setdefault(argument.parameter.group[0].name, []).append(argument)
    for title, members in groups.items():
        parts.append(f"### {title}\n\n{_fields_of(title)}\n\n{_list(map(_entry, members))}")
    for module, what in TABLES.items():
        table = json.loads((files(module) / "flags.json").read_text(encoding="utf-8"))
        entries = (_table_entry(module, name, options) for name, options in table.items())
        parts.append(f"## {module}\n\n{what}\n\n{_list(entries)}")
    return "\n".join(parts)


def arguments(function: Callable[..., Any]) -> list[cyclopts.Argument]:
    """Returns the flags of a function, in the order of their groups in `--help`."""
    app = cyclopts.App(version_flags=[])
    app.default(function)
    order = {title: place for place, title in enumerate(build.TITLES.values())}
    found = list(app.assemble_argument_collection(parse_docstring=True))
    return sorted(found, key=lambda argument: order.get(argument.parameter.group[0].name, 0))


def help_pages() -> dict[str, Any]:
    """Returns the content of `help.json`: a page for each command, and one of the commands."""
    scripts = {name: _script(f"{name}.py") for name in ("pretrain_gpt", "prepare_data", "convert", "generate")}
    pretrain = scripts["pretrain_gpt"]
    launcher = _table_page(launch.main)
    ranks = launcher["groups"]["Flags"][0] | {"help": "ranks to start, by default one for each GPU, or one"}
    run = _function_page(collector(pretrain["DEFAULTS"]), pretrain["__doc__"])
    overview = _page("COMMAND --help lists the flags of a command.", map(_command, _COMMANDS, _COMMANDS.values()))
    return {
        "": overview | {"usage": "COMMAND [flags]"},
        "launch": launcher,
        "train": run | {"groups": {"Launcher": [ranks, *launcher["groups"]["Flags"][1:-1]], **run["groups"]}},
        "plan": _function_page(planner.Options, planner.DESCRIPTION),
        "verify": _table_page(verify.main),
        "inspect": _table_page(inspect_checkpoint.main),
        "convert": _function_page(scripts["convert"]["convert"]),
        "generate": _function_page(scripts["generate"]["generate"]),
        "prepare-data": _function_page(scripts["prepare_data"]["_command"]()),
    }


def _command(name: str, row: dict[str, str]) -> tuple[str, dict[str, Any]]:
    return row["group"], {"names": [name], "type": name, "default": "", "help": row["does"]}


def _script(name: str) -> dict[str, Any]:
    file = commands.program(name)
    sys.path.insert(0, str(file.parent))
    try:
        return runpy.run_path(str(file))
    finally:
        sys.path.remove(str(file.parent))


def _page(about: str, flags: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for title, flag in flags:
        groups.setdefault(title, []).append(flag)
    words = [flag["names"][0] for flag in groups.get("Arguments", [])]
    return {"about": " ".join(about.split()), "usage": " ".join(["[flags]", *words]), "groups": groups}


def _function_page(function: Callable[..., Any], about: str = "") -> dict[str, Any]:
    """Returns the page of a function whose parameters cyclopts reads from a command line."""
    about = (about or str(inspect.getdoc(function))).split("\n\n")[0]
    return _page(about, ((_group(argument), _flag(argument)) for argument in arguments(function)))


def _group(argument: cyclopts.Argument) -> str:
    title = argument.parameter.group[0].name
    return {"Parameters": "Flags"}.get(title, title) if argument.names[0].startswith("-") else "Arguments"


def _flag(argument: cyclopts.Argument) -> dict[str, Any]:
    negatives = set(argument.negatives)
    names = [name for name in argument.names if name not in negatives] + sorted(negatives)
    default = argument.field_info.default
    shown = "required" if default is inspect.Parameter.empty else f"default {_value(default)}"
    is_switch = argument.hint in (bool, bool | None)
    kind = "" if is_switch else type_text(argument.hint)
    return {"names": names, "type": kind, "default": shown, "help": argument.parameter.help or ""}


def _table_page(main: Callable[..., int]) -> dict[str, Any]:
    """Returns the page of a program whose `main` makes an `argparse.ArgumentParser`."""
    parser, parse = argparse.ArgumentParser(), argparse.ArgumentParser.parse_args

    def keep(self: argparse.ArgumentParser, *_: Any) -> argparse.Namespace:
        nonlocal parser
        parser = self
        raise SystemExit

    argparse.ArgumentParser.parse_args = keep  # type: ignore[assignment]
    try:
        main([], "")
    except SystemExit:
        pass
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    actions = [action for action in parser._actions if "--help" not in action.option_strings]
    return _page(parser.description or "", map(_action, actions))


def _action(action: argparse.Action) -> tuple[str, dict[str, Any]]:
    kind = " | ".join(action.choices or ()) or getattr(action.type, "__name__", "str")
    flag = {"names": [*action.option_strings], "type": "" if action.nargs == 0 else kind, "default": ""}
    if action.option_strings:
        return "Flags", flag | {"help": action.help}
    word = str(action.metavar or action.dest)
    return "Arguments", flag | {"names": [word], "type": word, "help": action.help}


def _fields_of(title: str) -> str:
    """Returns which dataclasses have the flags of a group as fields."""
    (section,) = (name for name, heading in build.TITLES.items() if heading == title)
    kinds = dict.fromkeys(section_types(strategy)[section].__name__ for strategy in ("no_shard", ZERO3, FSDP2))
    return f"Fields of {', '.join(f'`{kind}`' for kind in kinds)}."


def _entry(argument: cyclopts.Argument) -> str:
    flag = _flag(argument)
    names, default = flag["names"], flag["default"]
    shown = default if default == "required" else f"default {_code(default.removeprefix('default '))}"
    return _item(names[0], names, flag["type"] or "bool", shown, flag["help"])


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


def _value(default: Any) -> str:
    if isinstance(default, (tuple, list)):
        return " ".join(map(str, default)) or "none"
    return {"None": "none", "True": "on", "False": "off"}.get(str(default), str(default))


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _as_text(pages: dict[str, Any]) -> str:
    """Returns JSON with a line for each flag."""
    return re.sub(r"\n( {5,}| {4}(?=\}))", "", json.dumps(pages, indent=1)) + "\n"


if __name__ == "__main__":
    Path(commands.__file__).with_name("help.json").write_text(_as_text(help_pages()), encoding="utf-8")
