"""Runs the step of a run on phantom tensors as one rank of any world, and says what it holds, computes and sends."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from .. import parallel_state
from ..base.errors import ConfigError
from ..base.host_memory import transient_memory_seen_by_profilers
from ..base.local_parts import local_part
from ..comm import collectives, lane
from ..comm.lane import CommLane, Handle
from ..distributed import _BaseDataParallel, wrap_model
from ..distributed.distributed_data_parallel_config import Engine
from ..distributed.plan import Plan
from ..models.gpt import GPTModel
from ..optimizer import MegatronOptimizer, clip_grads, exact_sums, get_megatron_optimizer
from ..tensor_parallel import cross_entropy, linear_cross_entropy, weight_gradients
from ..tensor_parallel.random import seed_everything
from ..tensor_parallel.vocab import pad_vocab_size
from ..training.config import PretrainConfig, validate
from ..training.data import Batch
from ..training.state import build_scheduler
from ..training.train_step import train_step
from ..transformer.lora import add_lora, freeze_parameters
from ..transformer.module import Float16Module
from ..transformer.transformer_layer import TransformerLayer
from .phantom import Block, Collective, Ranks, Recorder, Work, phantoms

CATEGORIES = (
    *("parameters", "gathered units", "gradients", "optimizer state"),
    *("activations", "logits and loss", "communication buffers"),
)
"""What memory is for, in the order of the tables and pictures."""

_HELD = {
    "parameters": "parameters",
    "gathered parameters": "gathered units",
    "gradients": "gradients",
    "gradients not reduced yet": "gradients",
}
"""The category of each kind of `_BaseDataParallel.held_tensors`."""

MOST_SIMULATED = 3
"""Micro-batches that are simulated: of more, those between the first and the last repeat the second."""

END_OF_BACKWARD = "the end of backward"
"""The place of what the wrapper does after the last backward."""

Event = Collective | Work


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one point of the step."""

    held: tuple[int, ...]
    """Bytes of each of `CATEGORIES`."""
    where: str
    """For example "backward of decoder.layers.3.mlp, micro-batch 2"."""

    @property
    def nbytes(self) -> int:
        return sum(self.held)


@dataclass(frozen=True)
class Simulation:
    """A step of one rank, after a first one that made the optimizer's state."""

    plan: Plan
    """Of the wrapper, over the fake groups, whose sizes and ranks stay readable."""
    world_size: int
    num_microbatches: int
    num_parameters: int
    """Of the whole model, tied weights once."""
    timeline: tuple[Moment, ...]
    """Each change of the held memory that is larger than a thousandth of the peak."""
    peak: Moment
    construction_peak: int
    """Most bytes before the first step, while the model is built and wrapped."""
    events: tuple[tuple[str, Event], ...]
    """What the step computes and sends, in order, each with its place, as in `Moment.where`. All micro-batches are
    included."""
    first_events: tuple[tuple[str, Event], ...]
    """The same of the step before."""
    waits_late: frozenset[Ranks]
    """Groups whose reductions run while backward goes on, until it ends."""
    gathers_ahead: bool
    """The host runs ahead of the accelerator, and a gather may start while the unit before computes."""

    def wire(self) -> Counter[tuple[str, Ranks]]:
        """Returns the bytes that this rank sends in a step, by kind and group."""
        counter: Counter[tuple[str, Ranks]] = Counter()
        for _, event in self.events:
            if isinstance(event, Collective) and event.sent_bytes:
                counter[event.kind, event.ranks] += event.sent_bytes
        return counter

    @property
    def hardware_flops(self) -> int:
        """Floating-point operations of this rank's matrix products in a step, recomputed ones included."""
        return sum(event.flops for _, event in self.events if isinstance(event, Work))


def simulate(config: PretrainConfig, world_size: int, *, on_gpu: bool = True) -> Simulation:
    """Simulates a step of rank 0. No process group may exist, before or after.

    Args:
        on_gpu: resolve the settings that depend on the device as on a GPU, where collectives overlap by default.

    Raises:
        ConfigError: what a run with these settings raises; or a setting that is not simulated.
    """
    validate(config, world_size)
    config = _simulated(config, on_gpu)
    with _fake_world(config, world_size), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if on_gpu:
            for place, name, value in _ON_GPU:
                stack.enter_context(mock.patch.object(place, name, value))
        return _Run(config, world_size, on_gpu).simulation()


