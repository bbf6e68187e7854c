"""Lightning's own strategies next to this library's: what a step sends, and how far it is from one process.

Two ranks, three micro-batches a step, clipping by norm, SGD. Bytes are those that one rank's step sends at least, as
in a ring, in units of the parameters' bytes: to reduce gradients, and to gather what was reduced or sharded (an all-
reduce of ours is both). The error of the norm is relative; that of the weights is the largest difference after all
steps, relative to the largest change of a weight. Both compare with one process that adds up gradients in the order
of ranks, and their norm in double.

    .venv/bin/python benchmarks/lightning_strategies.py
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from _history import Parser, record
from _measure import CollectivePayload, machine, run_on_ranks  # first: it puts this checkout on the path
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from core.adapters.lightning import ShardstackStrategy
from core.comm import gloo
from core.dist_checkpointing import model_state_dict
from core.distributed.engine.engine import owner_of
from core.distributed.fully_sharded_data_parallel_config import STRATEGIES
from tests.unit.adapters.lightning._module import ranks_of_lightning
from tests.unit.adapters.lightning._module import trainer as trainer_of

RANKS, MICRO_BATCHES, CLIP, LR = 2, 3, 0.1, 0.5
VOCABULARY, WIDTH, LAYERS = 8192, 256, 4


class Net(nn.Module):
    """About 7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten().roll(-1))


class Module(L.LightningModule):
    """Keeps the norm that clipping used."""

    def __init__(self, shards: bool) -> None:
        super().__init__()
        self.shards, self.norms = shards, []  # type: ignore[var-annotated]
        self.net = Net()

    def configure_model(self) -> None:
        if self.shards:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(tokens)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        if hasattr(self.trainer.strategy, "grad_norm"):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.norms.append(self.trainer.strategy._clipped_norm.item())
        else:  # what Lightning does, which keeps no norm
            norm = nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
            self.norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR)


class Payload(CollectivePayload):
    """Tells messages that gather from those that reduce."""

    def _send(self, tensor: torch.Tensor, **options: Any) -> Any:
        name = "gather by message" if options["tag"] & 0xFFFF == gloo.GATHER_TAG else "reduce by message"
        self.bytes[name] += tensor.numel() * tensor.element_size()
        return self._isend(tensor, **options)


def batches(rank: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randint(0, VOCABULARY, (steps * MICRO_BATCHES, 2, 32), generator=generator))


def one_process(steps: int, norm_of: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Norms before clipping, and weights at the end."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    samples, norms = [batches(rank, steps) for rank in range(RANKS)], []
    for step in range(steps):
        totals: list[torch.Tensor] = []
        for rank in range(RANKS):
            model.zero_grad()
            for tokens in samples[rank][step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]:
                (model(tokens) / MICRO_BATCHES).backward()
            own = [p.grad.clone() for p in model.parameters()]
            totals = [a + b for a, b in zip(totals, own, strict=True)] if totals else own
        means = [total / RANKS for total in totals]
        norm = norm_of(means)
        norms.append(norm.item())
        for p, mean in zip(model.parameters(), means, strict=True):
            p.grad = mean * (CLIP / (norm.double() + 1e-6)).clamp(max=1.0).float()
        optimizer.step()
    return norms, {f"net.{name}": p.detach() for name, p in model.named_parameters()}


def exact_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()


def _strategy(name: str) -> Any:
    if name == "Lightning DDP":
        return DDPStrategy()
    if name == "Lightning ModelParallel (FSDP2)":
        return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    return ShardstackStrategy(name.split()[-1])


def train(name: str, steps: int) -> tuple[Counter[str], list[float], dict[str, Any]]:
    """Bytes of a step of this rank, norms, and the whole weights as arrays."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    module = Module(shards="ModelParallel" in name)
    counted: list[Counter[str]] = []

    class Count(L.Callback):
        """Counts from the second step's begin to its end."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == MICRO_BATCHES:
                self.payload = Payload().__enter__()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2 * MICRO_BATCHES - 1:
                self.payload.__exit__(None, None, None)
                counted.append(Counter(self.payload.bytes))

    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"accumulate_grad_batches": MICRO_BATCHES, "gradient_clip_val": CLIP, "callbacks": [Count()]}
        with ranks_of_lightning():
            trainer = trainer_of(_strategy(name), folder, **settings)
            trainer.fit(module, DataLoader(batches(dist.get_rank(), steps), batch_size=None))  # type: ignore[arg-type]
    wrapper: Any = owner_of(next(module.parameters()))
    if wrapper is None:
        return counted[0], module.norms, _whole(module)
    with wrapper.whole_parameters():
        return counted[0], module.norms, _whole(module)


def _whole(module: nn.Module) -> dict[str, Any]:
    state = model_state_dict(module)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().numpy().copy() for n, t in state.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    names = ["Lightning DDP", "Lightning ModelParallel (FSDP2)", *(f"shardstack {name}" for name in STRATEGIES)]
    start = {f"net.{name}": p.detach().clone() for name, p in Net().named_parameters()}
    torch.set_num_threads(1)  # as the ranks: threads would add up in another order
    norms, weights = one_process(steps, exact_norm)
    moved = max((weights[name] - start[name]).abs().max().item() for name in weights)
    size = sum(p.numel() * p.element_size() for p in Net().parameters())
    print(f"{machine()}, lightning {L.__version__}; {size / 2**20:.1f} MiB of parameters\n")
    print("| strategy | sent to reduce | sent to gather | error of the norm | error of the weights |")
    print("| --- | --- | --- | --- | --- |")
    alone = "one process, clipped by torch's norm"
    for name in (alone, *names):
        if name == alone:
            found_norms, tensors = one_process(steps, nn.utils.get_total_norm)
            sent, found = Counter[str](), {n: tensor.numpy() for n, tensor in tensors.items()}
        else:
            sent, found_norms, found = run_on_ranks(train, RANKS, name, steps)[0]
        of_norm = max(abs(a - b) / b for a, b in zip(found_norms, norms, strict=True))
        of_weights = max(float(abs(found[n] - weights[n].numpy()).max()) for n in weights) / moved
        reduced = sum(count for kind, count in sent.items() if "reduce" in kind) / size
        gathered = sum(count for kind, count in sent.items() if "gather" in kind) / size
        if sent:
            record(f"{name}: bytes sent / parameters", reduced + gathered)
        print(f"| {name} | {reduced:.2f} | {gathered:.2f} | {of_norm:.1e} | {of_weights:.1e} |", flush=True)


if __name__ == "__main__":
    main()
