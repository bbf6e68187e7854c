"""Megatron-LM's own pretraining script, from its sources, on this library's wrappers: by one line, and its own flags.

    MEGATRON_LM=/path/to/Megatron-LM python -m pytest tests/functional/test_megatron_lm_sources.py

Without the sources, which no package installs, these tests are skipped. Each case compares printed digits of losses
and gradient norms with Megatron-LM's own wrapper, and the class that was built.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from core.models.gpt import GPTModel
from core.models.gpt.megatron_layout import load_megatron, save_megatron
from core.transformer.transformer_config import TransformerConfig
from tests.unit._program import REPOSITORY, program_environment
from tests.unit._quick import needs

SOURCES = os.environ.get("MEGATRON_LM", "")
pytestmark = [
    needs("megatron"),
    pytest.mark.skipif(not SOURCES, reason="MEGATRON_LM does not name the folder of Megatron-LM's sources"),
]
ON_CPU = Path(__file__).with_name("_megatron_on_cpu.py")
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --weight-decay 0.01 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--log-interval 1 --eval-interval 100 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0 "
    "--distributed-timeout-minutes 3 --num-workers 0 --distributed-backend gloo "
    "--position-embedding-type learned_absolute"
)
LINE = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)")
ZERO2, ZERO3 = (f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params"))
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear"
FSDP2 = "--use-torch-fsdp2 --untie-embeddings-and-output-weights"


@cache
def _run(first: str, flags: str, ranks: int = 2, iterations: int = 5) -> tuple[str, dict[int, tuple[float, float]]]:
    """Returns the line that names what was built, and loss and norm by iteration."""
    connections = "8" if "fsdp" in flags else "1"  # what Megatron-LM's check of its flags demands
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(Path(SOURCES, "pretrain_gpt.py"))
    ended = subprocess.run(
        [*command, str(ON_CPU), script, *MODEL.split(), "--train-iters", str(iterations), *flags.split()],
        capture_output=True,
        text=True,
        timeout=600,
        env=program_environment(
            FIRST=first,
            PYTHONUNBUFFERED="1",  # else a line may be cut by one of another rank
            CUDA_DEVICE_MAX_CONNECTIONS=connections,
            PYTHONPATH=os.pathsep.join([SOURCES, str(REPOSITORY)]),
        ),
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    (built,) = re.findall(r"^BUILT (.*)$", ended.stdout, re.MULTILINE)
    return built, {int(number): (float(loss), float(norm)) for number, loss, norm in LINE.findall(ended.stdout)}


@pytest.mark.parametrize(
    ("flags", "chosen", "wrapper", "ranks"),
    [
        ("", "", "DistributedDataParallel", 2),
        ("", "--use-distributed-optimizer", "DistributedDataParallel", 2),
        ("--overlap-grad-reduce", "--use-distributed-optimizer --overlap-param-gather", "DistributedDataParallel", 2),
        ("", ZERO2, "DistributedDataParallel", 2),
        ("", ZERO3, "FullyShardedDataParallel", 2),
        ("--overlap-grad-reduce", ZERO3, "FullyShardedDataParallel", 2),
        ("", f"--use-megatron-fsdp --ckpt-format fsdp_dtensor {ZERO3}", "FullyShardedDataParallel", 2),
        ("--untie-embeddings-and-output-weights", "--use-torch-fsdp2", "TorchFullyShardedDataParallel", 2),
        ("--bf16", ZERO3, "FullyShardedDataParallel", 2),
        ("--fp16 --initial-loss-scale 65536", ZERO2, "DistributedDataParallel", 2),
        ("--tensor-model-parallel-size 2", ZERO3, "FullyShardedDataParallel", 2),
        (EXPERTS, "--use-distributed-optimizer", "DistributedDataParallel", 2),
        (EXPERTS, ZERO3, "FullyShardedDataParallel", 2),
        ("--pipeline-model-parallel-size 2", ZERO3, "FullyShardedDataParallel", 4),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            ZERO2,
            "DistributedDataParallel",
            2,
        ),
    ],
    ids=lambda value: str(value).replace("--", "")[:48] or "default",
)
def test_one_line_and_the_same_digits(flags: str, chosen: str, wrapper: str, ranks: int) -> None:
    stock, expected = _run("", flags, ranks)
    built, found = _run("core.adapters.megatron_lm", f"{flags} {chosen}", ranks)
    assert stock.startswith("megatron.") and built.startswith(f"shardstack.adapters.megatron_lm.wrappers.{wrapper} ")
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4, 5]
    for number, (loss, norm) in expected.items():
        # Seven digits of a loss, and three decimals of a norm are printed. More than two ranks add in another order,
        # and norms are summed in double here; fp16 rounds what they scale.
        assert found[number][0] == pytest.approx(loss, rel=1e-6 if "16" not in flags else 1e-5)
        assert found[number][1] == pytest.approx(norm, abs=1.1e-3)


ADAPTER = "core.adapters.megatron_lm"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("saves", "flags", "continues"),
    [
        (ADAPTER, "", f"{ADAPTER} "),
        (ADAPTER, "--use-distributed-optimizer", f"{ADAPTER} --use-distributed-optimizer"),
        (ADAPTER, ZERO2, f"{ADAPTER} {ZERO2}"),
        (ADAPTER, f"--bf16 {ZERO3}", f"{ADAPTER} --bf16 {ZERO3}"),
        (ADAPTER, FSDP2, f"{ADAPTER} {FSDP2}"),
        (ADAPTER, f"{UNTIED} {ZERO3}", f" {UNTIED}"),
        ("", UNTIED, f"{ADAPTER} {FSDP2}"),
        (ADAPTER, FSDP2, f"{ADAPTER} {UNTIED} {ZERO3}"),
    ],
    ids=lambda value: str(value).replace("--", "").replace(ADAPTER, "here")[:60] or "stock",
)
def test_a_checkpoint_continues_with_the_same_digits(tmp_path: Path, saves: str, flags: str, continues: str) -> None:
    _, expected = _run(saves, f"{flags} --save {tmp_path} --save-interval 3", iterations=6)
    first, _, chosen = continues.partition(" ")
    _, found = _run(first, f"{chosen} --load {tmp_path} --ckpt-step 3", iterations=6)
    assert sorted(found) == [4, 5, 6]
    # Losses are printed as the mean since the last line, and the first two lines after a start share one: not 5.
    for number in (4, 6):
        assert found[number][0] == pytest.approx(expected[number][0], rel=1e-6)
        assert found[number][1] == pytest.approx(expected[number][1], abs=1.1e-3)


def test_a_converted_checkpoint_trains_on_with_the_same_digits(tmp_path: Path) -> None:
    _run("", f"--save {tmp_path / 'run'} --save-interval 3", iterations=3)
    own = GPTModel(
        TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4),
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    load_megatron(own, tmp_path / "run")
    save_megatron(own, tmp_path / "there")
    _, expected = _run("", f"--load {tmp_path / 'run'} --finetune", iterations=3)
    _, found = _run("", f"--load {tmp_path / 'there'}", iterations=3)
    assert found == expected and sorted(found) == [1, 2, 3]
