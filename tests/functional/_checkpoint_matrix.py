"""Runs of a small GPT that write checkpoints under every wrapper and on any ranks, and read what all others wrote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import parallel_state
from core.dist_checkpointing import FlatRange, local_tensor
from core.dist_checkpointing.global_view import held_boxes
from core.distributed import wrap_model
from core.optimizer import get_megatron_optimizer
from core.training.checkpointing import load_checkpoint, save_checkpoint, state_tensors
from core.training.config import PretrainConfig
from core.training.config.build import build_config
from core.training.state import TrainingState, build_scheduler
from core.training.train_step import train_step
from tests.unit._gpt import gpt_of
from tests.unit._whole import assembled

BEFORE, AFTER = 2, 2
"""Steps that a writer makes before its checkpoint, and that it and every reader make after it."""

VOCABULARY, SEQUENCE, GLOBAL_BATCH = 62, 8, 12

_BUCKETS = {"bucket_size": 700}  # elements, of some 8000
_INSTANCES = {"num_distributed_optimizer_instances": 2}
_ZERO2 = _BUCKETS | {
    "data_parallel_sharding_strategy": "optim_grads",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
WRAPPERS: dict[str, Mapping[str, Any]] = {
    "ddp": {},
    "zero1": _BUCKETS | {"data_parallel_sharding_strategy": "optim"},
    "zero2": _ZERO2,
    "zero3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "fsdp2": {"use_torch_fsdp2": True},
    "hybrid": _INSTANCES | {"use_torch_fsdp2": True},
    "hybrid zero2": _INSTANCES | _ZERO2,
}


@dataclass(frozen=True)
class Site:
    """A wrapper on a number of ranks; `tp` ranks hold one replica together."""

    wrapper: str
    ranks: int
    tp: int = 1
    ep: int = 0
    """Ranks that share the experts of a layer; 0 is a model without experts."""
    etp: int | None = None
    """Ranks that share the matrices of an expert; None is as many as `tp`."""
    pp: int = 0
    """Pipeline ranks; 0 is a model of 2 layers in place of 4."""
    vpp: int | None = None

    @property
    def dp(self) -> int:
        return self.ranks // self.tp // (self.pp or 1)

    def __str__(self) -> str:
        cut = (f" tp{self.tp}" if self.tp > 1 else "") + (f" ep{self.ep}" if self.ep else "")
        cut += (f" pp{self.pp}" if self.pp else "") + (f" vpp{self.vpp}" if self.vpp else "")
        return f"{self.wrapper} on {self.ranks}{cut}" + (f" etp{self.etp}" if self.etp else "")


SITES = [
    Site(wrapper, ranks, tp)
    for ranks, tp in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2))
    for wrapper in WRAPPERS
    if "hybrid" not in wrapper or ranks // tp % 2 == 0
]


@dataclass
class Outcome:
    """A record of a run after the checkpoint, and of its state at the end."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    place: dict[str, Any] = field(default_factory=dict)
    """Step counts, learning rate and place in the data when the checkpoint was written or had been read."""
    end: dict[str, Any] = field(default_factory=dict)
    """The same after the last step."""
    differing: list[str] = field(default_factory=list)
    """Tensors that differed from the writer's as soon as the reader had loaded them."""
    distance: float = 0.0
    """Of all tensors at the end from the writer's, relative to their norm; 0 only if they are bitwise the same."""


Found = dict[tuple[Site, Site, str | None], Outcome]
"""What became of what a writer wrote at a reader, with a fault or none."""


def write_and_read(
    pairs: Sequence[tuple[Site, Site]], tied: bool, root: Path, faults: Sequence[str | None] = (None,)
) -> tuple[dict[Site, Outcome], Found]:
    """Runs each writer of `pairs`, then each of its readers, and returns what this rank saw; every rank calls it. What
    has been read continues once with each of `faults`.

    The processes are as many ranks as any site has, and make up the smaller worlds one after the other.
    """
    written: dict[Site, Outcome] = {}
    found: Found = {}
    for ranks in sorted({writer.ranks for writer, _ in pairs}):
        with _world_of(ranks, root / f"writers-{ranks}") as is_member:
            for site in dict.fromkeys(writer for writer, _ in pairs if writer.ranks == ranks):
                if is_member:
                    written[site] = _write(site, tied, root)
    for ranks in sorted({reader.ranks for _, reader in pairs}):
        with _world_of(ranks, root / f"readers-{ranks}") as is_member:
            for site in dict.fromkeys(reader for _, reader in pairs if reader.ranks == ranks):
                if is_member:
                    writers = [writer for writer, reader in pairs if reader == site]
                    found |= _read(site, writers, tied, root, faults)
    return written, found


