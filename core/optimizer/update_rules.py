"""AdamW, SGD and Lion on plain local tensors, with results that do not depend on how a tensor is sharded.

torch's fused CPU kernels are four times as fast as its foreach ones. But scalar code computes the elements at the end
of a tensor that do not fill a vector register, and rounds differently (it contracts multiply and add differently).
Sharding moves that end, so a sharded run would drift from a replicated one by an ulp a step. Here the ends of all
tensors are copied into one padded tensor, so that vector code computes every element.

Gradients are multiplied, and converted from low precision, a chunk at a time right before the kernel that reads them,
and parameters in low precision are written right after it. No second copy of the gradients is allocated, and on a CPU
the chunk stays in its cache, so that main memory is read and written once for each tensor of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.device import is_on_gpu
from ..base.errors import ConfigError
from ..process_groups_config import ProcessGroupCollection
from .adamw_in_one_pass import update_in_one_pass
from .main_params import MainParam
from .optimizer_config import OptimizerConfig
from .param_groups import ConfigOverrides

Columns = list[list[Tensor]]
"""Parameters, their gradients, and one list for each kind of state."""

Kernel = Callable[[Columns], None]

ADAM_STATE = ("exp_avg", "exp_avg_sq")
LION_STATE = ("exp_avg",)

CHUNK_ELEMENTS = 1 << 18
"""Elements that are converted at a time on a CPU: with the tensors of their update 5 MiB, which its cache holds."""
GPU_CHUNK_ELEMENTS = 1 << 24
"""The same on a GPU, where launches would take longer than the update of fewer."""

VECTOR_ELEMENTS = 16
"""At least the elements of a CPU's widest vector register, and what the kernels' threads split by (64 bytes)."""


Numbers = Mapping[str, float]
"""What a rule keeps of one parameter besides tensors, such as the count of its steps, ``step``."""


MASTER = "master"
"""Kind of what an update writes to in `PlainStates`: a main tensor."""


class PlainStates:
    """What a rule reads and writes of a parameter, by kind: `MASTER`, the rule's state, an average. Here all is plain.

    `low_precision.states.StoredStates` keeps some of it in fewer than 32 bits.
    """

    def read(self, main: Tensor, kind: str, plain: Tensor) -> Tensor:
        """Returns a tensor of a parameter to be changed and given to `write`: `plain`, or a copy in fp32."""
        return plain

    def write(self, main: Tensor, kind: str, values: Tensor, step: int) -> None:
        """Stores what `read` returned, if that is a copy. Random bits of its rounding are those of this step."""

    def update(self, kernel: Kernel, rule: SkippableRule, pairs: Columns, names: Sequence[str]) -> Columns:
        """Updates the parameters that are not plain, and returns the other pairs. Arguments as `_update`'s."""
        return pairs

    def settle(self) -> None:
        """Ends an update of parameters, state or averages. All ranks call it."""

    def for_checkpoint(self, main: Tensor, kind: str, plain: Tensor) -> Tensor:
        """Returns a tensor to save or to load into: `plain`, or a copy in fp32 that `take_copies` stores."""
        return plain

    def note_loaded(self) -> None:
        """Takes note that a checkpoint has filled copies of `for_checkpoint`."""

    def take_copies(self) -> None:
        """Stores what was loaded. All ranks call it."""

    def tensors(self, params: Iterable[MainParam]) -> Iterable[Tensor]:
        """Returns the memory of what is not plain of some parameters, but for the parameters themselves."""
        return ()


