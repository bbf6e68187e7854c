"""Initializes parameters by name: to the same values for any world size, layout, sharding, or start on meta.

Every parameter is drawn as the whole model's tensor, by its own generator, whose seed is a hash of one number and the
parameter's name; each rank copies its part. One full tensor exists at a time. Drawing shards directly would not give
equal values: torch's CPU generator has no offsets into a sharded tensor.

A module says how its parameters are filled by attributes:

* ``initializers``: an `Initializer` for each name of a parameter or buffer. A module of another library has none, and
  its own reset methods fill it (`foreign_initialization`).
* ``initial_dtypes``: by name, the dtype that values are rounded to; else fp32.
* ``tp_group``, ``ep_group``: the ranks that share its parameters, as their marks say.
* ``init_seed``: of a model, the seed of all modules in it.
* ``restore_parameter_marks()``: sets the marks again that torch loses when it replaces a parameter.
* ``config.perform_initialization``: False for a model that a checkpoint will fill.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import ConfigError
from .module_protocol import ModuleToFill, init_weights_hook, unwrap_model
from .parameters import Group, copy_partition, local_part, whole_shape

Initializer = Callable[..., Any]
"""Fills a tensor of the whole model's shape, fp32 on the CPU, in place: ``init_method(tensor)``, as in Megatron-LM and
`torch.nn.init`. It draws from torch's default generator, which is seeded for the call and restored after it. If it has
an argument ``generator``, it draws from the generator passed as that."""

# Parts of names that come from wrappers and are not counted as part of a parameter's name.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


def draw_init_seed() -> int:
    """Draws a seed from torch's default CPU generator, so that `torch.manual_seed` decides every initial value.

    Ranks of one model must have been seeded with the same seed.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def root_seed(model: nn.Module) -> int:
    """Returns the seed of modules without an `init_seed`: the model's, or a new one."""
    seed = getattr(unwrap_model(model), "init_seed", None)
    return draw_init_seed() if seed is None else seed


def performs_initialization(model: nn.Module) -> bool:
    """Returns whether the model is to be initialised: False only if its config says so."""
    return bool(getattr(getattr(model, "config", None), "perform_initialization", True))


@torch.no_grad()
def initialize_parameters(
    module: nn.Module,
    seed: int,
    *,
    prefix: str = "",
    only: Iterable[torch.Tensor] | None = None,
    tp_group: Group = None,
) -> None:
    """Fills every parameter of `module` and its submodules, by name.

    A parameter with two names is filled once, under the first. Shards of DTensors (FSDP2), uneven ones included, are
    filled in place. A module with an `init_seed` is filled from that seed, by names relative to itself, as when it was
    built directly.

    A module of another library, without `initializers`, fills its tensors by its own `reset_parameters`, or by
    `_init_weights(module)` of the nearest enclosing module that has one (as in Hugging Face's models), under a seed
    from its name, inner modules first: see :mod:`.foreign_initialization`. Values are then equal at every world size,
    but differ from direct construction, which draws them one after the other.

    Args:
        seed: seed from :func:`draw_init_seed`, equal on every rank.
        prefix: prefix of `module`'s names in the model that owns the seed, with its dot.
        only: the parameters and buffers to fill; by default all parameters and no buffer.
        tp_group: the ranks that share tensor-parallel parameters of modules without a `tp_group`.

    Raises:
        ConfigError: a parameter is on the meta device, or nothing says how to fill a tensor.
    """
    targets = {id(tensor) for tensor in (module.parameters() if only is None else only)}
    places = [*_places(module, seed, prefix, targets, tp_group)]
    versions = [_version(tensor) for _, _, tensor in _tensors(places)]
    foreign: list[ModuleToFill] = []
    for place in places:
        initializers = getattr(place.module, "initializers", None)
        if initializers is None:
            if place.targets or place.fills_all_below:
                foreign.append(place)
            continue
        if restore := getattr(place.module, "restore_parameter_marks", None):
            restore()
        dtypes = getattr(place.module, "initial_dtypes", {})
        for name, parameter in place.targets.items():
            if name in initializers:
                _fill(parameter, place, initializers[name], name, dtypes.get(name, torch.float32))
    if foreign:
        from .foreign_initialization import reset  # loaded for models that start on meta
    for place in reversed(foreign):  # inner modules first: enclosing ones may overwrite their values
        reset(place, _seed_of(place.seed, place.name))
    for (place, name, tensor), version in zip(_tensors(places), versions, strict=True):
        if _version(tensor) == version:
            raise ConfigError(_nothing_fills(place, name))


