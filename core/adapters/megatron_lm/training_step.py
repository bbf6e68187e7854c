"""The end of a step, gradients and optimizer, for wrappers that an optimizer of this library updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from megatron.core import optimizer as stock_optimizer
from megatron.core.utils import get_model_config
from torch import nn

from ... import distributed, optimizer
from ...base.errors import ConfigError, ParallelConfigError
from ...base.megatron_names import changed_fields, config_with
from ...distributed.groups import managed_parameters
from ..bridge.trained import mix_in
from ..bridge.translation import check_settings, table
from .checkpoints import OwnStateInPieces, make_resumable

megatron_step = import_module("megatron.core.distributed.finalize_model_grads")  # the package's name is the function's


class InMegatronLoop(OwnStateInPieces):
    """What Megatron-LM's loop reads of an optimizer, in addition to what any optimizer of this library has."""

    is_stub_optimizer = False

    def prepare_model_params_for_param_sync(self) -> None:
        """Does nothing: a step has gathered parameters, or forward gathers them."""

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Does nothing: a step finds what was written to parameters since the last one, and masters take it.

        Raises:
            ConfigError: masters are to be read from the checkpoint, ``--load-main-params-from-ckpt``.
        """
        if state_dict is not None:
            raise ConfigError(
                "--load-main-params-from-ckpt is set, and masters here start from the parameters in their own dtype; "
                "drop it, or load the optimizer's state, which has masters in fp32 (drop --no-load-optim)"
            )


def get_megatron_optimizer(
    stock: Callable[..., Any],
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Builds this library's optimizer where the flags have chosen a sharding strategy, and else Megatron-LM's.

    Args:
        stock: Megatron-LM's function. It gets all arguments.
        config: Megatron-LM's ``OptimizerConfig``. What it changes of its defaults is translated, but for fields of
            other optimizers than ``config.optimizer``.
        config_overrides: Megatron-LM's settings of single parameters.

    Raises:
        ConfigError: a setting that this library's optimizer does not have.
        ParallelConfigError: a model whose gradients need sums that this library does not make.
    """
    if not getattr(model_chunks[0], "has_own_optimizer", False):
        _check_stock(config, model_chunks[0])
        found = stock(config, model_chunks, config_overrides, *args, **kwargs)
        make_resumable(found, model_chunks)
        return found
    _prepare(model_chunks)
    rules = table("megatron_lm optimizer")
    unread = [name for names, rule in rules.items() if rule != config.optimizer for name in names.split()]
    declared = {field.name for field in fields(config)}  # the others are computed from these
    values = {
        name: value
        for name, value in changed_fields(config).items()
        if name in declared and not any(fnmatchcase(name, pattern) for pattern in unread)
    }
    if config.optimizer == "muon":
        values["muon_preset"] = "megatron"
    own = optimizer.get_megatron_optimizer(  # type: ignore[call-arg]  # it takes Megatron-LM's arguments too
        config_with(optimizer.OptimizerConfig, values, type(config).__name__),
        model_chunks,
        stock_optimizer.get_standard_config_overrides(config) if config_overrides is None else config_overrides,
        dump_param_to_param_group_map=kwargs.get("dump_param_to_param_group_map"),
    )
    mix_in(own, InMegatronLoop)
    make_resumable(own, model_chunks)
    return own


def _check_stock(config: Any, wrapper: nn.Module) -> None:
    """Raises for an optimizer of Megatron-LM's that needs whole matrices where ranks share the update of one.

    Raises:
        ParallelConfigError: says what to change.
    """
    if isinstance(wrapper, distributed.TorchFullyShardedDataParallel):
        check_settings({"optimizer": config.optimizer}, "megatron_lm arguments", where=" under FSDP2")
    elif isinstance(wrapper, distributed.DistributedDataParallel) and not wrapper.plan.is_replicated:
        by_layer = getattr(config, "use_layer_wise_distributed_optimizer", False)
        check_settings({"use_layer_wise_distributed_optimizer": by_layer}, "megatron_lm arguments")


def _prepare(model_chunks: Sequence[Any]) -> None:
    """Lets the schedule name the last micro-batch of a step, and marks gradients that tensor-parallel ranks sum.

    With ``--overlap-grad-reduce`` Megatron-LM's loop sets ``no_sync_func`` itself, and expects None before.
    """
    config = get_model_config(model_chunks[0])
    check_settings(vars(config), "megatron_lm own optimizer", where=" with --data-parallel-sharding-strategy")
    if not model_chunks[0].ddp_config.overlap_grad_reduce:
        every = [chunk.no_sync for chunk in model_chunks]
        config.no_sync_func = every if len(every) > 1 else every[0]
    parameter: Any
    for name, parameter in (pair for chunk in model_chunks for pair in managed_parameters(chunk)):
        if config.tensor_model_parallel_size > 1 and getattr(parameter, "average_gradients_across_tp_domain", False):
            raise ParallelConfigError(
                f"gradients of {name} are averaged over tensor-parallel ranks, which is not done with "
                "--data-parallel-sharding-strategy; drop it, or use one tensor-parallel rank"
            )
        if getattr(config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name):
            parameter.sequence_parallel = True  # each rank has its heads' share of the gradient


def finalize_model_grads(
    stock: Callable[..., Any],
    model: Sequence[Any],
    num_tokens: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Finishes the gradients of a step: by this library's function where its optimizer reads them, else Megatron-LM's.

    Args:
        stock: Megatron-LM's function, whose arguments follow. The wrappers of this library have their groups.
    """
    if not getattr(model[0], "has_own_optimizer", False):
        stock(model, num_tokens, pg_collection, force_all_reduce)
        return
    distributed.finalize_model_grads(model, num_tokens, force_all_reduce=force_all_reduce)
    config = get_model_config(model[0])
    if getattr(config, "moe_router_enable_expert_bias", False):
        megatron_step._update_router_expert_bias(model, config)
    megatron_step.reset_model_temporary_tensors(config, model)
