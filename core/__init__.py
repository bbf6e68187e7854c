"""shardstack: data parallelism for large transformer stacks, from replicated to fully sharded by one class swap.

Nothing is imported here until it is used. Take what you need from the sub-packages (``shardstack.distributed``,
``shardstack.models.gpt``, ``shardstack.optimizer``, ``shardstack.parallel_state``), each of which needs torch and
numpy alone. ``core`` is a second name of the same modules, for scripts that had ``megatron.core``.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

__version__ = "0.1.0"

if __name__ == "shardstack":
    from .base.megatron_names import absent_names
    from .base.second_name import share_modules

    share_modules()
    __getattr__ = absent_names(
        __name__,
        import_paths={
            "ModelParallelConfig": "shardstack.model_parallel_config",
            "DistributedDataParallel": "shardstack.distributed",
        },
    )
else:  # a checkout's folder, imported by its name `core`: the package takes its place

    class _ThisFolder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, __file__) if name == "shardstack" else None

    def __getattr__(name: str) -> object:  # another thread that imports a module from here waits for the package
        sys.modules[__name__] = import_module("shardstack")
        return getattr(sys.modules[__name__], name)

    del __path__
    sys.meta_path.insert(0, _ThisFolder)
    _imported, _found = Path(import_module("shardstack").__path__[0]), Path(__file__).parent
    sys.meta_path.remove(_ThisFolder)
    if not _imported.samefile(_found):
        raise ImportError(
            f"there are two copies of shardstack: {_imported}, which was imported, and {_found}, which the name core "
            "finds; leave one of them on the path"
        )
    sys.modules[__name__] = sys.modules["shardstack"]