class SkippableRule(torch.optim.Optimizer):
    """An update that the device can skip without the host: its kernels write nothing if `found_inf` is 1."""

    skips_on_device = True
    """Whether the device decides if an update is made, so that the host need not wait before it."""

    found_inf: Tensor | None = None
    """A 0-dim fp32 tensor, in torch's form: 1 skips the update, 0 and None make it. `update` sets it before `step` and
    clears it after."""

    state_names: tuple[str, ...] = ()
    """Names of the state tensors of each parameter."""

    stored = PlainStates()
    """How state and masters are kept. Set once, by the optimizer's builder or `AveragedWeights`."""

    table: str = ""
    """What updates each parameter, as text for a log. Empty if all have one rule."""

    factor: Tensor | None = None
    """The factor of gradients as they are read, a 0-dim tensor. None is 1. Set and cleared as `found_inf`."""

    _gradients: Mapping[Tensor, Tensor] | None = None
    """The gradients of `update` by parameter. None where torch's `step` was called, which reads each parameter's
    ``grad``. Set and cleared as `found_inf`."""

    _weights: MutableMapping[Tensor, Tensor] = {}
    """The weights of `update` that are not written yet. Set and cleared as `found_inf`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The rule itself."""
        return self

    def update(
        self,
        gradients: Mapping[Tensor, Tensor],
        is_finite: Tensor,
        factor: Tensor | None,
        weights: MutableMapping[Tensor, Tensor],
    ) -> None:
        """Updates every parameter that has a gradient, unless `is_finite` is False.

        Args:
            gradients: by parameter, in its shape and in any dtype. They are not written to.
            factor: of all gradients, 0-dim; None is 1.
            weights: by parameter, its copy in low precision. The rule may write updated values to some of them, and
                removes these.
        """
        self.found_inf, self.factor = is_finite.logical_not().float(), factor
        self._gradients, self._weights = gradients, weights
        try:
            self.step()
            self.stored.settle()
        finally:
            self.found_inf = self.factor = self._gradients = None
            self._weights = {}

    def move_to(self, device: torch.device) -> None:
        """Brings `found_inf` and `factor` to a device: parameters that are offloaded are on another one."""
        self.found_inf = None if self.found_inf is None else self.found_inf.to(device)
        self.factor = None if self.factor is None else self.factor.to(device)

    def gradient_of(self, param: Tensor) -> Tensor | None:
        """Returns a parameter's gradient as it came, before it is multiplied."""
        return param.grad if self._gradients is None else self._gradients.get(param)

    def as_read(self, grads: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Returns gradients of one device in `dtype`, multiplied by `factor`: the same where that changes nothing."""
        if {grad.dtype for grad in grads} - {dtype}:
            copies = [torch.empty_like(grad, dtype=dtype) for grad in grads]
            torch._foreach_copy_(copies, list(grads))
            if self.factor is not None:
                torch._foreach_mul_(copies, self.factor.to(copies[0].device, dtype))
            return copies
        if self.factor is None or not grads:
            return [grad.contiguous() for grad in grads]  # else they would be written to, as other columns are
        return torch._foreach_mul(list(grads), self.factor.to(grads[0].device, dtype))

    def take_back(self, mains: Iterable[Tensor]) -> None:
        """Lowers the step counts of `mains` by one, after the device has skipped the step."""
        for main in mains:
            self.state[main]["step"] -= 1

    def state_names_of(self, param: Tensor) -> tuple[str, ...]:
        """Returns the names of the state tensors of one parameter."""
        return self.state_names

    def share_state(self) -> None:
        """Makes `state` have the tensors of this rank's parts. All ranks call it before it is read or loaded."""

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """Returns the state tensors of a parameter by name, created as zeros where they are absent."""
        names = self.state_names_of(main)
        state = ensure_state(self, main, names)
        return {name: self.stored.for_checkpoint(main, name, state[name]) for name in names}

    def read(self, main: Tensor, kind: str) -> Tensor:
        """Returns a tensor of a parameter's state, or its `MASTER`, to be changed in fp32 and given to `write`."""
        plain = main if kind == MASTER else ensure_state(self, main, (kind,))[kind]
        return self.stored.read(main, kind, plain)

    def write(self, main: Tensor, kind: str, values: Tensor) -> None:
        """Stores what `read` returned."""
        self.stored.write(main, kind, values, self.state[main]["step"])

    def numbers_of(self, main: Tensor) -> Numbers:
        """Returns the count of a parameter's steps."""
        return {"step": self.state[main].get("step", 0)}

    def set_numbers(self, main: Tensor, numbers: Numbers | None) -> None:
        """Makes the next step of a parameter its ``step + 1``-th."""
        self.state[main]["step"] = 0 if numbers is None else int(numbers["step"])


class AdamW(SkippableRule):
    """AdamW with torch's semantics: decoupled weight decay, bias correction, a step count for each parameter."""

    state_names = ADAM_STATE

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures, hence no loss to return
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            update_by_adamw(self, group)


class SGD(SkippableRule):
    """SGD with torch's semantics: weight decay added to the gradient, momentum without dampening."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.state_names = ("momentum_buffer",) if momentum else ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures, hence no loss to return
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            pairs = [pair for batch in count_steps(self, group["params"]).values() for pair in batch]
            _update(partial(_sgd, group, self), self, pairs, self.state_names)


def lion(group: dict[str, Any], columns: Columns) -> None:
    """Updates parameters by Lion (Chen et al., 2023): the sign of a mix of gradient and momentum."""
    params, grads, momenta = columns
    signs = torch._foreach_lerp(momenta, grads, 1 - group["betas"][0])
    torch._foreach_sign_(signs)
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(params, signs, alpha=-group["lr"])
    torch._foreach_lerp_(momenta, grads, 1 - group["betas"][1])


def update_by_adamw(rule: SkippableRule, group: dict[str, Any]) -> None:
    """Updates every parameter of a group that has a gradient, by the group's settings."""
    for count, pairs in count_steps(rule, group["params"]).items():
        in_one_pass = partial(
            update_in_one_pass, group=group, count=count, found_inf=rule.found_inf, factor=rule.factor
        )
        _update(partial(_adamw, group, count, rule), rule, pairs, ADAM_STATE, in_one_pass)


def _adamw(group: dict[str, Any], count: int, rule: SkippableRule, columns: Columns) -> None:
    params, grads, exp_avgs, exp_avg_sqs = columns
    steps = torch.full((), count, dtype=torch.float32, device=params[0].device)  # a fill does not wait for the device
    beta1, beta2 = group["betas"]
    options = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], **_common_options(group, rule)}
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], [steps] * len(params), amsgrad=False, **options)


