"""Finds the attributes of torch's private objects that source code reads or writes, from the source.

Such objects have no type there: they come as `Any`, from a few functions and parameters, which `Origins` lists, and
from other objects' attributes, which a `Catalog` of real ones knows. A list of objects of one kind is ``"[kind]"``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import Work
from torch.distributed.fsdp import FSDPModule

PACKAGE = "torch.distributed.fsdp._fully_shard"
NAME_FUNCTIONS = ("getattr", "hasattr", "setattr")


@dataclass
class Catalog:
    """What torch's private objects have."""

    names: dict[str, set[str]] = field(default_factory=dict)
    """Of all attributes, by the kind of object, which is the name of its class."""
    kinds: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of the private objects that an attribute refers to, by its owner's kind and its name."""

    def __contains__(self, name: str) -> bool:
        return any(name in names for names in self.names.values())

    def add_classes(self) -> None:
        """Adds what torch's private classes declare, also of attributes that are None for most of a step."""
        modules = [importlib.import_module(f"{PACKAGE}.{found.name}") for found in pkgutil.iter_modules(_path())]
        classes = {
            name: of_name
            for module in modules
            for name, of_name in inspect.getmembers(module, inspect.isclass)
            if of_name.__module__ == module.__name__
        }
        self.names["FSDPModule"] = set(vars(FSDPModule))
        for kind, of_kind in classes.items():
            self.names.setdefault(kind, set()).update(dir(of_kind))
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(of_kind)))):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute | ast.Name):
                    name = node.target.attr if isinstance(node.target, ast.Attribute) else node.target.id
                    said = ast.unparse(node.annotation)
                    for referred in classes.keys() & set(re.findall(r"\w+", said)):
                        self.kinds[kind, name] = f"[{referred}]" if re.search(r"\b[Ll]ist\[", said) else referred

    def add_objects(self, root: nn.Module) -> None:
        """Adds the private objects of a model that `fully_shard` was applied to, and what they refer to now."""
        waiting: list[Any] = [m._get_fsdp_state() for m in root.modules() if hasattr(m, "_get_fsdp_state")]  # type: ignore[operator]
        done: set[int] = set()
        while waiting:
            owner = waiting.pop()
            if id(owner) in done:
                continue
            done.add(id(owner))
            self.names.setdefault(_kind(owner), set()).update(dir(owner))
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                found = [item for item in (value if isinstance(value, list) else [value]) if _is_private(item)]
                waiting += found
                if found:
                    kind = _kind(found[0])
                    self.kinds[_kind(owner), name] = f"[{kind}]" if isinstance(value, list) else kind


def _path() -> Iterable[str]:
    return importlib.import_module(PACKAGE).__path__


def _kind(value: Any) -> str:
    return type(value).__name__


def _is_private(value: Any) -> bool:
    return type(value).__module__.startswith(PACKAGE) and not isinstance(value, type)


PUBLIC = {name for kind in (torch.Tensor, nn.Module, Work, list, dict, set, str, type) for name in dir(kind)}
"""Names that say nothing about whose attribute they are."""


@dataclass(frozen=True)
class Origins:
    """Where private objects come from that have the type `Any`, in the code that is looked at."""

    parameters: dict[str, str]
    """Kinds by the names of parameters of functions, the same in all files."""
    functions: dict[str, str]
    """Kinds of what functions return, by their names; empty where nothing private is read from it."""


@dataclass(frozen=True)
class Use:
    """An attribute of a private object in the source."""

    kind: str
    name: str
    where: str


