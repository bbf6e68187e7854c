"""Any elementwise optimizer of torch, or of a user, as the update rule of an optimizer over shards.

A rank updates its shard of a parameter, which may be a run of elements that begins and ends anywhere. That gives the
bits of a whole update if each element's update depends on that element alone. A probe tells: small tensors are updated
whole and in parts, by twins of the optimizer, and have to agree to the bit. (Not so: norms or factors of a tensor, as
in LAMB, Adafactor, Shampoo and SOAP, sums over parameters, line searches, matrices.)
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import OptimizerError
from ..base.parameters import local_part
from .main_params import MainParam
from .update_rules import Numbers

_ROWS, _COLUMNS = 6, 35
_PARTS = ((0, 1), (1, 70), (70, 70), (70, 175), (175, 210))
"""Runs of the probe's elements: inside a row, over the ends of rows, empty, whole rows."""
_STEPS = 3


@dataclass(frozen=True)
class Kinds:
    """What an optimizer keeps of a parameter, by the names in its state."""

    tensors: Mapping[str, torch.dtype]
    """In the parameter's shape."""

    numbers: Mapping[str, Tensor | float]
    """The rest, each with a value of its type."""


class TorchRule:
    """Runs a torch optimizer over main tensors, in the place of the parameters that it was built with.

    Its groups stay, so that schedules of either optimizer set them.

    Args:
        optimizer: built over parameters of the model; it has not stepped.
        params: the main tensors of all its parameters, by parameter; others of its groups are left out.

    Raises:
        OptimizerError: its update of a part is not the part of its update.
    """

    skips_on_device = False

    def __init__(self, optimizer: Optimizer, params: Mapping[Tensor, MainParam]) -> None:
        self.optimizer = optimizer
        self._kinds: dict[Tensor, Kinds] = {}
        """Of each main tensor. `_take` adds."""
        self._absent: dict[Tensor, dict[str, Tensor]] = {}
        """Zeros to load into, by main tensor and kind, where the optimizer has no state yet. `state_of` adds them.
        `set_numbers` makes them the state or drops them, and `update` drops them."""
        self._is_updating = False
        """Whether `update` runs the optimizer's step, which nobody else may call."""
        for group in optimizer.param_groups:
            self._take(group, params)
        optimizer.register_step_pre_hook(self._refuse_others)

    def add_group(self, group: dict[str, Any], params: Mapping[Tensor, MainParam]) -> None:
        """Adds a group of the model's parameters, as `add_param_group` of the optimizer takes it."""
        self.optimizer.add_param_group(group)
        self._take(self.optimizer.param_groups[-1], params)

    def _take(self, group: dict[str, Any], params: Mapping[Tensor, MainParam]) -> None:
        """Puts main tensors into a group, and their parts of the state that the optimizer has made."""
        held = [p for p in group["params"] if p in params]
        kinds = probe(self.optimizer, group, next(iter(held), None))
        state = self.optimizer.state
        for param in held:
            p = params[param]
            self._kinds[p.main] = kinds
            if made := state.pop(param, None):
                state[p.main] = {kind: _part_of(value, p) for kind, value in made.items()}
        if "param_names" in group:
            group["param_names"] = [params[param].name for param in held]
        group["params"] = [params[param].main for param in held]

    def _refuse_others(self, *_: object) -> None:
        if not self._is_updating:
            name = type(self.optimizer).__name__
            raise OptimizerError(
                f"step() of {name} was called, which would update nothing: it was given to shard_optimizer; call "
                "step() of what that returned"
            )

    def update(self, is_finite: Tensor) -> None:
        """Updates every main tensor that has a gradient. `MegatronOptimizer` has asked whether it is finite."""
        self._absent.clear()
        self._is_updating = True
        try:
            self.optimizer.step()
        finally:
            self._is_updating = False

    def take_back(self, mains: Iterable[Tensor]) -> None:
        """Does nothing: no step is skipped once it was made."""

    def share_state(self) -> None:
        """Does nothing: the state is of this rank's parts."""

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """Returns the state tensors of a main tensor by kind. Zeros to load into where there is no state."""
        state, kinds = self.optimizer.state.get(main), self._kinds[main].tensors
        if state:
            return {kind: state[kind] for kind in kinds}
        if main not in self._absent:
            self._absent[main] = {kind: torch.zeros_like(main, dtype=dtype) for kind, dtype in kinds.items()}
        return self._absent[main]

    def numbers_of(self, main: Tensor) -> Numbers | None:
        """Returns the numbers of a main tensor's state. None if it has no state."""
        state = self.optimizer.state.get(main)
        if not state:
            return None
        return {kind: v.item() if isinstance(v := state[kind], Tensor) else v for kind in self._kinds[main].numbers}

    def set_numbers(self, main: Tensor, numbers: Numbers | None) -> None:
        """Continues from `numbers`, once the tensors of `state_of` are filled."""
        tensors = self.state_of(main)
        self._absent.pop(main, None)
        if numbers is None:
            self.optimizer.state.pop(main, None)
            return
        examples = self._kinds[main].numbers.items()
        of_main = {kind: _like(example, numbers.get(kind, 0)) for kind, example in examples}
        self.optimizer.state[main] = of_main | tensors


