"""Counts what the host does for one more layer in a step: calls of Python, calls of C, and torch's dispatches.

    python benchmarks/host_work.py [ROW ...] [--ranks 1] [--largest 0]

A step is a forward, a backward, `finalize_model_grads` and AdamW of a GPT, and a layer's share is the difference of
models of 6 and of 2 layers, a fourth of it. Counts are exact and equal on any machine, but for a few calls of waits
for collectives on a thread of their own, whose calls are not counted. AdamW is torch's fused one in every row. Above
one rank the group is torch's `fake` one, which sends nothing. `core` is that of the working directory: `cd ../before
&& python ../shardstack/benchmarks/host_work.py` counts another checkout.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _history import Parser, record
from _report import check_names

sys.path.insert(0, str(Path.cwd()))  # `_measure` has put this checkout there

WIDTH, TOKENS, FEW, MANY = 64, 16, 2, 6
Step = Callable[[], None]


def bare(module: nn.Module) -> tuple[nn.Module, Step]:
    """Returns the model on one rank, and the end of its step: an optimizer of torch."""
    return module, _torch_optimizer(module)


def torch_ddp(module: nn.Module) -> tuple[nn.Module, Step]:
    """Returns the model under torch's DDP."""
    return nn.parallel.DistributedDataParallel(module), _torch_optimizer(module)


def bare_fully_shard(module: nn.Module) -> tuple[nn.Module, Step]:
    """Returns the model under torch's `fully_shard`, a unit for each layer."""
    for layer in module.decoder.layers:
        fully_shard(layer)
    fully_shard(module)
    return module, _torch_optimizer(module)


def wrapped(config: str, **settings: Any) -> Callable[[nn.Module], tuple[nn.Module, Step]]:
    """Returns what wraps a model by a config of `core.distributed`, with its optimizer at the end of a step."""

    def wrap(module: nn.Module) -> tuple[nn.Module, Step]:
        from core import distributed
        from core.optimizer import OptimizerConfig, get_megatron_optimizer

        model = distributed.wrap_model(module, module.config, getattr(distributed, config)(**settings))
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])

        def end() -> None:
            distributed.finalize_model_grads([model])
            optimizer.step()
            model.zero_grad_buffer()

        return model, end

    return wrap


def _torch_optimizer(module: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return end


ROWS = {
    "bare": bare,
    "torch DDP": torch_ddp,
    "fully_shard": bare_fully_shard,
    "DDP": wrapped("DistributedDataParallelConfig"),
    "ZeRO-1": wrapped("DistributedDataParallelConfig", use_distributed_optimizer=True),
    "ZeRO-3": wrapped("FullyShardedDataParallelConfig"),
    "FSDP2": wrapped("TorchFullyShardedDataParallelConfig"),
}


class _Dispatches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_step(row: str, num_layers: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Returns calls of Python by file and function, of C by name, and dispatches of a step that is not the first."""
    from core.models.gpt import GPTModel
    from core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=WIDTH, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    model, end = ROWS[row](
        GPTModel(config, vocab_size=128, max_sequence_length=TOKENS, position_embedding_type="rope")
    )
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)

    def step() -> None:
        model(tokens, labels=tokens).mean().backward()
        end()

    for _ in range(3):
        step()
    python, native = Counter[str](), Counter[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            file = Path(frame.f_code.co_filename)
            python["/".join(file.parts[-3:]) + f":{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            native[argument.__name__] += 1

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    with _Dispatches() as dispatches:
        step()
    return python, native, dispatches.count


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(map(repr, ROWS))}; all without names")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--largest", type=int, default=0, help="functions and operations to list for each row")
    options = parser.parse_args()
    check_names(parser, options.rows, ROWS)
    from core import parallel_state

    torch.set_num_threads(1)
    backend = "gloo" if options.ranks == 1 else "fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=options.ranks)
    parallel_state.initialize_model_parallel()
    print(f"{'a layer and step':24}{'Python calls':>14}{'C calls':>10}{'dispatches':>12}")
    rows = options.rows or [row for row in ROWS if row != "torch DDP" or options.ranks == 1]  # it needs a real group
    of_bare: float | None = None
    for row in rows:
        few, many = count_step(row, FEW), count_step(row, MANY)
        shares = [
            Counter({key: (more[key] - less[key]) / (MANY - FEW) for key in more})
            for more, less in zip(many, few, strict=True)
        ]
        if row == "bare":
            of_bare = shares[0].total()
        elif of_bare is not None:
            record(f"{row}: Python calls / bare, fused AdamW", shares[0].total() / of_bare)
        print(f"{row:24}" + "".join(f"{sum(s.values()):>{w}.0f}" for s, w in zip(shares, (14, 10, 12), strict=True)))
        for share in shares[::2] if options.largest else ():
            for key, count in share.most_common(options.largest):
                print(f"    {count:8.1f}  {key}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
