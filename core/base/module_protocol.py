"""What the library has to know of a model, which the model says by attributes of its modules and parameters.

Wrappers, optimizers and checkpoints know no class of a model. They read the attributes below by name, each with a
default, so that a model of plain torch modules needs none of them. Layers and models set them and import nothing.

Of a module's class:

* ``is_unit``: its outermost instances become units where the user names none. Where no module of a model has it, the
  items of the outermost lists of repeated layers do.
* ``is_one_layer``: it is one layer of weights, which recomputation would not make smaller.
* ``is_model_wrapper``: it only calls the model in its attribute ``module``, whose names checkpoints use. Its method
  ``settle``, if it has one, waits until the parameters are what its last step has made them.
* ``saved_operations``: names of operations, such as ``flash_attn::_flash_attn_forward``, whose results selective
  recomputation saves next to those of torch's products and attention.
* ``adds_gradient_rows``: a flag that a wrapper sets on each instance: whether backward may add only the rows in use
  to ``weight.grad``.
* ``buffers_keep_dtype``: casts of a model leave its buffers as they are.
* ``step_sums`` and what belongs to it: see `CountsInStep`.

Of a module:

* ``_fsdp_modules`` (Megatron-LM's): classes whose instances become units, nested ones too.
* ``weights_used_in_backward``: False if backward reads none of its weights.
* ``borrows_shared_weight``: it computes with a weight of another module, marked ``shared_embedding``.
* ``rank_dependence``: what it computes differently on other numbers of ranks, and what to set instead, for a message.
* ``tp_group``, ``ep_group``: the ranks that share its tensor-parallel and expert-parallel parameters. Without them
  those of the wrapper.
* ``initializers``, ``initial_dtypes``, ``init_seed``, ``restore_parameter_marks``: how its parameters are drawn, see
  `shardstack.base.initialization`. Without them its ``reset_parameters`` does, or a ``_init_weights`` around it.
* ``post_process`` (Megatron-LM's): False for a pipeline stage without the loss.
* ``config``: an object with fields of Megatron-LM's configs. Absent fields have their defaults. If its class has
  ``fusion_lends_memory``, ``gradient_accumulation_fusion`` asks for ``lend_gradient_memory``, and not for layers that
  add to ``main_grad`` themselves.

Of a parameter, by Megatron-LM's names:

* ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``: cut over tensor-parallel ranks, and how.
* ``sequence_parallel``: its gradient is a partial sum over tensor-parallel ranks.
* ``allreduce``: False for experts, whose replicas are other ranks; ``expert_model_parallel``: dim 0 counts experts.
* ``shared_embedding``: code outside its module, or another pipeline stage, reads it too.
* ``shared``: another rank counts it in norms and saves it.
* ``is_embedding_or_output_parameter``, ``use_muon``: whether Muon updates it.

And by ours:

* ``fused_rows``: which of its rows are matrices of their own, see `FusedRows`.
* ``lend_gradient_memory``: a function that a wrapper sets and a layer's backward calls, see
  `shardstack.tensor_parallel.weight_gradients`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class FusedRows:
    """The rows of a weight that several matrices share: blocks of rows that repeat."""

    blocks: tuple[tuple[str, int], ...]
    """Name and number of consecutive rows of each block."""
    head_rows: int = 0
    """Rows of an attention head, of which each block has some, or 0 where blocks have no heads."""


class CountsInStep(Protocol):
    """A module that counts during a step, as a router counts the tokens of its experts."""

    step_sums: Tensor
    """`[n]`: the counts of this rank. `finalize_model_grads` adds the counts of all replicas, once a step."""

    @property
    def step_sums_group(self) -> ProcessGroup | None:
        """Further ranks whose counts are added, such as tensor-parallel ones with other tokens."""

    def use_step_sums(self, totals: Tensor) -> None:
        """Ends the step: `totals` `[n]` are the counts of all ranks. Called before the optimizer's step, whether or
        not that is skipped."""

    def clear_step_sums(self) -> None:
        """Forgets the counts of a step that did not end."""


@dataclass
class ModuleToFill:
    """A module, and its own tensors to fill."""

    name: str
    """The module's name in the model that owns the seed, with a dot at the end."""
    module: nn.Module
    seed: int
    """The seed of the model that owns it."""
    hook: Callable[..., Any] | None
    """`_init_weights(module)` of the nearest enclosing module that has one, as in Hugging Face's models."""
    targets: dict[str, Tensor]
    """The module's own parameters and buffers to fill, by local name. A shared one belongs to its first module."""
    fills_all_below: bool
    """Whether all parameters of the module and its submodules are to be filled, and there are some."""
    tp_group: ProcessGroup | None
    """The ranks that share its tensor-parallel parameters."""
    ep_group: ProcessGroup | None
    """The ranks that share its expert-parallel parameters."""