def _part_of(value: Any, p: MainParam) -> Any:
    """Returns this rank's part of a state that was made for a whole parameter."""
    if not isinstance(value, Tensor) or value.shape != p.param.shape:
        return value
    part = p.part_of(value)
    return part.to(p.main.dtype if value.dtype == p.param.dtype else value.dtype, copy=True)


def _like(example: Tensor | float, value: float) -> Tensor | float:
    return torch.full_like(example, value) if isinstance(example, Tensor) else type(example)(value)


def probe(optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter | None) -> Kinds:
    """Steps twins of an optimizer over small tensors, whole and in parts, and compares all bits.

    Args:
        group: the settings of the update.
        param: one of its parameters, whose state the twins begin with.

    Returns:
        What the optimizer keeps.

    Raises:
        OptimizerError: the results differ, the optimizer keeps what has not its parameter's shape, or its step needs
            more than gradients.
    """
    name = type(optimizer).__name__
    if param is None:
        return Kinds({}, {})
    device = local_part(param.detach()).device
    if group.get("fused") and device.type == "cpu":
        raise OptimizerError(
            f"{name} has fused=True, and torch's fused kernels round the ends of a tensor otherwise on a CPU, so that "
            "results would depend on the number of ranks; leave fused out, or use get_megatron_optimizer, whose "
            "fused AdamW and SGD do not"
        )
    source = torch.Generator().manual_seed(1)
    values = [torch.randn(_ROWS, _COLUMNS, generator=source) for _ in range(1 + _STEPS)]
    start, grads = values[0].to(device), [(grad * 10.0**-i).to(device) for i, grad in enumerate(values[1:])]
    grads[-1][1:3] = 0.0
    made = dict(optimizer.state.get(param, {}))
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _Twin(optimizer, group, param, start, grads, made)
            flats = [grad.view(-1) for grad in grads]
            runs = [
                _Twin(optimizer, group, param, start.view(-1)[a:b], [flat[a:b] for flat in flats], made)
                for a, b in _PARTS
            ]
            rows = _Twin(optimizer, group, param, start[2:5], [grad[2:5] for grad in grads], made)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise OptimizerError(
            f"{name} cannot update a part of a parameter by its gradient alone ({text}); {_REMEDY}"
        ) from error
    for kind, value in whole.state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != start.shape:
            raise OptimizerError(
                f"{name} keeps {kind} in the shape {list(value.shape)} of a parameter in {list(start.shape)}, so that "
                f"a rank cannot update a part alone; {_REMEDY}"
            )
        if value is not None and not isinstance(value, Tensor | float | int):
            raise OptimizerError(
                f"{name} keeps {kind}, a {type(value).__name__}, which no checkpoint holds; {_REMEDY}"
            )
    joined = {kind: torch.cat([run.results()[kind] for run in runs]) for kind in whole.results()}
    for kind, value in whole.results().items():
        if not (torch.equal(value.view(-1), joined[kind]) and torch.equal(value[2:5], rows.results()[kind])):
            raise OptimizerError(
                f"{name} is not elementwise: its update of a part of a parameter is not that part of its update, "
                f"first in {kind}; {_REMEDY}"
            )
    tensors = {k: v.dtype for k, v in whole.state.items() if isinstance(v, Tensor) and v.numel() != 1}
    numbers = {k: v for k, v in whole.state.items() if k not in tensors and v is not None}
    return Kinds(tensors, numbers)


_REMEDY = "use an elementwise one, as AdamW, or Muon by get_megatron_optimizer, which brings whole matrices to a rank"


class _Twin:
    """The parameter and state after some steps by a copy of an optimizer, which has that parameter alone."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        param: nn.Parameter,
        start: Tensor,
        grads: Sequence[Tensor],
        made: Mapping[str, Any],
    ) -> None:
        self.param = nn.Parameter(start.clone())
        every = [p for own in optimizer.param_groups for p in own["params"]]
        memo = {id(p): self.param for p in every}  # so that nothing large is copied
        skipped = ("param_groups", "state", "step", "zero_grad")
        twin = object.__new__(type(optimizer))
        vars(twin).update(
            (name, OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo))
            for name, value in vars(optimizer).items()
            if name not in skipped
        )
        settings = copy.deepcopy(
            {name: value for name, value in group.items() if name not in ("params", "param_names")}
        )
        if not isinstance(settings.get("lr"), Tensor):
            settings["lr"] = settings.get("lr") or 0.01  # a schedule may begin with 0
        twin.param_groups = [{**settings, "params": [self.param]}]
        twin.state = defaultdict(dict)
        if made:
            twin.state[self.param] = {kind: self._as_made(value, param) for kind, value in made.items()}
        for grad in grads:
            self.param.grad = grad.clone()
            twin.step()
        self.state: dict[str, Any] = dict(twin.state[self.param])

    def _as_made(self, value: Any, param: nn.Parameter) -> Any:
        if not isinstance(value, Tensor) or value.shape != param.shape:
            return copy.deepcopy(value)
        first = local_part(value).reshape(-1)[:1]
        return torch.full_like(self.param, first.item() if first.numel() else 0.0, dtype=value.dtype)

    def results(self) -> dict[str, Tensor]:
        """Returns the parameter and the tensors and numbers of its state, flat where the parameter is."""
        tensors = {kind: v for kind, v in self.state.items() if isinstance(v, Tensor) and v.shape == self.param.shape}
        return {"the parameter": self.param.detach(), **tensors}