def _sum_on_device(grads: list[Tensor], count_zeros: bool) -> Tensor:
    return clip_grads._sum_on_device(grads, count_zeros, torch.device("cpu"))


_ON_GPU: tuple[tuple[Any, str, Any], ...] = (
    (clip_grads, "_sum_on_host", _sum_on_device),
    (exact_sums, "CHUNK_ELEMENTS", exact_sums._DEVICE_CHUNK_ELEMENTS),
    (cross_entropy, "_CHUNK_ELEMENTS", cross_entropy._GPU_CHUNK_ELEMENTS),
    (linear_cross_entropy, "_columns", functools.partial(linear_cross_entropy._columns, is_cuda=True)),
)
"""What depends on a tensor's device: a module, its name, and its value for tensors of an accelerator."""


def _simulated(config: PretrainConfig, on_gpu: bool) -> PretrainConfig:
    """Returns the settings with those of the device resolved.

    Raises:
        ConfigError: the setting's effect on memory is not simulated.
    """
    for name, is_set in {
        "cpu_offload": getattr(config.ddp, "cpu_offload", False),
        "offload_activations": config.ddp.offload_activations,
        "num_experts": config.model.num_moe_experts is not None,
        "pipeline_model_parallel_size": config.model.pipeline_model_parallel_size > 1,
    }.items():
        if is_set:
            raise ConfigError(f"{name} is set, which the planner does not simulate; drop it to plan the run without")
    if config.data.vocab_size is None:
        raise ConfigError("vocab_size is not set, and the planner reads no corpus; add --vocab-size")
    ddp, model = replace(config.ddp, compile_units=False, activation_memory_budget=None), config.model
    if on_gpu:  # where the fused kernels drop attention weights without storing them
        model = replace(model, attention_dropout=0.0)
    if on_gpu and not ddp.shards_parameters:
        overlaps_grads = True if ddp.overlap_grad_reduce is None else ddp.overlap_grad_reduce
        overlaps_params = ddp.shards_updates if ddp.overlap_param_gather is None else ddp.overlap_param_gather
        ddp = replace(ddp, overlap_grad_reduce=overlaps_grads, overlap_param_gather=overlaps_params)
    return replace(config, ddp=ddp, model=model)


@contextmanager
def _fake_world(config: PretrainConfig, world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ConfigError("a process group exists, and the planner makes one of its own; plan in another process")
    hook, model = sys.excepthook, config.model  # torch wraps the hook at each initialisation
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            model.tensor_model_parallel_size,
            context_parallel_size=model.context_parallel_size,
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        )
        with torch.random.fork_rng(devices=()):
            seed_everything(config.run.seed)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = hook


class _Lane(CommLane):
    """Runs each task at once, on the thread that submits it."""

    def submit(self, run: Callable[[], None]) -> Handle:
        run()
        return _Ended(run)


class _Ended(Handle):
    """A collective that has ended, and holds its tensors until it is waited for, as on an accelerator."""

    def __init__(self, held: Any) -> None:
        self._held = held  # until `wait`

    def wait(self) -> None:
        self._held = None


def _run_collective(kind: str, what: str, payload: Tensor, group: Any, start: Callable[[], Any]) -> Handle | None:
    work = start()
    if work is not None:
        work.wait()
    return None if work is None else _Ended(payload)


@contextmanager
def collectives_at_once() -> Iterator[None]:
    """Runs every collective of `core.comm` on the thread that calls it, which returns when it has ended."""
    with (
        mock.patch.object(lane, "_lane", lambda device, number: _Lane()),
        mock.patch.object(collectives, "_run", _run_collective),
    ):
        yield


def _embeddings_of(*, on_gpu: bool) -> AbstractContextManager[Any]:
    """Returns a context in which embeddings have dense gradients, as on a GPU."""
    return mock.patch.object(weight_gradients, "sums_rows", lambda weight: False) if on_gpu else nullcontext()


