"""Every reader of files that others wrote: an honest folder of its files, and what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from corpus import prepare, train_bpe

from core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from core.datasets.indexed_dataset import IndexedDataset
from core.datasets.sample_index import load_or_build
from core.dist_checkpointing import latest_checkpoint, load, save
from core.dist_checkpointing.format.folders import acquire_folder, release_folder
from core.dist_checkpointing.format.index import seal
from core.dist_checkpointing.inspect import describe, open_checkpoint
from core.models.gpt import GPTModel
from core.models.gpt.hugging_face import hf_architecture, load_hugging_face, save_hugging_face
from core.planner.hardware import PRESETS, find_hardware
from core.planner.recorder import Ranks, Transfer, Work
from core.run_log import read_log
from core.tokenizers import MegatronTokenizer, load_tokenizer
from core.transformer.transformer_config import TransformerConfig
from examples.gpt.convert import save_weights
from examples.gpt.run_model import load_run_model
from tests.unit._gpt import gpt_of


@dataclass(frozen=True)
class Reader:
    """A kind of file."""

    make: Callable[[Path], None]
    """Writes honest files into a folder."""
    read: Callable[[Path], object]
    """Reads them; may raise ShardstackError and nothing else."""
    files: tuple[str, ...]
    """Those that are made hostile, as patterns."""
    repair: Callable[[Path], None] = lambda folder: None
    """Makes checksums right again, as an attacker does."""


def _state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12.0).view(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "n": torch.tensor(3)}


def _make_checkpoint(folder: Path) -> None:
    save(_state(), folder / "iter_0000001", metadata={"iteration": 1, "config": {"a": [1, {"b": None}]}})


def _read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    found = latest_checkpoint(folder)
    if found is None:
        return {}
    describe(open_checkpoint(found))
    state = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
    load(state, found)
    return state


def _read_what_was_saved(folder: Path) -> None:
    for name, tensor in _read_checkpoint(folder).items():
        assert torch.equal(tensor, _state()[name]), f"{name} was read with other values"


def _seal(folder: Path) -> None:
    path = folder / "iter_0000001" / "checkpoint.json"
    try:
        document = json.loads(path.read_bytes())
        path.write_text(json.dumps(document | {"sha256": seal(document)}, separators=(",", ":")))
    except (ValueError, TypeError, RecursionError):
        return


def _make_torch_checkpoint(folder: Path) -> None:
    torch_checkpoint.save(_state(), checkpoint_id=str(folder), no_dist=True)


def _read_torch_checkpoint(folder: Path) -> None:
    describe(open_checkpoint(folder))
    load(_state(), folder)


def _make_corpus(folder: Path) -> None:
    (folder / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}" for i in range(60)))
    prepare([folder / "text.txt"], folder / "c", tokenizer="byte", split_on="line")


def _read_corpus(folder: Path) -> None:
    corpus = IndexedDataset(folder / "c")
    for index in range(min(len(corpus), 100)):
        corpus.get(index).sum()
    dataset = GPTDataset(corpus, "train", GPTDatasetConfig(sequence_length=8, split="1", vocab_size=257), 50)
    for index in range(len(dataset)):
        dataset[index]


def _gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=12,
        gated_linear_unit=True,
        activation_func="silu",
        normalization="RMSNorm",
        add_bias_linear=False,
    )
    return gpt_of(config, True, 16, 8)


def _make_hugging_face(folder: Path) -> None:
    save_hugging_face(_gpt(), folder / "m", layout="llama", max_shard_bytes=1000)


def _read_hugging_face(folder: Path) -> None:
    hf_architecture(folder / "m").build(vocab_size=16, perform_initialization=False)
    load_hugging_face(_gpt(), folder / "m")


def _make_tokenizer(folder: Path) -> None:
    train_bpe(["a tokenizer is learned from a text, which is this one " * 20], 280).save(folder / "tokenizer.json")


def _read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("a text, \u00e9 \U0001f600").tolist())


def _make_run(folder: Path) -> None:
    from core.training.config.build import build_config

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "seq_length": 8}
    settings = {**sizes, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
    settings |= {"position_embedding_type": "rope", "micro_batch_size": 1, "train_iters": 1, "lr": 0.0}
    save_weights(_gpt(), build_config(settings), folder)
    (folder / "iter_0000000").rename(folder / "iter_0000001")
    (folder / "latest").write_text("iter_0000001\n")


def _read_run(folder: Path) -> None:
    load_run_model(folder / "iter_0000001")


def _make_small_files(folder: Path) -> None:
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n')
    (folder / ".lock").write_text('{"host": "h", "process": 1, "since": "2026"}')
    load_or_build(folder / "cache", {"k": 1}, _arrays)


def _arrays() -> dict:
    return {"a": torch.arange(10).numpy()}


def _read_small_files(folder: Path) -> None:
    read_log(folder / "log.jsonl")
    load_or_build(folder / "cache", {"k": 1}, _arrays)
    release_folder(acquire_folder(folder))


def _make_hardware(folder: Path) -> None:
    (folder / "hardware.json").write_text(PRESETS["h100"].to_json())
    (folder / "metadata.json").write_text('{"library": "null-text"}')


def _read_hardware(folder: Path) -> None:
    MegatronTokenizer.from_pretrained(metadata_path=folder / "metadata.json", vocab_size=8)
    hardware = find_hardware(str(folder / "hardware.json"))
    hardware.work_seconds(Work("mm", 10**15, 10**9, 2, ()))
    hardware.collective_seconds(Transfer("all-reduce", 10**9, Ranks(range(16))))


READERS = {
    "checkpoint": Reader(_make_checkpoint, _read_what_was_saved, ("iter_*/*", "latest")),
    "sealed checkpoint": Reader(_make_checkpoint, _read_checkpoint, ("iter_*/checkpoint.json",), _seal),
    "sealed run": Reader(_make_run, _read_run, ("iter_*/checkpoint.json",), _seal),
    "torch checkpoint": Reader(_make_torch_checkpoint, _read_torch_checkpoint, (".metadata", "*.distcp")),
    "corpus": Reader(_make_corpus, _read_corpus, ("c.idx", "c.bin")),
    "hugging face": Reader(_make_hugging_face, _read_hugging_face, ("m/*",)),
    "tokenizer": Reader(_make_tokenizer, _read_tokenizer, ("*.json",)),
    "hardware and metadata": Reader(_make_hardware, _read_hardware, ("*.json",)),
    "small files": Reader(_make_small_files, _read_small_files, ("log.jsonl", ".lock", "cache/*/*")),
}
