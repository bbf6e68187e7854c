"""shardstack: data parallelism for large transformer stacks, from replicated to fully sharded by one class swap.

Nothing is imported here until it is used. Take what you need from the sub-packages (``shardstack.distributed``,
``shardstack.models.gpt``, ``shardstack.optimizer``, ``shardstack.parallel_state``), each of which needs torch and
numpy alone. ``core`` is a second name of the same modules, for scripts that had ``megatron.core``.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
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
    if "shardstack" not in sys.modules:
        _spec = spec_from_file_location("shardstack", __file__)
        sys.modules["shardstack"] = module_from_spec(_spec)  # type: ignore[arg-type]
        try:
            _spec.loader.exec_module(sys.modules["shardstack"])  # type: ignore[union-attr]
        except BaseException:
            del sys.modules["shardstack"]
            raise
    elif not (_imported := Path(sys.modules["shardstack"].__path__[0])).samefile(_found := Path(__file__).parent):
        raise ImportError(
            f"there are two copies of shardstack: {_imported}, which was imported, and {_found}, which the name core "
            "finds; leave one of them on the path"
        )
    sys.modules[__name__] = sys.modules["shardstack"]