def _sgd(group: dict[str, Any], rule: SkippableRule, columns: Columns) -> None:
    params, grads, *buffers = columns
    options = {"momentum": group["momentum"], "dampening": 0.0, "nesterov": False}
    options["is_first_step"] = False  # zeroed buffers give what a missing one does
    options |= _common_options(group, rule)
    torch._fused_sgd_(params, grads, buffers[0] if buffers else [], **options)


def _common_options(group: dict[str, Any], rule: SkippableRule) -> dict[str, Any]:
    """Returns what torch's fused rules have in common."""
    return {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": False, "found_inf": rule.found_inf}


MakeGroups = Callable[[Sequence[MainParam]], list[dict[str, Any]]]
"""Makes groups of some parameters, by weight decay and learning rate (`param_groups.build_param_groups`)."""


class RuleBuilder:
    """Builds the update rule that a config names: AdamW or SGD for all parameters. A plug-in's class derives from it.

    `get_megatron_optimizer` calls the methods on every rank, in the order below.

    Args:
        overrides: the caller's settings of single parameters.
    """

    def __init__(self, config: OptimizerConfig, overrides: ConfigOverrides | None = None) -> None:
        self.config, self.overrides = config, overrides or {}

    def choose(self, params: Sequence[MainParam]) -> dict[MainParam, str]:
        """Returns why each parameter of this pipeline stage is updated otherwise than `config` says, else ``""``."""
        return dict.fromkeys(params, "")

    def groups(self, reasons: Mapping[MainParam, str], make: MakeGroups) -> list[dict[str, Any]]:
        """Makes the groups of this stage's parameters."""
        return make(list(reasons))

    def check(self, of_model: Mapping[str, str]) -> None:
        """Checks what `choose` has returned on all stages, by the names of parameters.

        Raises:
            ConfigError: there is none to update.
        """
        if not of_model:
            raise ConfigError("the model has no trainable parameter; nothing is left for an optimizer to do")

    def build(
        self, groups: list[dict[str, Any]], reasons: Mapping[MainParam, str], model_groups: ProcessGroupCollection
    ) -> SkippableRule:
        """Builds the rule over `groups` of main tensors."""
        config = self.config
        rates: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.optimizer == "sgd":
            return SGD(groups, momentum=config.sgd_momentum, **rates)
        return AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, **rates)


def ensure_state(rule: torch.optim.Optimizer, param: Tensor, names: Iterable[str]) -> dict[str, Any]:
    """Returns the state of `param`, created as zeros where it is absent, as its first step would."""
    state: dict[str, Any] = rule.state[param]
    for name in names:
        if name not in state:
            dtype = torch.promote_types(param.dtype, torch.float32)
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return state


def count_steps(rule: SkippableRule, params: list[Tensor]) -> dict[int, list[list[Tensor]]]:
    """Counts a step for every parameter with a gradient, and groups non-empty ones, with theirs, by their count."""
    batches: dict[int, list[list[Tensor]]] = {}
    gradients = rule._gradients
    for p in params:
        grad = p.grad if gradients is None else gradients.get(p)  # no call of `gradient_of` for each parameter
        if grad is None:
            continue
        state = rule.state[p]
        state["step"] = state.get("step", 0) + 1
        if p.numel():
            batches.setdefault(state["step"], []).append([p, grad])
    return batches


