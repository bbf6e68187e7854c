"""Small helpers that Megatron-LM's scripts import by these names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from . import parallel_state
from .base import module_protocol
from .base.errors import ConfigError, ParallelConfigError
from .base.megatron_names import absent_names, checks_arguments, refuse
from .parallel_state import check_same_groups
from .process_groups_config import ProcessGroupCollection
from .transformer.sequences import own_chunks

Modules = nn.Module | Sequence[nn.Module]


def unwrap_model(model: Any, module_instances: tuple[type[nn.Module], ...] | None = None) -> Any:
    """Returns the model inside its wrappers, or for a list the list of models.

    Args:
        module_instances: the classes of wrappers to open; by default this package's and `Float16Module`.
    """
    if isinstance(model, (list, tuple)):
        return [unwrap_model(each, module_instances) for each in model]
    if module_instances is None:
        return module_protocol.unwrap_model(model)
    while isinstance(model, module_instances):
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


@checks_arguments
def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: ProcessGroup | None = None) -> dict[str, Any]:
    """Returns this context-parallel rank's part of each sequence of a batch of tensors `[b, s, ...]`. None stays None.

    Args:
        cp_group: must be the context-parallel group of `shardstack.parallel_state`.
        is_hybrid_cp, hybrid_cp_group_func: Megatron-LM's; refused unless at their defaults.
        use_per_sequence_balancing: ignored: every sequence is always split by itself.

    Raises:
        ParallelConfigError: another group is given; the batch has lengths of packed documents or a mask of s x s
            elements, instead of `document_starts`; or an argument is refused.
    """
    caller = "get_batch_on_this_cp_rank"
    refuse(caller, cu_seqlens=(batch.get("cu_seqlens"), None, "give the model document_starts"))
    check_same_groups(caller, ProcessGroupCollection(cp=cp_group), ("cp",))
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    if batch.get("attention_mask") is not None:
        raise ParallelConfigError(
            f"{caller}: attention_mask has s x s elements, and no rank needs a part of it; give document_starts"
        )
    return {key: None if tensor is None else own_chunks(tensor) for key, tensor in batch.items()}


__getattr__ = absent_names(__name__, functions_import=True)
