"""Runs any model on this library's engines, under the names of NeMo Automodel's module of this name."""

from ..bridge.units import import_classes_from_paths
from .parallelize import (
    HAVE_NVFSDP,
    _destroy_dist_connection,
    fsdp2_strategy_parallelize,
    nvfsdp_strategy_parallelize,
    to_cpu,
)
from .tensor_parallel_plan import get_hf_tp_shard_plan, translate_to_torch_parallel_style

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