def _update(
    kernel: Kernel,
    rule: SkippableRule,
    pairs: list[list[Tensor]],
    names: tuple[str, ...],
    in_one_pass: Callable[[list[list[Tensor]]], list[list[Tensor]]] = lambda rows: rows,
) -> None:
    """Runs `kernel` over the columns parameters, gradients and states, a chunk of a device and dtype at a time.

    Writes the updated values to the weights in low precision that `rule` has of these parameters.

    Args:
        pairs: parameters and their gradients.
        in_one_pass: updates rows of parameter, gradient, states, and weight where there is one; returns those that it
            leaves to `kernel`.
    """
    batches: dict[tuple[torch.device, torch.dtype, bool], list[list[Tensor]]] = {}
    for p, grad in rule.stored.update(kernel, rule, pairs, names):
        state, weight = ensure_state(rule, p, names), rule._weights.pop(p, None)
        row = [p, grad, *[state[name] for name in names], *([] if weight is None else [weight])]
        batches.setdefault((p.device, p.dtype, weight is not None), []).append(row)
    for (device, dtype, has_weights), all_rows in batches.items():
        if not (rows := in_one_pass(all_rows)):
            continue
        rule.move_to(device)  # once, rather than for each chunk
        needs_no_copy = rule.factor is None and {row[1].dtype for row in rows} == {dtype}
        elements = GPU_CHUNK_ELEMENTS if is_on_gpu(rows[0][0]) else CHUNK_ELEMENTS
        for chunk in [rows] if needs_no_copy and not has_weights else _chunks(rows, elements):
            mains, grads, *others = zip(*chunk, strict=True)
            weights = others.pop() if has_weights else ()
            columns = [mains, rule.as_read(grads, dtype), *others]
            in_whole_vectors(kernel, [list(row) for row in zip(*columns, strict=True)])
            if weights:
                torch._foreach_copy_(list(weights), list(mains))


def _chunks(rows: Sequence[list[Tensor]], elements: int) -> Iterator[list[list[Tensor]]]:
    """Yields rows in chunks of at least so many elements and less than twice as many.

    Long tensors are cut where a vector ends. One that is not contiguous stays whole.
    """
    chunk, held = [], 0
    for row in rows:
        pieces = [row]
        if row[0].numel() > elements and all(tensor.is_contiguous() for tensor in row):
            pieces = [list(piece) for piece in zip(*[tensor.view(-1).split(elements) for tensor in row], strict=True)]
        for piece in pieces:
            chunk.append(piece)
            held += piece[0].numel()
            if held >= elements:
                yield chunk
                chunk, held = [], 0
    if chunk:
        yield chunk


def in_whole_vectors(kernel: Kernel, rows: list[list[Tensor]]) -> None:
    """Calls `kernel` on the columns of `rows`, on a CPU with every length a multiple of a vector's.

    The remainders at the ends of tensors are packed into one padded row, and copied back afterwards.
    """
    elements = VECTOR_ELEMENTS if rows[0][0].device.type == "cpu" else 1
    whole: list[list[Tensor]] = []
    ends: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for row in rows:
        for index, tensor in enumerate(row):
            if not tensor.is_contiguous():
                row[index] = tensor.contiguous()
                copies.append((tensor, row[index]))
        length = row[0].numel() // elements * elements
        flat = [tensor.view(-1) for tensor in row]  # the kernel on CUDA needs equal strides in a row
        if length == row[0].numel():
            whole.append(flat)
            continue
        ends.append([tensor[length:] for tensor in flat])
        if length:
            whole.append([tensor[:length] for tensor in flat])
    packs: list[Tensor] = []
    if ends:
        padding = -sum(row[0].numel() for row in ends) % elements
        zeros = ends[0][0].new_zeros(padding)
        packs = [torch.cat([*column, zeros]) for column in zip(*ends, strict=True)]
        whole.append(packs)
    kernel([list(column) for column in zip(*whole, strict=True)])
    if ends:
        lengths = [row[0].numel() for row in ends] + [padding]
        for column, pack in zip(zip(*ends, strict=True), packs, strict=True):
            torch._foreach_copy_(list(column), list(pack.split(lengths)[:-1]))
    for tensor, copy in copies:
        tensor.copy_(copy)