def _places(root: nn.Module, seed: int, prefix: str, targets: set[int], tp_group: Group) -> Iterator[ModuleToFill]:
    """Yields every module before its submodules. A shared tensor belongs to the first module that holds it."""
    by_path: dict[str, ModuleToFill] = {}
    identities: set[int] = set()
    for path, module in root.named_modules():
        around = by_path.get(path.rpartition(".")[0])
        own_seed = getattr(module, "init_seed", None)
        if around is None:
            where, seed_here = prefix, seed
        elif isinstance(own_seed, int):
            where, seed_here = "", own_seed
        else:
            part = path.rpartition(".")[2]
            where, seed_here = around.name + ("" if part in _WRAPPER_PARTS else f"{part}."), around.seed
        tensors = {n: t for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
        mine = {name: t for name, t in tensors.items() if id(t) in targets and id(t) not in identities}
        identities.update(map(id, mine.values()))
        for name, tensor in mine.items():
            if tensor.is_meta:
                raise ConfigError(
                    f"parameter {where}{name} is on the meta device and has no storage to fill; "
                    "call to_empty(device=...) on the model before initialize_parameters()"
                )
        below = [*module.parameters()]
        hook = init_weights_hook(module) or (around.hook if around else None)
        fills_all = bool(below) and all(id(parameter) in targets for parameter in below)
        groups = getattr(module, "tp_group", tp_group), getattr(module, "ep_group", None)
        by_path[path] = ModuleToFill(where, module, seed_here, hook, mine, fills_all, *groups)
        yield by_path[path]


def _tensors(places: list[ModuleToFill]) -> list[tuple[ModuleToFill, str, torch.Tensor]]:
    return [(place, name, tensor) for place in places for name, tensor in place.targets.items()]


def _version(tensor: torch.Tensor) -> int:
    """Returns a count that grows with every in-place write, to a sharded tensor or to this rank's part of it."""
    return tensor._version + local_part(tensor)._version


def _nothing_fills(place: ModuleToFill, name: str) -> str:
    kind = type(place.module).__name__
    if name in place.module._buffers:
        return (
            f"buffers on the meta device cannot be filled: nothing says how to fill {place.name}{name!r} of {kind}; "
            "build it on a device (register_buffer under torch.device('cpu')), or let the module's reset_parameters() "
            "fill it"
        )
    return (
        f"nothing says how to initialise parameter {place.name}{name} of {kind}; put a function that fills it into "
        f"its `initializers[{name!r}]`, or give the module reset_parameters()"
    )


def _seed_of(seed: int, name: str) -> int:
    """Returns a 64-bit hash, equal in every process unlike Python's `hash`. torch's CPU generator uses the lower
    32."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _fill(
    parameter: torch.Tensor, place: ModuleToFill, initializer: Initializer, name: str, dtype: torch.dtype
) -> None:
    shape = whole_shape(parameter, place.tp_group, place.ep_group)
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    call_initializer(initializer, whole, _seed_of(place.seed, place.name + name))
    copy_partition(whole.to(dtype), parameter, place.tp_group, place.ep_group)


def call_initializer(initializer: Initializer, tensor: torch.Tensor, seed: int) -> None:
    """Fills a tensor on the CPU in place from a seed. Torch's default generator is restored."""
    try:
        takes_generator = "generator" in inspect.signature(initializer).parameters
    except (TypeError, ValueError):  # built-in, without a signature
        takes_generator = False
    if takes_generator:
        initializer(tensor, generator=torch.Generator(device="cpu").manual_seed(seed))
    else:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach into the GPU's stream too
            initializer(tensor)


@torch.no_grad()
def allocate_meta_tensors(
    model: nn.Module,
    device: torch.device | str,
    parameter_device: torch.device | str | None = None,
    *,
    parameters_have_memory: bool = True,
) -> list[torch.Tensor]:
    """Replaces parameters and buffers on the meta device by empty ones, and returns these.

    A sharded parameter (FSDP2) gets storage for its shard. torch's `to_empty` would also discard existing values,
    untie shared plain parameters, and drop attributes of parameters. `parameter_device`, if given, is the device of
    parameters, for example the host of offloaded shards. Without `parameters_have_memory` they have a shape, a dtype
    and a device, and one element of memory, until a wrapper makes them views of its own.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places[parameter].append((module, name))
    attributes = [dict(vars(parameter)) for parameter in places]
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    on_meta = [(module, name) for module, name, buffer in buffers if buffer is not None and buffer.is_meta]
    memory: dict[torch.Tensor, torch.Tensor] = {}

    def storage_for(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta and tensor not in memory:
            is_parameter = tensor in places
            where = parameter_device if parameter_device and is_parameter else device
            if is_parameter and not parameters_have_memory:
                memory[tensor] = tensor.new_empty((1,) * tensor.ndim, device=where).expand(tensor.shape)
            else:
                memory[tensor] = torch.empty_like(tensor, device=where)
        return memory.get(tensor, tensor)

    if places or on_meta:
        model._apply(storage_for)
    for holders, values in zip(places.values(), attributes, strict=True):
        first, name = holders[0]
        parameter = first._parameters[name]
        for module, other in holders[1:]:
            module._parameters[other] = parameter
        for key, value in values.items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    tensors: list[torch.Tensor | None] = [holders[0][0]._parameters[holders[0][1]] for holders in places.values()]
    tensors += dict.fromkeys(module._buffers[name] for module, name in on_meta)
    return [tensor for tensor in tensors if tensor is not None]
