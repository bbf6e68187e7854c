"""Imports the folder ``core`` next to this file as the package ``shardstack``, where nothing is installed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("shardstack", Path(__file__).with_name("core") / "__init__.py")
sys.modules["shardstack"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["shardstack"])

if __name__ == "__main__":  # python -m shardstack
    from shardstack.commands import main

    sys.exit(main())
