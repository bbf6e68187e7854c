"""Guards of a wrapped model against changes that its wrapper would not see."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...base.errors import CheckpointError, OptimizerError, WrapError
from ...base.module_protocol import ModelContents
from ...base.parameters import without_waiting
from ...dist_checkpointing.model_state import ValuesToLoad
from ..distributed_data_parallel_config import EngineKind
from ..engine.engine import Engine
from ..groups import managed_parameters
from .guard import Guard


class ParametersStay(Guard):
    """A model has the parameters with which it was wrapped, where they were, and no more that are trained."""

    def __init__(self) -> None:
        # Whether an optimizer has each of its steps checked, so that one check a step is enough. Its first step sets
        # it for good.
        self._is_checked_in_steps = False
        # What the model held when a check last passed.
        self._contents = ModelContents()

    def before_reduction(self, engine: Engine) -> None:
        if engine.places and not self._is_checked_in_steps:
            engine.parameters.settle()  # places are those of parameters that are not gathered
            self._check(engine)

    def on_failure(self, engine: Engine) -> None:
        self._check(engine)  # a parameter of another dtype than its gradient, which cannot be shown

    def before_step(self, engine: Engine, optimizer: str, *, is_torchs: bool) -> None:
        try:
            self._check(engine)
        except WrapError as error:
            raise OptimizerError(str(error)) from None
        self._is_checked_in_steps = True

    def _check(self, engine: Engine) -> None:
        """Compares the model's parameters with those at wrapping.

        Raises:
            WrapError: a parameter was moved, replaced, added, removed, tied or made trainable since.
        """
        with without_waiting():
            moved = [param for param, place in engine.places.items() if place != (param.data_ptr(), param.dtype)]
            if not moved and not self._contents.have_changed():
                return
            names = engine.names_of_parameters()  # a parameter may have several forms
            params = dict(managed_parameters(engine.plan.root.modules[0]))
            names_in_model = {names.get(param) for param in params.values()}
            added = [name for name, param in params.items() if param.requires_grad and param not in names]
            removed = [name for name in names.values() if name not in names_in_model]
        if added or removed:
            change = "was replaced, added or made trainable" if added else "was removed, or tied to another,"
            raise WrapError(
                f"parameter {(added + removed)[0]} {change} after the model was wrapped, so that its gradient is "
                "never reduced; wrap the finished model"
            )
        if moved:
            raise WrapError(  # names the model's first, as buffers have parameters in reverse order
                f"the storage of parameter {names[moved[-1]]} was replaced after the model was wrapped (a move to "
                "another device or dtype, or a load with assign=True); wrap it afterwards, or load in place"
            )
        self._contents.note(engine.plan.root.modules[0])


class SizesStay(Guard):
    """Hugging Face's `resize_token_embeddings` of a wrapped model raises before it changes a weight."""

    def once_wrapped(self, module: nn.Module, engine: Engine) -> None:
        for submodule in module.modules():
            if hasattr(submodule, _RESIZE):
                setattr(submodule, _RESIZE, _refuse_to_resize)


_RESIZE = "resize_token_embeddings"


def _refuse_to_resize(*_: object, **__: object) -> NoReturn:
    raise WrapError(f"{_RESIZE} was called after the model was wrapped, whose memory has the old size; call it first")


class PlainStateDicts(Guard):
    """`load_state_dict` of a module whose parameters FSDP2 has sharded raises a clear error for plain tensors.

    Torch would raise an error about mixed tensors for every parameter, or with ``assign=True`` replace the shard by
    the whole tensor.
    """

    def once_wrapped(self, module: nn.Module, engine: Engine) -> None:
        for submodule in module.modules() if engine.plan.engine is EngineKind.FSDP2 else ():
            names = [name for name, value in submodule.named_parameters(recurse=False) if isinstance(value, DTensor)]
            if names:
                submodule.register_load_state_dict_pre_hook(partial(_refuse_plain, names))


def _refuse_plain(names: list[str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in names if not isinstance(state_dict, ValuesToLoad) else ():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise CheckpointError(
                f"load_state_dict was given {prefix + name} as a plain tensor of shape {list(value.shape)}, and "
                "the module holds it sharded over ranks (a DTensor); nothing was loaded from it. Load whole or "
                "sharded state dicts with shardstack.dist_checkpointing.load_model_state_dict(module, state_dict)"
            )
