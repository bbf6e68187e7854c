"""A training in one process, the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from core.transformer import Float16Module
from core.transformer.moe import finish_step, restart_step
from core.transformer.norms import LayerNorm, RMSNorm
from tests.compositions.composition import Composition, Layout
from tests.compositions.data import MicroBatch
from tests.compositions.model import build
from tests.compositions.plain_optimizer import PlainOptimizer
from tests.compositions.training import Training
from tests.functional._runs import in_precision
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

    def zero(self) -> None:
        self.sums = {}
        restart_step([self.module])
        for parameter in self.module.parameters():
            parameter.grad = parameter.main_grad = None  # type: ignore[attr-defined]

    def backward(self, step: int, index: int) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for number in range(index, self.count, self.number):
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
            parameter.main_grad = (total / divisor).float()  # type: ignore[attr-defined]
        give_unused_zero_gradients(self.module.parameters(), "main_grad")
        finish_step([self.module], None)

    def change_gradient(self, parameter: nn.Parameter, factor: float | None) -> None:
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        parameter.main_grad = None if factor is None or gradient is None else gradient * factor  # type: ignore[attr-defined]

    def _weights(self) -> dict[str, Tensor]:
        masters = self.optimizer.masters
        weights = {name: masters.get(name, p) for name, p in self.module.named_parameters()}
        weights |= {f"average.{name}": average for name, average in self.optimizer.averages.items()}
        return {name: weight.detach().float().clone() for name, weight in weights.items()}

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
