"""Names, arguments and fields of Megatron-LM that this project does not have.

`megatron_names.json` lists them. A name of a module raises an error with a remedy. A function or class that shares its
name with Megatron-LM takes the same arguments in the same order: one that would change what is computed is refused by
its name, unless it has its default, and one that changes no number, only how fast or where something runs, is ignored
with one warning. In the tables a key may be several names, separated by spaces:

* ``absent``: by module, remedies by name.
* ``arguments``: by function, see :func:`checks_arguments`: ``refused`` with what to do instead, and ``ignored`` with
  the reason why that changes no number.
* ``fields``: by config class, see :func:`takes_megatron_fields`.
* ``flags``: hints by flag, without its dashes.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, TypeVar

from .errors import ConfigError, ParallelConfigError, warn_once
from .text import choices

_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("megatron_names.json").read_text("utf-8"))
FOREIGN_FLAGS: dict[str, str] = _TABLES["flags"]


def absent_names(
    module: str, *, import_paths: Mapping[str, str] = MappingProxyType({}), functions_import: bool = False
) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which raises an ImportError with a remedy, or else Python's usual error.

    In a package a name may also be a module's: importing it by its path raises the same.

    Args:
        module: the module's ``__name__``, as in the table of absent names.
        import_paths: modules by the name that is imported from them when it is first used.
        functions_import: functions, whose names have no capitals, can be imported and raise when they are called, so
            that a file is not lost because of one name that it seldom calls.
    """
    remedies = _by_name(_TABLES["absent"][module])

    def getattribute(name: str) -> Any:
        if name in import_paths:
            return getattr(import_module(import_paths[name]), name)
        if name not in remedies:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module} has no {name}: {remedies[name]}"
        if functions_import and name.islower():
            return functools.partial(_raise_at_call, message)
        # Not an AttributeError: `from module import name` would replace that by its own message.
        raise ImportError(message, name=module)

    getattribute.remedies = remedies  # type: ignore[attr-defined]  # for the page that lists them
    return getattribute


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: text for names, text in table.items() for name in names.split()}


def _raise_at_call(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(message)


def absent_method(name: str, remedy: str) -> Callable[..., NoReturn]:
    """Returns a method that Megatron-LM's class of this name has: an AttributeError with a remedy, when it is
    called."""

    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} has no {name}: {remedy}", name=name, obj=self)

    method.__name__ = name
    method.__doc__ = f"Megatron-LM's, absent here: {remedy}."
    return method


class _AbsentModules(MetaPathFinder):
    """The last import finder: raises the remedy of `absent_names` for modules of this project that do not exist."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] != __package__.partition(".")[0]:
            return
        remedy = getattr(getattr(sys.modules.get(package), "__getattr__", None), "remedies", {}).get(name)
        if remedy is not None:
            raise ModuleNotFoundError(f"{package} has no {name}: {remedy}", name=package)


sys.meta_path.append(_AbsentModules())


def refuse(caller: str, error: type[ConfigError] = ParallelConfigError, /, **arguments: tuple[Any, Any, str]) -> None:
    """Raises for the first argument that does not have its only supported value.

    Args:
        caller: the function that was called.
        error: the class to raise.
        arguments: by Megatron-LM's name: the given value, the only supported value, and what to do instead.

    Raises:
        ConfigError: of the class `error`.
    """
    for name, (value, supported, remedy) in arguments.items():
        if value is not supported and value != supported:
            raise error(f"{caller}: {name} is {value!r}, and only {supported!r} is supported; {remedy}")


def ignore(caller: str, reason: str, /, **arguments: tuple[Any, Any]) -> None:
    """Warns once about arguments that were given and are not used. Names them.

    Args:
        caller: the function that was called.
        reason: why ignoring them changes no number.
        arguments: by Megatron-LM's name: the given value, and the default.
    """
    names = sorted(name for name, (value, default) in arguments.items() if value is not default and value != default)
    if names:
        warn_once(f"{caller} ignores {', '.join(names)}: {reason}", stacklevel=4)


Function = TypeVar("Function", bound=Callable[..., Any])


def checks_arguments(function: Function) -> Function:
    """Lets a function take the arguments of Megatron-LM's that the tables list for it, and refuses or ignores them.

    The function declares what it reads. `inspect.signature` shows the others too. The tables have:

    * ``defaults``: what the function does not declare. What is neither refused nor ignored below needs no warning.
    * ``order``: all arguments that may be given by position, where the function does not declare them all.
    * ``refused`` and ``ignored``: values that are not the default.

    Raises:
        ParallelConfigError: by the function, for a refused argument.
    """
    caller = function.__qualname__.removesuffix(".__init__")
    table = _TABLES["arguments"][caller]
    remedies, reasons = _by_name(table.get("refused", {})), table.get("ignored", {})
    own = inspect.signature(function).parameters
    signature = _with_arguments(own, table.get("defaults", {}), table.get("order", "").split())
    defaults = {name: entry.default for name, entry in signature.parameters.items()}

    @functools.wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{caller}: {error}") from None
        refuse(caller, **{n: (arguments[n], defaults[n], remedy) for n, remedy in remedies.items() if n in arguments})
        for names, reason in reasons.items():
            ignore(caller, reason, **{n: (arguments[n], defaults[n]) for n in names.split() if n in arguments})
        return function(**{name: value for name, value in arguments.items() if name in own})

    check_and_call.__signature__ = signature  # type: ignore[attr-defined]
    return check_and_call  # type: ignore[return-value]


def _with_arguments(
    own: Mapping[str, inspect.Parameter], defaults: Mapping[str, Any], order: Sequence[str]
) -> inspect.Signature:
    """Returns a signature with further arguments: by position where `order` names them, else by name."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    both = {**own, **{name: inspect.Parameter(name, by_name, default=value) for name, value in defaults.items()}}
    by_position = [both.pop(name).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in order]
    return inspect.Signature([*by_position, *sorted(both.values(), key=lambda parameter: parameter.kind)])


