"""The name `core` of the installed package: the same module object as `shardstack`."""

import sys
from importlib import import_module


def __getattr__(name: str) -> object:  # another thread that imports a module from here waits for the package
    sys.modules[__name__] = import_module("shardstack")
    return getattr(sys.modules[__name__], name)


sys.modules[__name__] = import_module("shardstack")