class Uses(ast.NodeVisitor):
    """Walks over files in turn; afterwards `found` has the uses, and `unknown` what it could not tell the kind of."""

    def __init__(self, catalog: Catalog, origins: Origins) -> None:
        self._catalog, self._origins = catalog, origins
        self.found: set[Use] = set()
        self.unknown: set[str] = set()
        self._kinds: dict[str, str] = {}  # of the variables of the function that is walked over
        self._of_self: dict[str, str] = {}  # of attributes of own objects, by their names in the file
        self._texts: dict[str, list[str]] = {}  # of variables that are text, or tuples of it
        self._imported: set[str] = set()  # torch's private classes, by their names in the file
        self._file = ""

    def read(self, file: str, source: str) -> None:
        """Walks over a file, from top to bottom; twice, because a method may come before what sets its attributes."""
        self._file, self._of_self, self._kinds, self._texts, self._imported = file, {}, {}, {}, set()
        before, tree = (set(self.found), set(self.unknown)), ast.parse(source)
        self.visit(tree)
        self.found, self.unknown = before
        self.visit(tree)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").startswith(PACKAGE):
            self._imported.update(alias.name for alias in node.names if alias.name in self._catalog.names)

    def visit_FunctionDef(self, function: ast.FunctionDef) -> None:
        outer, self._kinds = self._kinds, dict(self._kinds)
        for argument in (*function.args.args, *function.args.kwonlyargs):
            self._kinds.pop(argument.arg, None)
            if argument.annotation is not None and ast.unparse(argument.annotation) == "Any":
                if argument.arg not in self._origins.parameters:
                    self.unknown.add(f"{self._file}: the parameter {argument.arg} of {function.name}")
                self._kinds[argument.arg] = self._origins.parameters.get(argument.arg, "")
        returned = "" if function.returns is None else ast.unparse(function.returns)
        if re.search(r"\bAny\b", returned) and function.name not in self._origins.functions:
            self.unknown.add(f"{self._file}: what {function.name} returns")
        for statement in function.body:
            self.visit(statement)
        self._kinds = outer

    # ---- variables

    def visit_For(self, node: ast.For) -> None:
        self._iterate(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._iterate(generator.target, generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(value)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def _iterate(self, target: ast.expr, iterated: ast.expr) -> None:
        self.visit(iterated)
        if isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call) and _called(iterated) == "zip":
            for one, each in zip(target.elts, iterated.args, strict=False):  # a keyword argument of it is none
                self._bind(one, _item(self._kind_of(each)))
        else:
            self._bind(target, _item(self._kind_of(iterated)))
            if isinstance(target, ast.Name) and isinstance(iterated, ast.Name) and iterated.id in self._texts:
                self._texts[target.id] = self._texts[iterated.id]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self._kind_of(node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                kinds = [self._kind_of(value) for value in node.value.elts]
                for one, kind in zip(target.elts, kinds, strict=True):
                    self._bind(one, kind)
            else:
                self._bind(target, self._kind_of(node.value))
                if isinstance(target, ast.Name) and (texts := _texts_of(node.value)):
                    self._texts[target.id] = texts

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._bind(node.target, self._kind_of(node.value))

    def _bind(self, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            self._kinds[target.id] = kind
        elif kind and isinstance(target, ast.Attribute) and _is_self(target.value):
            self._of_self[target.attr] = kind

    # ---- expressions

    def _kind_of(self, node: ast.expr) -> str:
        """Returns the kind of an expression's value; empty where it is no private object."""
        if isinstance(node, ast.Name):
            return self._kinds.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self._kind_of(node.value)
            return self._catalog.kinds.get((owner, node.attr), "") if owner else self._of_self.get(node.attr, "")
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self._kind_of(node.value)
        if isinstance(node, ast.Subscript):
            return _item(self._kind_of(node.value))
        if isinstance(node, ast.IfExp):
            return self._kind_of(node.body) or self._kind_of(node.orelse)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return _list(self._kind_of(node.elt))
        if isinstance(node, ast.List | ast.Tuple):
            return next((_list(kind) for item in node.elts if (kind := self._kind_of(item))), "")
        return self._kind_of_call(node) if isinstance(node, ast.Call) else ""

    def _kind_of_call(self, call: ast.Call) -> str:
        name = _called(call)
        if name == "cast":
            return self._kind_of(call.args[1])
        if name == "getattr" and isinstance(call.args[1], ast.Constant):
            return self._catalog.kinds.get((self._kind_of(call.args[0]), str(call.args[1].value)), "")
        return name if name in self._imported else self._origins.functions.get(name, "")

    # ---- uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        self._note(node.value, node.attr, node.lineno)

    def visit_Call(self, call: ast.Call) -> None:
        self.generic_visit(call)
        if _called(call) not in NAME_FUNCTIONS:
            return
        owner, name = call.args[:2]
        texts = self._texts.get(name.id, []) if isinstance(name, ast.Name) else _texts_of(name)
        for text in texts:
            self._note(owner, text, call.lineno)
        if self._kind_of(owner) and not texts:
            self.unknown.add(f"{self._file}:{call.lineno}: which name is it in {ast.unparse(call)}?")

    def _note(self, owner: ast.expr, name: str, line: int) -> None:
        where = f"{self._file}:{line}"
        kind = owner.id if isinstance(owner, ast.Name) and owner.id in self._imported else self._kind_of(owner)
        if kind:
            if not kind.startswith("["):
                self.found.add(Use(kind, name, where))
        elif name in self._catalog.names["FSDPModule"]:
            self.found.add(Use("FSDPModule", name, where))
        elif not (_is_self(owner) or name in PUBLIC or name in self._of_self or name not in self._catalog):
            self.unknown.add(f"{where}: whose {name} is it in {ast.unparse(owner)}.{name}?")


def _texts_of(node: ast.expr) -> list[str]:
    """Returns the text that an expression is, or the texts of a tuple."""
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    texts = [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return texts if len(texts) == len(nodes) else []


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _item(kind: str) -> str:
    return kind[1:-1] if kind.startswith("[") else ""


def _list(kind: str) -> str:
    return f"[{kind}]" if kind else ""
