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
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import OptimizerError
from ..base.parameters import local_part
from .main_params import MainParam
from .update_rules import Numbers, PlainStates, SkippableRule

_SHAPES = ((6, 35), (130, 1, 1, 130))
"""Of the probe's tensors. The second has the dims of a convolution's, and the size of a large matrix."""
_SCALES = (0.1, 10.0, 1e-3, 100.0)
"""Of the gradients of the probe's steps: limits of norms hold for some and not for others."""
_CHECKS = "_need_device_dtype_check_for_fused"
"""The name of an attribute that a first step of torch's fused rules clears."""


class NotElementwiseError(OptimizerError):
    """An optimizer's update of a part of a parameter is not that part of its update."""


Kept = Mapping[str, Tensor | float]
"""What an optimizer keeps of a parameter, by the names in its state: tensors in the parameter's shape, and numbers."""


class TorchRule:
    """Runs a torch optimizer over main tensors, in the place of the parameters that it was built with.

    Its groups stay, so that schedules of either optimizer set them.

    Args:
        optimizer: built over parameters of the model. Its state goes on.
        params: the main tensors of all its parameters, by parameter; others of its groups are left out.

    Raises:
        OptimizerError: its update of a part is not the part of its update.
    """

    skips_on_device = False
    stored = PlainStates()
    """As a `SkippableRule`'s: of an average alone, never of its state."""

    def __init__(self, optimizer: Optimizer, params: Mapping[nn.Parameter, MainParam]) -> None:
        self.optimizer = optimizer
        self._examples: dict[Tensor, Kept] = {}
        """Of each main tensor what the optimizer keeps of the probe's. `take` adds."""
        self.left_out: set[nn.Parameter] = set()
        """Parameters of its groups that were frozen when `take` looked."""
        self._absent: dict[Tensor, dict[str, Tensor]] = {}
        """Zeros to load into, by main tensor and kind, where the optimizer has no state yet. `state_of` adds them.
        `set_numbers` makes them the state or drops them, and `update` drops them."""
        self.take(optimizer.param_groups, params)

    def take(self, groups: Sequence[dict[str, Any]], params: Mapping[nn.Parameter, MainParam]) -> None:
        """Puts main tensors into some of the optimizer's groups, and parts of the state it has made, or raises first.

        Args:
            params: see the class.

        Raises:
            NotElementwiseError: see :func:`probe`.
        """
        state = self.optimizer.state
        held = [{param: params[param] for param in group["params"] if param in params} for group in groups]
        for group, of_group in zip(groups, held, strict=True):
            for dtype in {p.main.dtype for p in of_group.values()}:
                alike = [param for param, p in of_group.items() if p.main.dtype == dtype]
                param = max(alike, key=lambda param: param.ndim)  # tells a number from a tensor of one element
                example = probe(self.optimizer, group, of_group[param], state.get(param, {}))
                self._examples |= {of_group[param].main: example for param in alike}
        for group, of_group in zip(groups, held, strict=True):
            self.left_out = self.left_out.union(group["params"]) - params.keys()
            for param, p in of_group.items():
                if made := state.pop(param, None):
                    state[p.main] = {kind: self._part_of(kind, value, p) for kind, value in made.items()}
            group["params"] = [p.main for p in of_group.values()]

    def _part_of(self, kind: str, value: Any, p: MainParam) -> Any:
        """Returns this rank's part of a state that was made for a whole parameter."""
        if not _is_part(self._examples[p.main].get(kind)):
            return value
        return p.part_of(value).to(p.main.dtype if value.dtype == p.param.dtype else value.dtype, copy=True)

    def update(
        self, gradients: Mapping[Tensor, Tensor], is_finite: Tensor, *unused: Tensor | Mapping[Tensor, Tensor] | None
    ) -> None:
        """Updates every main tensor that has a gradient. `MegatronOptimizer` has asked whether it is finite.

        Args:
            gradients: by main tensor, in its dtype, and multiplied.
        """
        self._absent.clear()
        for main, gradient in gradients.items():
            main.grad = gradient
        try:
            type(self.optimizer).step(self.optimizer)
        finally:
            for main in gradients:  # else the gradient's memory would outlive the model's own reference to it
                main.grad = None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def take_back(self, mains: Iterable[Tensor]) -> None:
        """Does nothing: no step is skipped once it was made."""

    def share_state(self) -> None:
        """Checks that the state is what the probe has seen, because checkpoints hold that alone.

        Raises:
            OptimizerError: names what differs.
        """
        name, state = type(self.optimizer).__name__, self.optimizer.state
        for main in state.keys() - self.left_out:
            kept = {kind for kind, value in state[main].items() if value is not None}
            if kept and (differing := kept ^ self._examples.get(main, {}).keys()):
                raise OptimizerError(
                    f"the state of {name} has other kinds than at construction, {', '.join(sorted(differing))}, which "
                    "no checkpoint would hold; keep state from the first step on, as zeros if need be, in "
                    "self.state[param], and give settings before shard_optimizer"
                )

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """Returns the state tensors of a main tensor by kind. Zeros to load into where there is no state."""
        tensors = {kind: example for kind, example in self._examples[main].items() if _is_part(example)}
        if state := self.optimizer.state.get(main):
            return {kind: state[kind] for kind in tensors}
        if main not in self._absent:
            self._absent[main] = {kind: torch.zeros_like(main, dtype=like.dtype) for kind, like in tensors.items()}
        return self._absent[main]

    def numbers_of(self, main: Tensor) -> Numbers | None:
        """Returns the numbers of a main tensor's state. None if it has no state."""
        state = self.optimizer.state.get(main)
        numbers = [kind for kind, example in self._examples[main].items() if not _is_part(example)]
        return {kind: float(state[kind]) for kind in numbers} if state else None

    def set_numbers(self, main: Tensor, numbers: Numbers | None) -> None:
        """Continues from `numbers`, once the tensors of `state_of` are filled."""
        tensors = self.state_of(main)
        self._absent.pop(main, None)
        if numbers is None:
            self.optimizer.state.pop(main, None)
            return
        examples = self._examples[main].items()
        of_main = {kind: _like(like, numbers.get(kind, 0)) for kind, like in examples if not _is_part(like)}
        self.optimizer.state[main] = of_main | tensors