class _Run:
    """A run of two steps on phantoms. Hooks on its modules keep the recorder's place."""

    def __init__(self, config: PretrainConfig, world_size: int, on_gpu: bool) -> None:
        self._config, self._world_size, self._on_gpu = config, world_size, on_gpu
        self._recorder = Recorder(where="construction")
        # What `_follow` sets: the number of the current micro-batch, from 1, and the pass that it is in.
        self._micro_batch, self._pass = 0, ""

    def simulation(self) -> Simulation:
        config, recorder = self._config, self._recorder
        num_microbatches = config.num_microbatches(self._world_size)
        is_tree = config.ddp.reproducible_across_ranks
        simulated = num_microbatches if is_tree else min(num_microbatches, MOST_SIMULATED)
        with (
            phantoms(recorder, casts_in_memory=not self._on_gpu),
            transient_memory_seen_by_profilers(),
            collectives_at_once(),
            _embeddings_of(on_gpu=self._on_gpu),
        ):
            module = build_model(config)
            tp = config.model.tensor_model_parallel_size
            cuts = ((p.numel(), getattr(p, "tensor_model_parallel", False)) for p in module.parameters())
            num_parameters = sum(numel * (tp if is_cut else 1) for numel, is_cut in cuts)
            model = wrap_model(module, config.model, config.ddp)
            optimizer = get_megatron_optimizer(config.optimizer, [model])
            scheduler = build_scheduler(config, optimizer)
            construction_peak = max(itertools.accumulate(change for _, change, _ in recorder.changes))
            self._follow(model, optimizer)
            steps = []
            for _ in range(2):
                recorder.where, self._micro_batch = "the start of the step", 0
                first_change, first_event = len(recorder.changes), len(recorder.events)
                train_step(model, optimizer, scheduler, batches(config), simulated).result()
                self._note(model, optimizer)
                steps.append(tuple(_repeated(recorder.events[first_event:], num_microbatches - simulated)))
            timeline = [*self._timeline(first_change, model.plan)]
        peak, plan = max(timeline, key=lambda moment: moment.nbytes), model.plan
        is_fsdp2 = plan.engine is Engine.FSDP2
        return Simulation(
            plan=plan,
            world_size=self._world_size,
            num_microbatches=num_microbatches,
            num_parameters=num_parameters,
            timeline=tuple(_thinned(timeline, peak.nbytes // 1000)),
            peak=peak,
            construction_peak=construction_peak,
            events=steps[1],
            first_events=steps[0],
            waits_late=frozenset(_replicas(plan) if is_fsdp2 or plan.overlaps_grads else ()),
            gathers_ahead=is_fsdp2,
        )

    def _follow(self, model: _BaseDataParallel, optimizer: MegatronOptimizer) -> None:
        """Installs hooks that keep `Recorder.where`, and note what wrapper and optimizer hold around each unit."""
        recorder = self._recorder
        units = {module for unit in model.plan.units for module in unit.modules}

        def begin(module: nn.Module, args: Any) -> None:
            self._micro_batch, self._pass = self._micro_batch + 1, "forward"
            recorder.mark("micro-batch")
            self._enter("the model")

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._pass = "backward"
            self._enter("the loss")

        def of_module(name: str, is_unit: bool) -> tuple[Callable[..., None], Callable[..., None]]:
            def before(module: nn.Module, args: Any) -> None:
                self._enter(name)
                if is_unit:
                    self._note(model, optimizer)

            def reached(gradient: Tensor) -> None:
                self._enter(name)
                if is_unit:
                    self._note(model, optimizer)

            def after(module: nn.Module, args: Any, output: Any) -> None:
                if is_unit:
                    self._note(model, optimizer)
                for tensor in output if isinstance(output, (tuple, list)) else (output,):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(reached)

            return before, after

        def enter(function: Callable[..., Any], where: str) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                recorder.where = where
                return function(*args, **kwargs)

            return run

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end)
        # Attributes of the instances, which live as long as the run.
        model.finish_grad_sync = enter(model.finish_grad_sync, END_OF_BACKWARD)  # type: ignore[method-assign]
        optimizer.start_step = enter(optimizer.start_step, "the update")  # type: ignore[method-assign]
        for name, module in model.module.named_modules():
            if name:
                before, after = of_module(
                    name.removeprefix("module."), module in units or isinstance(module, TransformerLayer)
                )
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)

    def _enter(self, name: str) -> None:
        self._recorder.where = f"{self._pass} of {name}, micro-batch {self._micro_batch}"

    def _note(self, model: _BaseDataParallel, optimizer: MegatronOptimizer) -> None:
        """Sorts memory of the wrapper and the optimizer into categories."""
        groups = [*optimizer.optimizer.param_groups]
        self._recorder.sort_into("optimizer state", (p for group in groups for p in group["params"]))
        for state in optimizer.optimizer.state.values():
            self._recorder.sort_into("optimizer state", (local_part(v) for v in state.values() if torch.is_tensor(v)))
        # Tensors may share memory between kinds, where it counts in the first.
        for kind, tensors in reversed(model.held_tensors().items()):
            self._recorder.sort_into(_HELD[kind], map(local_part, tensors))

    def _timeline(self, first: int, plan: Plan) -> Iterator[Moment]:
        """Yields the memory after each change, from change `first` on."""
        replicas = _replicas(plan)
        held = dict.fromkeys(CATEGORIES, 0)
        for index, (where, nbytes, block) in enumerate(self._recorder.changes):
            held[_category(block, replicas)] += nbytes
            if index >= first - 1:
                yield Moment(tuple(held.values()), where)


