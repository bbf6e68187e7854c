"""A scenario, and the runs that it goes through: a plain module in one process, and a wrapper on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.dist_checkpointing import load_model_state_dict
from core.distributed import TorchFullyShardedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import batches, build, full, loss_of, toy
from tests.unit.distributed._unused import give_unused_zero_gradients

KINDS = (*_toys.WRAPPERS, "zero2_every_micro_batch")
SHARDED = ("zero1", "zero1_overlap", "zero2", "zero2_overlap", "zero2_every_micro_batch", "zero3")
HIDDEN = {"zero3": "was used outside of a forward, where each rank holds its shard alone|this rank holds a flat range"}
"""Parameters are whole in forward and backward, and inside `whole_parameters`."""
BUFFERED = ("ddp", "ddp_overlap", *SHARDED)


class Run:
    """A model in training, under a wrapper or plain; what a scenario does to it means the same in both."""

    model: nn.Module
    """What is called."""
    inner: nn.Module
    """What holds the parameters."""
    is_plain: bool

    def __init__(self, optimizer: Callable[[Run], Any] | None) -> None:
        self.optimizer = optimizer(self) if optimizer else None
        self.outputs: dict[str, Tensor] = {}  # what a scenario wants compared with the weights
        self.reduced: dict[str, Tensor] = {}  # gradients that it wants compared before they are rounded into weights

    def train(self, steps: int = 1, *, micro_batches: int = 2, first: int = 0, zeroes: bool = True) -> None:
        for step in range(first, first + steps):
            if zeroes:
                self.zero()
            for index in range(micro_batches):
                self.backward(step + index, is_last=index == micro_batches - 1)
            self.finish()
            self.step()

    def compute(self, index: int, *, micro_batches: int = 1) -> None:
        """Computes the gradients of some micro-batches, and finishes them."""
        self.zero()
        for place in range(micro_batches):
            self.backward(index + place, is_last=place == micro_batches - 1)
        self.finish()

    def compare_gradients(self, when: str) -> None:
        self.reduced |= {f"{name} {when}": gradient for name, gradient in _toys.gradients(self.model).items()}

    def finish_and_step(self) -> None:
        self.finish()
        self.step()

    def step(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in self.inner.state_dict().items()} | self.outputs

    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, values: dict[str, Tensor]) -> None:
        """Loads whole tensors, as the users of each wrapper do."""
        if isinstance(self.model, TorchFullyShardedDataParallel):  # whose `load_state_dict` does nothing
            load_model_state_dict(self.inner, values)
        else:
            self.model.load_state_dict(values)

    def forget(self) -> None:
        """Is called where gradients were zeroed otherwise than by `zero`."""

    def zero(self) -> None: ...
    def backward(self, index: int, *, is_last: bool = True) -> None: ...
    def finish(self) -> None: ...

    def forward(self, index: int = 0) -> Tensor:
        return self.model(batch(0, index))


class Plain(Run):
    """One process that goes through the batches of both ranks, and adds them as two ranks do.

    Args:
        adds_ranks_first: sum each micro-batch over ranks, then micro-batches, instead of the other way round.
    """

    is_plain = True

    def __init__(
        self, module: nn.Module, optimizer: Callable[[Run], Any] | None, *, adds_ranks_first: bool = False
    ) -> None:
        self.model = self.inner = module
        self.adds_ranks_first = adds_ranks_first
        self.of_ranks: list[dict[nn.Parameter, Tensor]] = [{}, {}]
        super().__init__(optimizer)

    def zero(self) -> None:
        self.forget()
        self.inner.zero_grad()

    def forget(self) -> None:
        self.of_ranks = [{}, {}]

    def backward(self, index: int, *, is_last: bool = True) -> None:
        found = [self.gradients(rank, index) for rank in range(2)]
        if self.adds_ranks_first:
            found = [_added(found), {}]
        for sums, gradients in zip(self.of_ranks, found, strict=True):
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient

    def gradients(self, rank: int, index: int) -> dict[nn.Parameter, Tensor]:
        trained = [parameter for parameter in self.inner.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss_of(self.model, batch(rank, index)), trained, allow_unused=True)
        return {p: g.to_dense() if g.is_sparse else g for p, g in zip(trained, found, strict=True) if g is not None}

    def finish(self) -> None:
        for parameter, total in _added(self.of_ranks).items():
            parameter.grad = total * 0.5 if parameter.grad is None else parameter.grad + total * 0.5
        give_unused_zero_gradients(self.inner.parameters())
        self.forget()


def _added(of_ranks: list[dict[nn.Parameter, Tensor]]) -> dict[nn.Parameter, Tensor]:
    one, other = of_ranks
    return one | other | {parameter: one[parameter] + other[parameter] for parameter in one.keys() & other.keys()}


class Wrapped(Run):
    is_plain = False

    def __init__(self, kind: str, module: nn.Module, optimizer: Callable[[Run], Any] | None, **settings: Any) -> None:
        if kind == "zero2_every_micro_batch":
            kind, settings = "zero2", {"reduce_every_micro_batch": True, **settings}
        self.model = build(kind, module, **settings)
        self.inner = self.model.module
        super().__init__(optimizer)

    def whole_parameters(self) -> AbstractContextManager[None]:
        return self.model.whole_parameters()

    def zero(self) -> None:
        self.model.zero_grad_buffer()

    def backward(self, index: int, *, is_last: bool = True) -> None:
        with nullcontext() if is_last else self.model.no_sync():
            loss_of(self.model, batch(dist.get_rank(), index)).backward()

    def finish(self) -> None:
        finalize_model_grads([self.model])


def batch(rank: int, index: int) -> Tensor:
    return batches(rank, 8)[index]


def megatron(run: Run, **config: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(**{"lr": 0.05, "clip_grad": 0.0, **config}), [run.model])


def bf16_toy() -> nn.Module:
    return toy(tied=False).bfloat16()


def torchs(run: Run) -> Any:
    return torch.optim.SGD(run.inner.parameters(), lr=0.05, momentum=0.9)


SCENARIOS: dict[str, Scenario] = {}
"""By name; `scenario` fills it when the files of scenarios are imported."""


class Scenario:
    """One way to use a model.

    Args:
        go: does it.
        make: the model.
        optimizer: what updates it.
        raises: by kind of wrapper, the pattern of the error that it has to raise instead.
        settings: fields of the wrapper's config, by kind.
        rtol: of the comparison, where an addition is made in another order; 0 is bitwise.
        rtol_of: the same for single kinds.
        additions_of: how many additions a gradient has, for kinds that make them in another order than the oracle.
    """

    def __init__(self, go: Callable[[Run], None], **kwargs: Any) -> None:
        self.go = go
        self.make: Callable[[], nn.Module] = kwargs.pop("make", lambda: toy(tied=False))
        self.optimizer: Callable[[Run], Any] | None = kwargs.pop("optimizer", megatron)
        self.raises: dict[str, str] = kwargs.pop("raises", {})
        self.only: tuple[str, ...] = kwargs.pop("only", KINDS)
        self.rtol: float = kwargs.pop("rtol", 0.0)
        self.rtol_of: dict[str, float] = kwargs.pop("rtol_of", {})
        self.additions_of: dict[str, int] = kwargs.pop("additions_of", {})
        self.settings: dict[str, Any] = kwargs.pop("settings", {})
        assert not kwargs


def scenario(name: str = "", **kwargs: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Makes a scenario of a function, with the function's name, or another one next to it."""

    def register(go: Callable[[Run], None]) -> Callable[[Run], None]:
        SCENARIOS[name or go.__name__] = Scenario(go, **kwargs)
        return go

    return register


def for_kinds(kinds: tuple[str, ...], pattern: str) -> dict[str, str]:
    return dict.fromkeys(kinds, pattern)


def largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


class Failure(Exception):
    """An error that is raised in a forward or backward, and caught by the loop."""


@contextmanager
def failing(register: Callable[..., Any]) -> Iterator[None]:
    """Makes the module whose `register_..._hook` is given raise, and catches the error."""
    handle = register(_fail)
    try:
        yield
    except Failure:
        return
    finally:
        handle.remove()
    raise AssertionError("what was to fail did not")


def _fail(*unused: object) -> None:
    raise Failure
