"""Runs the step of a run on phantom tensors as one rank of any world, and says what it holds, computes and sends."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..base.device import CPU_STANDS_FOR_GPU, MEMORY_BYTES
from ..base.host_memory import AS_HOST_MEMORY, transient_memory_seen_by_profilers
from ..base.memory_categories import GATHERED, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, optimizer_tensors
from ..base.parameters import local_part
from ..distributed import _BaseDataParallel, wrap_model
from ..distributed.distributed_data_parallel_config import EngineKind
from ..distributed.finalize_model_grads import is_last_stage
from ..distributed.plan import Plan
from ..optimizer import MegatronOptimizer, get_megatron_optimizer
from ..pipeline_parallel.stages import STAGE, Stage
from ..training.config import PretrainConfig, validate
from ..training.state import build_scheduler
from ..training.train_step import train_step
from ..transformer.transformer_layer import TransformerLayer
from . import world
from .phantom import phantoms
from .recorder import ON_HOST, Block, Event, Mark, Ranks, Recorder, Transfer, Work

CATEGORIES = (
    *(PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER_STATE),
    *("activations", "logits and loss", "communication buffers"),
)
"""In the order of the tables and pictures. The last three are what other places call `REST`."""

MOST_SIMULATED = 3
"""Micro-batches that are simulated: of more, those between the first and the last repeat the second. Pipeline stages
have more of them under way."""


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one point of the step."""

    held: tuple[int, ...]
    """Bytes of each of `CATEGORIES`."""
    where: str
    """For example "backward of decoder.layers.3.mlp, micro-batch 2"."""
    num_events: int
    """Number of `Simulation.drawn_events` before the moment."""

    @property
    def nbytes(self) -> int:
        return sum(self.held)


Pass = tuple[int, bool, int]
"""A stage, whether the pass is its forward, and the micro-batch."""


@dataclass(frozen=True)
class Simulation:
    """A step of one rank, after a first one that made the optimizer's state."""

    rank: int

    plans: Sequence[Plan]
    """Plan of each of the rank's pipeline stages, over the fake groups, whose sizes and ranks stay readable."""
    world_size: int
    num_microbatches: int
    num_parameters: int
    """Parameters of the rank's pipeline stages on all tensor-parallel and expert-parallel ranks, tied weights once."""
    timeline: Sequence[Moment]
    """One moment after each change of the held memory."""
    peak: Moment
    construction_peak: int
    """Most bytes before the first step, while the model is built and wrapped."""
    events: tuple[tuple[str, Event], ...]
    """What the step computes and sends, in order, each with its place, as in `Moment.where`. All micro-batches are
    included. Of pipeline stages, repeated ones are where the second was."""
    drawn_events: tuple[tuple[str, Event], ...]
    """Events of the simulated micro-batches alone, to which the timeline belongs."""
    first_events: tuple[tuple[str, Event], ...]
    """Events of the step before."""
    waits_late: frozenset[Ranks]
    """Groups whose reductions run while backward goes on, until it ends."""
    gathers_ahead: bool
    """The host runs ahead of the accelerator, and a gather may start while the unit before computes."""
    schedule: Mapping[int, Sequence[Pass]] = field(default_factory=dict)
    """With pipeline stages: the passes of each pipeline rank, in order."""

    @property
    def most_bytes(self) -> int:
        """The peak of the step, or that before the first step if it is higher."""
        return max(self.peak.nbytes, self.construction_peak)

    def wire(self) -> Counter[tuple[str, Ranks]]:
        """Returns the bytes that this rank sends in a step, by kind and group."""
        counter: Counter[tuple[str, Ranks]] = Counter()
        for _, event in self.events:
            if isinstance(event, Transfer) and event.sent_bytes:
                counter[event.kind, event.ranks] += event.sent_bytes
        return counter

    @property
    def hardware_flops(self) -> int:
        """Floating-point operations of this rank's matrix products in a step, recomputed ones included."""
        return sum(event.flops for _, event in self.events if isinstance(event, Work))