UpdateRule = SkippableRule | TorchRule
"""What `MegatronOptimizer` makes updates with. Main tensors are in the groups of its `optimizer`."""


def _is_part(example: object) -> TypeGuard[Tensor]:
    """Returns whether what an optimizer keeps of the probe's tensor is cut as that is."""
    return isinstance(example, Tensor) and example.numel() != 1


def _like(example: Tensor | float, value: float) -> Tensor | float:
    return torch.full_like(example, value) if isinstance(example, Tensor) else type(example)(value)


_REMEDY = (
    "take an elementwise one, as AdamW, or Muon by get_megatron_optimizer, or leave the model whole on each rank, by "
    "DistributedDataParallelConfig(), where the optimizer steps without shard_optimizer"
)


def probe(optimizer: Optimizer, group: Mapping[str, Any], p: MainParam, made: Mapping[str, Any]) -> Kept:
    """Steps twins of an optimizer over small tensors, whole and in parts, and compares all bits.

    Args:
        group: the settings of the update.
        p: one of the group's parameters: the twins have the device and dtype of its main tensor.
        made: what the optimizer keeps of it, with which the twins begin.

    Returns:
        What the optimizer keeps of a tensor.

    Raises:
        NotElementwiseError: the results differ, the optimizer keeps what a checkpoint does not hold, or its step needs
            more than gradients.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise NotElementwiseError(
            f"train() and eval() of {name} write parameters between steps, where no rank publishes its part; {_REMEDY}"
        )
    for shape in _SHAPES:
        start, *grads = (tensor.to(p.main) for tensor in _inputs(shape))
        try:
            with torch.random.fork_rng(devices=[]):
                results = [
                    _after_steps(optimizer, group, begin, of_steps, made, p.param.shape)
                    for begin, *of_steps in zip(*map(_cut, (start, *grads)), strict=True)
                ]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise NotElementwiseError(
                f"{name} cannot update a part of a parameter alone ({text}); {_REMEDY}"
            ) from error
        kept = results[0][0]
        whole, *parts = (others | of_param for of_param, others in results)
        for kind, value in whole.items():
            held = value.shape == start.shape if _is_part(value) else isinstance(value, Tensor | float | int)
            if not held:
                raise NotElementwiseError(
                    f"{name} keeps {kind}, which is neither a number of each parameter nor a tensor in its shape, so "
                    f"that no rank has its part, and no checkpoint holds it; {_REMEDY}"
                )
            expected = _cut(value)[1:] if _is_part(value) else [torch.as_tensor(value)] * len(parts)
            found = [torch.as_tensor(part.get(kind, torch.nan)) for part in parts]
            if not all(map(torch.equal, expected, found)):
                fused = "; leave out fused=True, whose kernels on CPUs round the ends of tensors otherwise, or "
                raise NotElementwiseError(
                    f"{name} is not elementwise: its update of a part of a parameter is not that part of its update, "
                    f"first in {kind}{fused if group.get('fused') else '; '}{_REMEDY}"
                )
    return kept


def _inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """Returns a parameter and gradients, which are orthogonal to its rows: some rules change such ones alone."""
    source = torch.Generator().manual_seed(1)
    start, *grads = (torch.randn(shape, generator=source) for _ in range(1 + len(_SCALES)))
    rows = nn.functional.normalize(start.flatten(1))
    for grad, scale in zip(grads, _SCALES, strict=True):
        grad -= ((grad.flatten(1) * rows).sum(1, keepdim=True) * rows).view_as(grad)
        grad *= scale
    grads[-1][1:3] = 0.0
    return [start, *grads]


def _cut(tensor: Tensor) -> list[Tensor]:
    """Returns a tensor, some rows, and runs of elements: inside a row, over the ends of rows, empty, whole rows."""
    n = tensor.numel()
    ends = ((0, 1), (1, n // 3), (n // 3, n // 3), (n // 3, n - n // 6), (n - n // 6, n))
    return [tensor, tensor[2:5], *(tensor.reshape(-1)[start:end] for start, end in ends)]


def _after_steps(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    start: Tensor,
    grads: Sequence[Tensor],
    made: Mapping[str, Any],
    shape: torch.Size,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps a copy of an optimizer, which has one parameter alone.

    Returns:
        What is kept of the parameter, and what else has to agree.
    """
    param = nn.Parameter(start.clone())
    # All parameters are this one in the copy, so that nothing large is copied.
    memo: dict[int, Any] = {id(other): param for own in optimizer.param_groups for other in own["params"]}
    own = {name: value for name, value in vars(optimizer).items() if not _is_torchs(name)}
    settings = {
        key: copy.deepcopy(value, memo) for key, value in group.items() if key not in ("params", "param_names")
    }
    if "lr" in settings:  # a schedule may begin with 0
        settings["lr"] = torch.full_like(settings["lr"], 0.01) if isinstance(settings["lr"], Tensor) else 0.01
    twin = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    vars(twin).update(
        copy.deepcopy(own, memo) | hooks, param_groups=[{**settings, "params": [param]}], state=defaultdict(dict)
    )
    if made:
        twin.state[param] = {kind: _begun(kind, value, shape, param) for kind, value in made.items()}
    for grad in grads:
        param.grad = grad.clone()
        twin.step()
    kept = {kind: value for kind, value in twin.state.pop(param, {}).items() if value is not None}
    others = {
        f"{key} of its group": value
        for key, value in twin.param_groups[0].items()
        if isinstance(value, Tensor | float | int) and not _is_part(value)
    }
    names = {name for name in vars(twin) if not _is_torchs(name) and _differs(own.get(name), getattr(twin, name))}
    outside = dict.fromkeys(f"{name} outside of its state" for name in [*sorted(names), *twin.state])
    return kept, {"the parameter": param.detach(), **others, **outside}


