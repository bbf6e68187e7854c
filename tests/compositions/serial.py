"""A training in one process, the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from core.base.module_protocol import counting_modules
from core.dist_checkpointing.format.content_hash import splitmix64
from core.distributed.finalize_model_grads import end_step
from core.transformer import Float16Module
from core.transformer.norms import LayerNorm, RMSNorm
from tests.compositions.composition import Composition, Layout
from tests.compositions.data import MicroBatch
from tests.compositions.model import build, layers_of
from tests.compositions.plain_optimizer import PlainOptimizer
from tests.compositions.replica_counts import ReplicaCounts
from tests.compositions.training import Training
from tests.unit._gpt import in_precision
from tests.unit.distributed._unused import give_unused_zero_gradients


class Serial(Training):
    """A training in one process, without a wrapper, on the micro-batches of all replicas."""

    optimizer: PlainOptimizer

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        module = build(composition, Layout(), is_serial=True)
        _use_plain_norms(module)
        self.model, self.module = module, module
        if composition.precision != "fp32":
            in_precision(module, "ddp")
            self.model = Float16Module(module.config, module)
        self.optimizer = PlainOptimizer(composition, module)
        self.start = self._weights()
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._counts = ReplicaCounts(module) if composition.experts == "balanced over replicas" else None
        self._writes_always, self._writes_never = False, False  # running means; else replica 0's micro-batches do
        self._seeds_of_stages = (0, 0)  # of the forward that comes
        if composition.dropout == "by stages":
            (first_of_second,) = layers_of(module, len(module.decoder.layers) // 2)
            first_of_second.register_forward_pre_hook(lambda *_: torch.manual_seed(self._seeds_of_stages[1]) and None)

    @property
    def replicas(self) -> int:
        return 1

    @property
    def number(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.composition.number

    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        return self.optimizer.averaged()

    def inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if batch.starts is None:
            return batch.tokens, batch.labels, {}
        is_hidden = batch.starts.unsqueeze(-1) > torch.arange(batch.starts.shape[1])  # [b, s, s], of earlier documents
        return batch.tokens, batch.labels, {"attention_mask": is_hidden.unsqueeze(1)}

    @contextmanager
    def averaged_inside(self) -> Iterator[None]:
        with self.averaged():
            yield

    def prepare(self, step: int, number: int) -> None:
        replica, place = self._place(number)
        if self.composition.dropout == "by stages":
            draws = torch.Generator().manual_seed(100 * step + replica)
            for _ in range(place + 1):
                drawn = int(torch.randint(1 << 48, (), generator=draws))
            self._seeds_of_stages = (splitmix64(1, drawn) >> 16, splitmix64(2, drawn) >> 16)
        super().prepare(step, number)
        if self._counts is not None:
            self._counts.begin_forward()

    def seed(self, step: int, number: int) -> int:
        return self._seeds_of_stages[0] if self.composition.dropout == "by stages" else super().seed(step, number)

    def counts(self, number: int) -> bool:
        """Returns whether it moves running means: replicas take those of the first one."""
        return not self._writes_never and (self._writes_always or self._place(number)[0] == 0)

    def evaluate(self, step: int) -> None:
        self._writes_always = True  # all replicas evaluate the same
        super().evaluate(step)
        self._writes_always = False

    def _place(self, number: int) -> tuple[int, int]:
        """Returns the replica that runs a micro-batch, and its place there."""
        if self.composition.loop == "train_step on a loader":
            return number % self.composition.shape.dp, number // self.composition.shape.dp
        return number // self.number, number % self.number

    def _look_ahead(self, step: int, numbers: list[int]) -> None:
        if self._counts is not None:
            self._writes_never = True
            try:
                self._counts.look_ahead([partial(self.loss, step, number) for number in numbers])
            finally:
                self._writes_never = False

    def zero(self) -> None:
        self.sums = {}
        if self._counts is not None:
            self._counts.begin_step()
        for layer in counting_modules(self.module):
            layer.clear_step_sums()
        for parameter in self.module.parameters():
            parameter.grad = parameter.main_grad = None  # type: ignore[attr-defined]

    def backward(self, step: int, index: int) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for place in self.together(index):
            numbers = [number for number in range(self.count) if self._place(number)[1] == place]
            self._look_ahead(step, numbers)
            self._add_gradients(step, numbers, trained)

    def _add_gradients(self, step: int, numbers: list[int], trained: list[nn.Parameter]) -> None:
        for number in numbers:
            loss, reported = self.loss(step, number)
            loss = self.optimizer.scale_loss(loss)
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    wide = gradient.double()
                    self.sums[parameter] = self.sums[parameter] + wide if parameter in self.sums else wide
            self.of_step += reported

    def finish_gradients(self) -> None:
        divisor = float(self.of_step[1]) if self.composition.loss == "per token" else 1.0
        for parameter, total in self.sums.items():
            before = getattr(parameter, "main_grad", None)  # where nothing zeroes it
            total = total / divisor if before is None else total / divisor + before.double()
            parameter.main_grad = total.float()  # type: ignore[attr-defined]
        self.sums = {}
        if self._counts is not None:
            self._counts.begin_step()
        give_unused_zero_gradients(self.module.parameters(), "main_grad")
        end_step(counting_modules(self.module), None)
        named = self.module.named_parameters()
        self.curve.gradients = {n: p.main_grad.clone() for n, p in named if p.requires_grad}  # type: ignore

    def change_gradient(self, parameter: nn.Parameter, factor: float | None) -> None:
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        parameter.main_grad = None if factor is None or gradient is None else gradient * factor  # type: ignore[attr-defined]

    def _weights(self) -> dict[str, Tensor]:
        masters = self.optimizer.masters
        weights = {name: masters.get(name, p) for name, p in self.module.named_parameters()}
        weights |= {f"average.{name}": average for name, average in self.optimizer.averages.items()}
        return {name: weight.detach().float().clone() for name, weight in weights.items()}

    def _buffers(self) -> dict[str, Tensor]:
        saved = self.module.state_dict()
        return {name: saved[name].clone() for name, _ in self.module.named_buffers() if name in saved}

    @property
    def _scale(self) -> float:
        return self.optimizer.scale

    def _whole_losses(self) -> list[float]:
        return [(total / weight).item() for total, weight in self.reported]


def _use_plain_norms(model: nn.Module) -> None:
    """Makes norms compute by their formulas, so that a fault in ours shows."""
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.forward = partial(_layer_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, RMSNorm):
            module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]


def _layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return (_normalized(centred, norm.eps) * norm.weight + norm.bias).to(x.dtype)


def _rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return (_normalized(x.double(), norm.eps) * norm.weight).to(x.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
