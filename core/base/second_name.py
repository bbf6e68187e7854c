"""Makes ``core`` a second name of this package's modules: ``core.distributed is shardstack.distributed``.

Megatron-LM's scripts change ``megatron.core`` to ``core``. The package itself is always imported as ``shardstack``: so
are its classes named, pickled and compared. Another project's package may be called ``core`` too; it stays what it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_NAME = __name__.partition(".")[0]
_SECOND = "core"


def share_modules() -> None:
    """Makes the import of a module below ``core`` return that of this package, wherever ``core`` is this package."""
    if not any(isinstance(finder, _SharedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SharedModules())  # before Python's, which would load a file a second time
        sys.meta_path.append(_AnotherProject())


def _own_name(name: str, *, core_is_ours: bool) -> str | None:
    """Returns the package's own name of a module below ``core``, if ``core`` is as asked."""
    is_below = name.startswith(f"{_SECOND}.")
    if not is_below or (sys.modules.get(_SECOND) is sys.modules.get(_NAME)) != core_is_ours:
        return None
    return _NAME + name.removeprefix(_SECOND)


class _SharedModules(MetaPathFinder, InspectLoader):
    """The first import finder, which is also the loader of what it finds."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        own_name = _own_name(name, core_is_ours=True)
        found = own_name and find_spec(own_name)
        if not found:  # a package that is reloaded stays what it is: in a checkout Python would find `shardstack.py`
            return target.__spec__ if target and name == _NAME else None
        spec = ModuleSpec(name, self, origin=found.origin, is_package=found.submodule_search_locations is not None)
        # Of the module itself, which keeps it; while another thread imports it, it may have that of the second name.
        spec.loader_state = found.loader_state if found.loader is self else found
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(spec.loader_state.name)

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, in whose place the import has put that of its second name."""
        module.__spec__ = module.__spec__ and module.__spec__.loader_state
        # An import binds a module in its package, where one of its functions may have its name, as `global_view` has:
        # what is loaded now is never imported by its second name.
        for name, loaded in list(sys.modules.items()):
            is_whole = not getattr(getattr(loaded, "__spec__", None), "_initializing", False)
            if name.startswith(f"{_NAME}.") and is_whole:
                sys.modules[_SECOND + name.removeprefix(_NAME)] = loaded

    def get_code(self, name: str) -> CodeType | None:
        """Returns a module's code, for ``python -m core...``, which runs it as ``__main__``."""
        found = find_spec(f"{_NAME}{name.removeprefix(_SECOND)}")
        loader = found and found.loader
        return loader.get_code(found.name) if found and isinstance(loader, InspectLoader) else None

    def get_source(self, name: str) -> str | None:
        return None  # the file has it


class _AnotherProject(MetaPathFinder):
    """The last import finder: says that the ``core`` that was imported is another project's."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        own_name = _own_name(name, core_is_ours=False)
        if own_name and find_spec(own_name) is not None:
            where = getattr(sys.modules.get(_SECOND), "__file__", None) or list(path or [])
            raise ModuleNotFoundError(
                f"there is no {name}: core is another project's package here, {where}; import {own_name}", name=name
            )
