"""Measures the cost of `--deterministic` on the CPU: steps of a GPT with it and without, interleaved in one process.

.venv/bin/python benchmarks/deterministic.py
"""

from __future__ import annotations

from _history import Parser, record

from _measure import PairedRatio, interleaved_seconds, machine, run_on_ranks, section  # isort: skip

import torch

LIMIT = 1.05


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of two steps, for each of the two, on one rank."""
    from core.base import device
    from core.distributed import DistributedDataParallelConfig, wrap_model
    from core.models.gpt import GPTModel
    from core.optimizer import OptimizerConfig, get_megatron_optimizer
    from core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(num_layers=4, hidden_size=192, num_attention_heads=6)  # dropout included
    gpt = GPTModel(
        config,
        vocab_size=2048,
        max_sequence_length=128,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model = wrap_model(gpt, config, DistributedDataParallelConfig(), process_group=torch.distributed.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
    tokens = torch.randint(0, 2048, (8, 129))

    def steps() -> None:
        for _ in range(2):
            model.zero_grad_buffer()
            model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
            model.finish_grad_sync()
            optimizer.step()

    def freely() -> None:
        torch.use_deterministic_algorithms(False)
        steps()

    def deterministically() -> None:
        device.compute_deterministically()
        steps()

    return interleaved_seconds({"freely": freely, "deterministically": deterministically}, rounds)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    print(machine())
    with section("Deterministic mode compared with none, one rank"):
        (seconds,) = run_on_ranks(measure, 1, options.rounds)
        ratio = PairedRatio.of(seconds["deterministically"], seconds["freely"])
        record("time", ratio)
        print(f"{ratio}{ratio.verdict(LIMIT)}")


if __name__ == "__main__":
    main()