def pipeline_ranks(config: PretrainConfig) -> list[int]:
    """Returns the pipeline ranks that differ: the first, the last, and the second, which has the most micro-batches
    under way of those between."""
    ranks = config.model.pipeline_model_parallel_size
    return sorted({0, min(1, ranks - 1), ranks - 1})


def simulate(
    config: PretrainConfig, world_size: int, *, pipeline_rank: int = 0, on_gpu: bool = True, memory: int = 80 * 2**30
) -> Simulation:
    """Simulates a step of one rank: the first one of its pipeline stage. No process group may exist, before or after.

    Args:
        on_gpu: resolve the settings that depend on the device as on a GPU, where collectives overlap by default.
        memory: total bytes of the GPU's memory, which decide whether a fused loss keeps its logits.

    Raises:
        ConfigError: what a run with these settings raises; or a setting that is not simulated.
    """
    validate(config, world_size)
    config = world.resolved(config, on_gpu)
    rank = world_size // config.model.pipeline_model_parallel_size * pipeline_rank
    total = MEMORY_BYTES.replaced(memory if on_gpu else None)
    with world.fake_world(config, world_size, rank), warnings.catch_warnings(), total:
        warnings.simplefilter("ignore")
        return _Run(config, world_size, on_gpu).simulation()


class _Run:
    """A run of two steps on phantoms. Hooks on its modules keep the recorder's place."""

    def __init__(self, config: PretrainConfig, world_size: int, on_gpu: bool) -> None:
        self._config, self._world_size, self._on_gpu = config, world_size, on_gpu
        self._recorder = Recorder(where="construction")
        self._has_stages = config.model.pipeline_model_parallel_size > 1
        # The stages of the rank's pipeline, if it has one; `_stage` adds them.
        self._stages: list[world.LoneStage] = []
        # What `_follow` sets: the number of the current micro-batch, from 1, and the pass that it is in.
        self._micro_batch, self._pass = 0, ""

    def simulation(self) -> Simulation:
        config, recorder = self._config, self._recorder
        offloads = self._on_gpu and getattr(config.ddp, "cpu_offload", False)
        num_microbatches = config.num_microbatches(self._world_size)
        most, ranks = MOST_SIMULATED, config.model.pipeline_model_parallel_size
        if self._has_stages:  # until each rank repeats itself
            most = {"GPipe": num_microbatches, "1F1B": ranks + 2}.get(config.model.pipeline_schedule, 3 * ranks)
        count = num_microbatches if config.ddp.reproducible_across_ranks else min(most, num_microbatches)
        with (
            phantoms(recorder, casts_in_memory=not self._on_gpu),
            transient_memory_seen_by_profilers(),
            world.collectives_at_once(),
            CPU_STANDS_FOR_GPU.replaced(self._on_gpu),
            AS_HOST_MEMORY.replaced(recorder.as_host_memory) if self._on_gpu else nullcontext(),
            world.copies_to_host(recorder) if offloads else nullcontext(),
            STAGE.replaced(self._stage),
        ):
            modules = world.build_model(config)
            num_parameters = sum(map(world.whole_size, modules.parameters()))
            chunks = [wrap_model(module, config.model, config.ddp) for module in modules]
            for chunk in chunks if offloads else ():
                recorder.sort_into(ON_HOST, map(local_part, chunk.engine.held()[PARAMETERS]))
            optimizer = get_megatron_optimizer(config.optimizer, chunks)
            scheduler = build_scheduler(config, optimizer)
            changes = (change for _, change, block, _ in recorder.changes if block.category != ON_HOST)
            construction_peak = max(itertools.accumulate(changes))
            self._follow(chunks, optimizer)
            steps = []
            for _ in range(2):
                recorder.where, self._micro_batch = "the start of the step", 0
                first_change, first_event = len(recorder.changes), len(recorder.events)
                train_step(chunks, optimizer, scheduler, world.batches(config), count).result()
                recorder.sort_into(OPTIMIZER_STATE, map(local_part, optimizer_tensors(optimizer.optimizer)))
                self._note(chunks)
                steps.append(tuple(_repeated(recorder.events[first_event:], num_microbatches - count)))
            schedule, kept_bytes = self._pipeline(count, num_microbatches)
            plans = [chunk.plan for chunk in chunks]
            replicas = {ranks for plan in plans for ranks in _replicas(plan)}
            timeline = [*self._timeline(first_change, first_event, replicas, kept_bytes * (num_microbatches - count))]
        peak, plan = max(timeline, key=lambda moment: moment.nbytes), plans[0]
        is_fsdp2 = plan.engine is EngineKind.FSDP2
        return Simulation(
            rank=dist.get_rank(),
            plans=plans,
            world_size=self._world_size,
            num_microbatches=num_microbatches,
            num_parameters=num_parameters,
            timeline=timeline,
            peak=peak,
            construction_peak=construction_peak,
            events=steps[1],
            drawn_events=tuple(recorder.events[first_event:]),
            first_events=steps[0],
            waits_late=frozenset(replicas if is_fsdp2 or plan.settings.overlap_grad_reduce else ()),
            gathers_ahead=is_fsdp2,
            schedule=schedule,
        )

    def _pipeline(self, count: int, num_microbatches: int) -> tuple[Mapping[int, Sequence[Pass]], int]:
        """Returns the schedule of all pipeline ranks, and bytes that each micro-batch keeps, under way or not.

        Before torch 2.15 a pipeline owns memory that it receives into, of each micro-batch. Schedules of several
        stages a rank wait for what they send when the step ends.
        """
        if not self._has_stages:
            return {}, 0
        of_stages: list[Any] = self._stages
        infos = [info for s in of_stages for of in (s.args_recv_info, s.grad_recv_info) for info in of[0]]
        kept_bytes = sum(info.buffer.nbytes for info in infos if getattr(info, "buffer", None) is not None)
        if len(self._stages) > 1:
            sent_bytes = [e.nbytes for _, e in self._recorder.events if isinstance(e, Transfer) and e.kind == "send"]
            kept_bytes += sum(sent_bytes) // (2 * count)
        return self._schedule(num_microbatches), kept_bytes

    def _schedule(self, number: int) -> dict[int, list[Pass]]:
        """Returns the passes of all pipeline ranks. With one stage a rank, torch shows another order than it runs."""
        ranks, name = self._config.model.pipeline_model_parallel_size, self._config.model.pipeline_schedule
        if name not in ("1F1B", "GPipe"):
            kinds = {"F": True, "B": False, "I": False}
            orders = self._stages[0].pipeline.make_schedule(name, number).pipeline_order.items()
            return {
                rank: [
                    (a.stage_index, kinds[a.computation_type.value], a.microbatch_index)
                    for a in order
                    if a is not None and a.computation_type.value in kinds
                ]
                for rank, order in orders
            }
        schedule = {}
        for rank in range(ranks):
            first = number if name == "GPipe" else min(number, ranks - rank)
            forwards = [(rank, True, index) for index in range(number)]
            turns = [[(rank, False, index), *forwards[first + index : first + index + 1]] for index in range(number)]
            schedule[rank] = [*forwards[:first], *itertools.chain(*turns)]
        return schedule

    def _stage(self, *args: Any, **kwargs: Any) -> Stage:
        """Makes a stage of the rank's pipeline."""
        kind = world.HeldUntilWait if self._on_gpu else world.HeldByWork
        self._stages.append(world.LoneStage(self._begin, kind, *args, **kwargs))
        return self._stages[-1]

    def _begin(self, stage: int, what: str, micro_batch: int) -> None:
        self._pass, self._micro_batch = what, micro_batch + 1
        self._enter("the model")
        self._recorder.events.append((self._recorder.where, Mark(stage, what == "forward", micro_batch)))

    def _follow(self, chunks: Sequence[_BaseDataParallel], optimizer: MegatronOptimizer) -> None:
        """Installs hooks that keep `Recorder.where`, and note what wrappers and optimizer hold around each unit."""
        recorder = self._recorder
        units = {module for chunk in chunks for unit in chunk.plan.units for module in unit.modules}

        def begin(module: nn.Module, args: Any) -> None:
            if not self._has_stages:
                self._begin(0, "forward", self._micro_batch)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if is_last_stage(module):
                self._pass = "backward"
                self._enter("the loss")

        def install(module: nn.Module, name: str, is_unit: bool) -> None:
            def here(*unused: Any) -> None:
                self._enter(name)
                if is_unit:
                    self._note(chunks)

            def after(module: nn.Module, args: Any, output: Any) -> None:
                for tensor in output if isinstance(output, (tuple, list)) else (output,):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(here)

            module.register_forward_pre_hook(here)
            module.register_forward_hook(after)

        def enter(function: Callable[..., Any], where: str) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                recorder.where = where
                return function(*args, **kwargs)

            return run

        # Attributes of the instances, which live as long as the run.
        optimizer.start_step = enter(optimizer.start_step, "the update")  # type: ignore[method-assign]
        for chunk in chunks:
            chunk.register_forward_pre_hook(begin)
            chunk.register_forward_hook(end)
            chunk.finish_grad_sync = enter(chunk.finish_grad_sync, "the end of backward")  # type: ignore[method-assign]
            modules = [*chunk.module.named_modules()]
            # Wrappers ask for them at every note, and they do not change.
            chunk.module.named_modules = lambda *unused, of=modules, **also_unused: iter(of)  # type: ignore[method-assign]
            for name, module in modules[1:]:
                is_unit = module in units or isinstance(module, TransformerLayer)
                install(module, name.removeprefix("module").removeprefix(".") or "the model", is_unit)

    def _enter(self, name: str) -> None:
        self._recorder.where = f"{self._pass} of {name}, micro-batch {self._micro_batch}"

    def _note(self, chunks: Sequence[_BaseDataParallel]) -> None:
        """Sorts memory of the wrappers into categories."""
        # Tensors may share memory between kinds, where it counts in the first.
        for chunk in chunks:
            held = chunk.engine.held()
            for category in (GRADIENTS, GATHERED, PARAMETERS):
                self._recorder.sort_into(category, map(local_part, held[category]))

    def _timeline(self, first: int, first_event: int, replicas: Set[Ranks], kept_bytes: int) -> Iterator[Moment]:
        """Yields the memory after each change, from change `first` on, with so many bytes of other micro-batches."""
        by_category = {**dict.fromkeys(CATEGORIES, 0), "communication buffers": kept_bytes}
        for index, (where, nbytes, block, num_events) in enumerate(self._recorder.changes):
            if block.category != ON_HOST:
                by_category[_category(block, replicas)] += nbytes
            if index >= first - 1:
                yield Moment(tuple(by_category.values()), where, max(num_events - first_event, 0))


def _replicas(plan: Plan) -> set[Ranks]:
    """Returns the ranks of the wrapper's groups."""
    kinds = (plan.groups, plan.groups.experts or plan.groups)
    groups = (group for each in kinds for group in (each.whole, each.shard, each.replicate))
    return {Ranks(dist.get_process_group_ranks(group)) for group in groups if group is not None}


def _category(block: Block, replicas: Set[Ranks]) -> str:
    if block.category:
        return block.category
    if block.collective is not None and block.collective.ranks in replicas:
        return "communication buffers"
    is_last = any(part in block.where for part in ("output_layer", "the loss"))
    return "logits and loss" if is_last else "activations"


def _repeated(events: Sequence[tuple[str, Event]], times: int) -> Sequence[tuple[str, Event]]:
    """Returns the events of a step, with the second micro-batch's events repeated `times` more."""
    if not times:
        return events
    number, numbers = -1, list[int]()
    for _, event in events:
        number = event.micro_batch if isinstance(event, Mark) else number
        numbers.append(number)
    second = [event for event, number in zip(events, numbers, strict=True) if number == 1]
    third = numbers.index(2)
    return [*events[:third], *second * times, *events[third:]]
