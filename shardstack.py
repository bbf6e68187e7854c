"""Imports the folder ``core`` next to this file as the package ``shardstack``, where nothing is installed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location(__name__, Path(__file__).with_name("core") / "__init__.py")
sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