@contextmanager
def _world_of(ranks: int, store: Path) -> Iterator[bool]:
    """Makes a world of the first of these processes; yields whether this one is among them.

    They meet in files that no other world has used: one that an earlier world has not yet let go has its addresses.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    if ranks == size:
        yield True
        return
    _join(store, rank, ranks)
    yield rank < ranks  # what fails ends these processes anyway
    _join(store.with_suffix(".whole"), rank, size)


def _join(store: Path, rank: int, size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < size:
        store.touch()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(hours=1)
        )
        dist.barrier()


def _write(site: Site, tied: bool, root: Path) -> Outcome:
    """Trains, saves and continues. Stores the expected contents next to the checkpoint."""
    with _Run(site, tied) as run:
        run.train(BEFORE)
        save_checkpoint(run.state, run.config, root / str(site))
        outcome = Outcome(place=run.place())
        contents = run.contents()
        run.train(AFTER, outcome)
        contents_at_end = run.contents()
        if dist.get_rank() == 0:
            torch.save((contents, contents_at_end), root / f"{site}.pt")
        return outcome


def _read(site: Site, writers: Sequence[Site], tied: bool, root: Path, faults: Sequence[str | None]) -> Found:
    """Reads what each of `writers` saved, and continues from there."""
    found: Found = {}
    with _Run(site, tied) as run:
        run.train(1)  # what is read replaces something else
        for writer, fault in itertools.product(writers, faults):
            load_checkpoint(run.state, run.config, root / str(writer))
            if fault is not None:
                FAULTS[fault](run.state)
            expected, expected_at_end = torch.load(root / f"{writer}.pt", weights_only=True)
            outcome = Outcome(place=run.place(), differing=run.differing(expected))
            run.train(AFTER, outcome)
            if run.differing(expected_at_end, anywhere=True):
                outcome.distance = _distance(run.contents(), expected_at_end)
            found[writer, site, fault] = outcome
    return found


class _Run:
    """A run at one site; its process groups are gone when it is left."""

    def __init__(self, site: Site, tied: bool) -> None:
        self.site = site
        self.config = config = _config(site, tied)
        parallel_state.initialize_model_parallel(
            site.tp,
            site.pp or 1,
            site.vpp,
            expert_model_parallel_size=site.ep or 1,
            expert_tensor_parallel_size=site.etp,
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        )
        torch.manual_seed(7)
        turns = [None] if site.vpp is None else range(site.vpp)
        models = [gpt_of(config.model, tied, VOCABULARY, SEQUENCE, vp_stage=turn) for turn in turns]
        chunks = [wrap_model(model, config.model, config.ddp) for model in models]
        optimizer = get_megatron_optimizer(config.optimizer, chunks)
        scheduler = build_scheduler(config, optimizer)
        self.state = TrainingState(
            model=chunks[0], later_stages=chunks[1:], optimizer=optimizer, scheduler=scheduler, vocab_size=VOCABULARY
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        parallel_state.destroy_model_parallel()

    def train(self, steps: int, outcome: Outcome | None = None) -> None:
        state = self.state
        for _ in range(steps):
            batches = _samples(state.iteration, parallel_state.get_data_parallel_rank(), self.site.dp)
            result = train_step(state.chunks, state.optimizer, state.scheduler, batches, 1).result()
            state.iteration += 1
            state.consumed_samples += GLOBAL_BATCH
            if outcome is not None:
                assert result.grad_norm is not None
                outcome.losses.append(result.loss)
                outcome.grad_norms.append(result.grad_norm)
        if outcome is not None:
            outcome.end = self.place()

    def place(self) -> dict[str, Any]:
        state = self.state
        return {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "optimizer": state.optimizer.state_scalars(),
            "scheduler": state.scheduler.state_dict(),
            "rates": [group["lr"] for group in state.optimizer.param_groups],
        }

    def contents(self) -> dict[str, torch.Tensor]:
        """Returns every tensor of model and optimizer, whole, on every rank."""
        return assembled(state_tensors(self.state))

    def differing(self, expected: Mapping[str, torch.Tensor], *, anywhere: bool = False) -> list[str]:
        """Returns the tensors whose elements on this rank, or with `anywhere` on some rank, are not the expected ones,
        or are fewer on all ranks together than there are."""
        held = {name: held_boxes(tensor) for name, tensor in state_tensors(self.state).items()}
        differing = held.keys() - expected.keys()
        for name in held.keys() & expected.keys():
            for offsets, values in held[name]:
                part = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
                differing |= set() if torch.equal(values, expected[name][part]) else {name}
        counts = [sum(values.numel() for _, values in held.get(name, ())) for name in expected]
        on_all = torch.tensor([*counts, len(differing)])
        dist.all_reduce(on_all)
        *counts, somewhere = on_all.tolist()
        differing |= {name for name, count in zip(expected, counts, strict=True) if count < expected[name].numel()}
        return sorted(differing) or (["on another rank"] if anywhere and somewhere else [])


def _config(site: Site, tied: bool) -> PretrainConfig:
    # No width divides by all of these numbers of ranks; with tp2 the shards of a piece are uneven too, some empty.
    shape = {"num_layers": 4 if site.pp else 2, "hidden_size": 15, "ffn_hidden_size": 38, "kv_channels": 6}
    attention = {"num_attention_heads": 4, "num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True}
    kind = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "init_method_std": 0.2}
    exact = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    embedding = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": not tied}
    data = {"seq_length": SEQUENCE, "micro_batch_size": GLOBAL_BATCH // site.dp}
    schedule = {"train_iters": BEFORE + AFTER + 1, "lr_warmup_iters": 2, "lr_decay_style": "cosine"}
    # A large epsilon: where a gradient is all rounding, Adam would make a whole step of it.
    optimizer = {"lr": 1e-2, "min_lr": 1e-4, "weight_decay": 0.1, "adam_eps": 1e-4}
    stages = {"pipeline_model_parallel_size": site.pp or 1, "virtual_pipeline_model_parallel_size": site.vpp}
    wrapper = {"tensor_model_parallel_size": site.tp, **stages, **WRAPPERS[site.wrapper]}
    # No auxiliary loss, whose value depends on how samples are split into micro-batches.
    experts = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 10,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": site.ep,
        "expert_tensor_parallel_size": site.etp,
    }
    wrapper |= experts if site.ep else {}
    return build_config(shape | attention | kind | exact | embedding | data | schedule | optimizer | wrapper)


def _samples(step: int, rank: int, replicas: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields a replica's share of the step's samples `[n, s]`, which are the same however many replicas there are."""
    generator = torch.Generator().manual_seed(step)
    sequence = [torch.randint(0, VOCABULARY, (GLOBAL_BATCH,), generator=generator)]
    for _ in range(SEQUENCE):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    samples = torch.stack(sequence, dim=-1).chunk(replicas)[rank]
    yield {
        "tokens": samples[:, :-1].contiguous(),
        "labels": samples[:, 1:].contiguous(),
        "loss_mask": torch.ones(len(samples), SEQUENCE),
        "position_ids": torch.arange(SEQUENCE).repeat(len(samples), 1),
    }


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest distance relative to the norm, among the weights and each kind of moment; not 0."""
    kinds: dict[str, list[float]] = {}
    for name, value in expected.items():
        sums = kinds.setdefault(".".join(name.split(".")[:2]) if name.startswith("optimizer") else "model", [0.0, 0.0])
        sums[0] += (found[name] - value).double().square().sum().item()
        sums[1] += value.double().square().sum().item()
    return max(math.sqrt(difference / norm) for difference, norm in kinds.values() if norm) or math.ulp(0.0)


def _last_bit(state: TrainingState) -> None:
    """Flips one bit of one moment, on the rank that has it."""
    for values in _held(state.optimizer.state_tensors()["exp_avg.decoder.final_layernorm.weight"])[-1:]:
        values.flatten().view(torch.int32)[-1:].bitwise_xor_(1)


def _step_count(state: TrainingState) -> None:
    """Lowers the optimizer's step count by one."""
    scalars = state.optimizer.state_scalars()
    state.optimizer.load_state_scalars(scalars | {"step": scalars["step"] - 1})


def _swapped_moments(state: TrainingState) -> None:
    """Swaps two moments of one shape."""
    tensors = state.optimizer.state_tensors()
    first, second = (_held(tensors[f"exp_avg.decoder.layers.{layer}.mlp.linear_fc1.weight"]) for layer in (0, 1))
    for one, other in zip(first, second, strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _held(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns this rank's values of a tensor."""
    if isinstance(tensor, FlatRange):
        return [values for _, values in tensor.pieces()]
    return [local_tensor(tensor)]


FAULTS: dict[str, Callable[[TrainingState], None]] = {
    "last bit": _last_bit,
    "step count": _step_count,
    "swapped moments": _swapped_moments,
}
"""What is done to what has been read, that a comparison has to see."""