def unwrap_model(module: nn.Module) -> nn.Module:
    """Returns the model inside wrappers, such as data-parallel ones and ``Float16Module``."""
    while _of_class(module, "is_model_wrapper", False):
        module = cast(nn.Module, module.module)
    return module


def settle_parameters(*modules: nn.Module) -> None:
    """Waits for those of modules that are data-parallel wrappers: parameters are then what the last step made them."""
    for module in modules:
        if _of_class(module, "is_model_wrapper", False) and (settle := getattr(type(module), "settle", None)):
            settle(module)


def init_weights_hook(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the module's `_init_weights`, if it takes a module to initialise."""
    hook = getattr(module, "_init_weights", None)
    if not callable(hook):
        return None
    parameters = [p for p in inspect.signature(hook).parameters.values() if p.default is p.empty]
    return hook if len(parameters) == 1 and parameters[0].kind is not inspect.Parameter.VAR_KEYWORD else None


def unit_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Returns the classes of a model's modules that are units where the user names none."""
    return tuple(dict.fromkeys(type(module) for module in model.modules() if _of_class(module, "is_unit", False)))


def is_one_layer(module: nn.Module) -> bool:
    """Returns whether a module is one layer of weights: it says so, or is torch's and has no children."""
    is_torchs = type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())
    return is_torchs or _of_class(module, "is_one_layer", False)


def saved_operations(module: nn.Module) -> set[str]:
    """Returns the names of operations that selective recomputation of a module saves, by what the module contains."""
    return {name for inner in module.modules() for name in _of_class(inner, "saved_operations", ())}


def names_of_borrowers(model: nn.Module) -> list[str]:
    """Returns the names of weights that modules of a model would have, and borrow from its embedding."""
    modules = model.named_modules()
    return [f"{name}.weight" for name, module in modules if getattr(module, "borrows_shared_weight", False)]


def rank_dependence(model: nn.Module) -> str:
    """Returns what the first module of a model that says so computes differently on other numbers of ranks, or ''."""
    return next((text for module in model.modules() if (text := getattr(module, "rank_dependence", ""))), "")


def counting_modules(model: nn.Module) -> list[CountsInStep]:
    """Returns the modules of a model that count during a step."""
    return [cast(CountsInStep, module) for module in model.modules() if _of_class(module, "use_step_sums", None)]


def tensor_parallel_groups(model: nn.Module) -> set[ProcessGroup]:
    """Returns the groups of the layers of a model that tensor-parallel ranks share."""
    groups = {group for module in model.modules() if (group := getattr(module, "tp_group", None))}
    return {group for group in groups if isinstance(group, ProcessGroup) and group.size() > 1}


class ModelContents:
    """What a model held when a check of it passed: modules, parameters, and which of these are trained.

    A check of every step walks through the model again only where this has changed. Torch's `named_parameters` makes
    some ten calls for each parameter, and a comparison makes none.
    """

    def __init__(self) -> None:
        # `note` sets both. Whoever checks a model keeps its parameters, so that no other one gets the address of one.
        self._modules: list[nn.Module] = []
        self._noted: list[int] = []

    def note(self, model: nn.Module) -> None:
        """Notes what the model holds now."""
        self._modules = list(model.modules())
        self._noted = self._look()

    def have_changed(self) -> bool:
        """Returns whether the model holds something else than at the last `note`, or there was none."""
        return not self._modules or self._noted != self._look()

    def _look(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            parameters = [each for module in self._modules for each in module._parameters.values() if each is not None]
            children = [child for module in self._modules for child in module._modules.values()]
            return [*map(id, parameters), *map(id, children), *[each.requires_grad for each in parameters]]


def set_gradient_rows(model: nn.Module, adds_rows: bool) -> None:
    """Says to each module with ``adds_gradient_rows`` whether its backward may add rows to ``weight.grad``."""
    for module in model.modules():
        if hasattr(type(module), "adds_gradient_rows"):
            module.adds_gradient_rows = adds_rows  # type: ignore[assignment]


def fusion_lends_memory(config: Any) -> bool:
    """Returns whether a config means by ``gradient_accumulation_fusion`` that layers compute in lent memory."""
    return getattr(type(config), "fusion_lends_memory", False)


def fused_rows(parameter: Tensor) -> FusedRows | None:
    """Returns which rows of a parameter are matrices of their own. None if it is one matrix."""
    rows: FusedRows | None = getattr(parameter, "fused_rows", None)
    return rows


def _of_class(module: nn.Module, name: str, default: Any) -> Any:
    """Returns an attribute of a module's class. On an instance it may be another module's: wrappers such as
    ``torch.compile``'s pass unknown names on to the module inside."""
    return getattr(type(module), name, default)
