"""Small helpers that Megatron-LM's scripts import by these names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from . import parallel_state
from .absent_names import absent_names
from .distributed.data_parallel_base import _BaseDataParallel
from .errors import ConfigError, ParallelConfigError
from .foreign_arguments import refuse
from .process_groups_config import ProcessGroupCollection, check_same_groups
from .transformer.context_parallel import own_chunks
from .transformer.module import Float16Module

Modules = nn.Module | Sequence[nn.Module]


def unwrap_model(model: Any, module_instances: tuple[type[nn.Module], ...] | None = None) -> Any:
    """Returns the model inside its wrappers; for a list, the list of models.

    Args:
        module_instances: the classes of wrappers to open; by default this package's and `Float16Module`.
    """
    kinds = (_BaseDataParallel, Float16Module) if module_instances is None else module_instances
    if isinstance(model, (list, tuple)):
        return [unwrap_model(each, kinds) for each in model]
    while isinstance(model, kinds):
        model = model.module
    return model


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Returns the attribute of the first module, from the outermost wrapper inwards, that has it.

    Args:
        allow_none: whether an attribute of None counts.
        return_model_obj: return the module instead.

    Raises:
        ConfigError: a list was given, or no module has the attribute.
    """
    if isinstance(model, (list, tuple)):
        raise ConfigError(f"get_attr_wrapped_model was given a list for {attr!r}; give one of its modules")
    inner = model
    while inner is not None:
        if hasattr(inner, attr) and (allow_none or getattr(inner, attr) is not None):
            return inner if return_model_obj else getattr(inner, attr)
        inner = getattr(inner, "module", None)
    raise ConfigError(f"neither {type(model).__name__} nor the model inside it has the attribute {attr!r}")


def get_model_config(model: Any) -> Any:
    """Returns the config of a model, through wrappers."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def get_batch_on_this_cp_rank(
    batch: dict[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: ProcessGroup | None = None,
    hybrid_cp_group_func: Callable[..., ProcessGroup] | None = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Any]:
    """Returns this context-parallel rank's part of each sequence of a batch of tensors `[b, s, ...]`; None stays None.

    Args:
        cp_group: must be the context-parallel group of `core.parallel_state`.
        is_hybrid_cp, hybrid_cp_group_func: Megatron-LM's; refused unless at their defaults.
        use_per_sequence_balancing: ignored: every sequence is always split by itself.

    Raises:
        ParallelConfigError: another group is given; the batch has lengths of packed documents or a mask of s x s
            elements, instead of `document_starts`; or an argument is refused.
    """
    caller = "get_batch_on_this_cp_rank"
    one_level = "every sequence is split over the same ranks"
    refuse(
        caller,
        is_hybrid_cp=(is_hybrid_cp, False, one_level),
        hybrid_cp_group_func=(hybrid_cp_group_func, None, one_level),
        cu_seqlens=(batch.get("cu_seqlens"), None, "give the model document_starts"),
    )
    check_same_groups(caller, ProcessGroupCollection(cp=cp_group), ("cp",))
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    if batch.get("attention_mask") is not None:
        raise ParallelConfigError(
            f"{caller}: attention_mask has s x s elements, and no rank needs a part of it; give document_starts"
        )
    return {key: None if tensor is None else own_chunks(tensor) for key, tensor in batch.items()}


__getattr__ = absent_names(
    __name__,
    {
        **dict.fromkeys(
            ["get_pg_size", "get_pg_rank", "get_pg_src_rank"], "ask the group: size(), rank(), get_process_group_ranks"
        ),
        **dict.fromkeys(["get_torch_version", "is_torch_min_version"], "compare torch.__version__"),
        **dict.fromkeys(["divide", "ensure_divisibility", "round_up_to_nearest_multiple"], "use % and //"),
        **dict.fromkeys(
            ["init_method_normal", "scaled_init_method_normal"], "use core.transformer.transformer_config"
        ),
        "get_tensor_model_parallel_group_if_none": "core.parallel_state.get_tensor_model_parallel_group(False)",
        "get_model_type": "get_attr_wrapped_model(model, 'model_type')",
        "StragglerDetector": "core.training's log has the time of each step",
        "GlobalMemoryBuffer": "no memory is kept between calls; allocate a tensor",
        "make_viewless_tensor": "pipeline stages keep their outputs; use the tensor itself",
        "make_tp_sharded_tensor_for_checkpoint": "use core.dist_checkpointing.model_state_dict",
        "make_sharded_tensor_for_checkpoint": "use core.dist_checkpointing.model_state_dict",
        "check_param_hashes_across_dp_replicas": "wrappers compare replicas when they are made",
        "get_te_version": "Transformer Engine is not used",
        "is_te_min_version": "Transformer Engine is not used",
        "get_batch_on_this_tp_rank": "use core.tensor_parallel.broadcast_data",
        "nvtx_range_push": "use torch.cuda.nvtx.range_push",
        "nvtx_range_pop": "use torch.cuda.nvtx.range_pop",
    },
    functions_import=True,
)