Config = TypeVar("Config")


def takes_megatron_fields(kind: type[Config]) -> type[Config]:
    """Lets the constructor of a dataclass take Megatron-LM's fields, of its own name in the tables and of its bases'.

    Fields that are not given read as their defaults, such as ``config.fp8``. The tables have:

    * ``refused``: the only supported value, which is Megatron-LM's default, and what to do instead.
    * ``ignored``: the default. Another value is stored as an attribute with a warning, and changes no number.
    * ``accepted``: the default of a field that needs no warning: it is always in effect, or a training loop stores it
      here.
    * ``inert_prefixes``: prefixes of fields that only configure features of refused fields.
    * ``positional``: our fields that may be given by position, the first ones in Megatron-LM's order.

    Raises:
        ConfigError: by the constructor, for a refused field, a number that is None, or too many fields by position,
            whose order changes between Megatron-LM's versions.
    """
    own = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    numbers = {name for name, entry in own.items() if entry.type in ("int", "float") and entry.default is not None}
    remedies: dict[str, tuple[Any, str]] = {}
    inert: dict[str, Any] = {}
    harmless: dict[str, Any] = {}
    prefixes: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    for base in reversed(kind.__mro__):
        table = _TABLES["fields"].get(base.__name__, {})
        remedies |= {name: (_value(value), remedy) for name, (value, remedy) in table.get("refused", {}).items()}
        inert |= {name: _value(value) for name, value in table.get("ignored", {}).items()}
        harmless |= table.get("accepted", {})
        prefixes += tuple(table.get("inert_prefixes", ()))
        positional = tuple(table.get("positional", positional))
    defaults = {name: value for name, (value, _) in remedies.items()} | inert | harmless
    defaults = {name: value for name, value in defaults.items() if name not in own}
    construct = kind.__init__

    @functools.wraps(construct)
    def __init__(self: Config, *args: Any, **values: Any) -> None:
        if len(args) > len(positional):
            raise ConfigError(
                f"{kind.__name__} takes {len(positional)} field(s) by position, and {len(args)} were given; "
                "give fields by name, as their order changes between Megatron-LM's versions"
            )
        values = dict(zip(positional, args, strict=False)) | values
        for name in numbers & {name for name, value in values.items() if value is None}:
            raise ConfigError(f"{kind.__name__}: {name} is None; give a number, or leave it out")
        absent = [name for name in values if name in defaults or (name.startswith(prefixes) and name not in own)]
        foreign = {name: values.pop(name) for name in absent}
        refuse(kind.__name__, ConfigError, **{n: (v, *remedies[n]) for n, v in foreign.items() if n in remedies})
        unread = {n: (v, inert.get(n)) for n, v in foreign.items() if n not in remedies and n not in harmless}
        ignore(kind.__name__, "nothing here reads them, and no number changes", **unread)
        construct(self, **values)
        vars(self).update(foreign)

    for name, default in defaults.items():
        if not hasattr(kind, name):
            setattr(kind, name, default)
    kind.__init__ = __init__  # type: ignore[assignment]
    return kind


def _value(entry: Any) -> Any:
    """Returns a default of the tables, where a dtype is its name: ``torch.float32``."""
    module, _, name = entry.partition(".") if isinstance(entry, str) else ("", "", "")
    return getattr(import_module("torch"), name) if module == "torch" else entry


def changed_fields(settings: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults, and attributes set on it besides, by name."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(settings)
    }
    attributes = getattr(settings, "__dict__", {}).items()
    added = {name: value for name, value in attributes if name not in defaults and name[0] != "_"}
    return {name: value for name, default in defaults.items() if (value := getattr(settings, name)) != default} | added


def config_with(kind: type[Config], changed: Mapping[str, Any], given: str) -> Config:
    """Returns a config of this library with what another library's config changes.

    Args:
        given: the other config's class, for the message.

    Raises:
        ParallelConfigError: a setting that `kind` does not have.
    """
    try:
        return kind(**changed)
    except TypeError as error:
        name = next((name for name in changed if f"argument '{name}'" in str(error)), None)
        if name is None:  # a value of the wrong type
            raise
        known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        raise ParallelConfigError(
            f"{given} has {name}={changed[name]!r}, a setting that is not known here; leave it at its default; "
            f"{choices(name, known)}"
        ) from None