def _is_torchs(name: str) -> bool:
    """Returns whether an attribute is torch's, such as hooks, rather than a setting or state of a class."""
    return hasattr(Optimizer, name) or name.endswith("_hooks") or name in ("param_groups", "state", _CHECKS)


def _differs(before: Any, after: Any) -> bool:
    """Returns whether steps have changed what an optimizer keeps in itself: numbers, tensors, optimizers, lists."""
    if type(before) is not type(after):
        return True
    if isinstance(before, Optimizer):
        return _differs([before.state, before.param_groups], [after.state, after.param_groups])
    if isinstance(before, Mapping):
        return before.keys() != after.keys() or any(_differs(value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        return len(before) != len(after) or any(map(_differs, before, after))
    if isinstance(before, Tensor):
        return not isinstance(before, nn.Parameter) and not torch.equal(before, after)
    return isinstance(before, int | float | str) and before != after


def _begun(kind: str, value: Any, shape: torch.Size, like: Tensor) -> Any:
    """Returns for `like` what is kept of a parameter of `shape`: of all elements what is kept of the first."""
    if not isinstance(value, Tensor) or value.shape != shape or kind == "step":
        return copy.deepcopy(value)
    first = local_part(value).reshape(-1)[:1].tolist()
    return torch.full_like(like, *(first or [0.0]), dtype=value.dtype)