def _replicas(plan: Plan) -> set[Ranks]:
    """Returns the ranks of the wrapper's groups."""
    groups = plan.groups
    of_wrapper = (groups.whole, groups.shard, groups.replicate)
    return {Ranks(dist.get_process_group_ranks(group)) for group in of_wrapper if group is not None}


def _category(block: Block, replicas: Set[Ranks]) -> str:
    if block.category:
        return block.category
    if block.collective is not None and block.collective.ranks in replicas:
        return "communication buffers"
    is_last = any(part in block.where for part in ("output_layer", "the loss"))
    return "logits and loss" if is_last else "activations"


def _thinned(timeline: Sequence[Moment], least: int) -> Iterator[Moment]:
    """Yields moments that differ from the last one by more than `least` bytes."""
    last = None
    for moment in timeline:
        if last is None or abs(moment.nbytes - last) > least:
            last = moment.nbytes
            yield moment


def _repeated(events: Sequence[tuple[str, Any]], times: int) -> Iterator[tuple[str, Event]]:
    """Yields the events of a step, those of the second micro-batch so many times more."""
    starts = [index for index, (_, event) in enumerate(events) if event == "micro-batch"]
    again = events[starts[1] : starts[2]] if times > 0 else []
    first = starts[1] if times > 0 else 0
    for where, event in itertools.chain(events[:first], *[again] * max(times, 0), events[first:]):
        if not isinstance(event, str):
            yield where, event


def batches(config: PretrainConfig) -> Iterator[Batch]:
    """Yields micro-batches of one document each. All labels count, and tokens differ as far as the vocabulary goes."""
    shape = config.data.micro_batch_size, config.data.seq_length
    while True:
        tokens = (torch.arange(math.prod(shape)) % (config.data.vocab_size or 1)).view(shape)
        positions = torch.arange(shape[1]).expand(shape).contiguous()
        yield {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(shape)}


def _gpt(config: PretrainConfig) -> nn.Module:
    vocab_size = pad_vocab_size(config.data.vocab_size or 0, config.gpt.make_vocab_size_divisible_by)
    model: nn.Module = GPTModel(
        config.model,
        vocab_size=vocab_size,
        max_sequence_length=config.max_sequence_length,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
    )
    return model


def build_model(config: PretrainConfig) -> nn.Module:
    """Builds the model as ``examples/gpt/pretrain_gpt.py`` does: on meta where its parameters are sharded."""
    with torch.device("meta" if config.ddp.shards_parameters else "cpu"):
        model = _gpt(config)
    freeze_parameters(model, config.gpt.freeze)
    add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
    if not config.ddp.shards_parameters and (config.model.fp16 or config.model.bf16):
        model = Float16Module(config.model, model)
    return model
