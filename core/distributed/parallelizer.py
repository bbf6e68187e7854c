"""Re-exports `core.adapters.nemo` under NeMo Automodel's path, ``distributed.parallelizer``."""

from __future__ import annotations

from ..adapters.nemo import (
    HAVE_NVFSDP,
    _destroy_dist_connection,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    nvfsdp_strategy_parallelize,
    to_cpu,
    translate_to_torch_parallel_style,
)

__all__ = [
    "HAVE_NVFSDP",
    "_destroy_dist_connection",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "to_cpu",
    "translate_to_torch_parallel_style",
]
