"""Trainings of a small GPT over pipeline stages, and in one process, which they have to equal."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.module_protocol import counting_modules, unwrap_model
from core.comm.call import CollectiveRecord
from core.comm.collectives import all_reduce_by_backend
from core.comm.lane import CommLane, Handle
from core.dist_checkpointing import model_state_dict
from core.dist_checkpointing.model_state import stages_state_dict
from core.distributed import _BaseDataParallel, finalize_model_grads, wrap_model
from core.models.gpt import GPTModel
from core.models.gpt.hugging_face import load_hugging_face, save_hugging_face
from core.optimizer import AveragedWeights, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import get_forward_backward_func, stages
from core.transformer.lora import add_lora, freeze_parameters
from core.transformer.pipeline_stages import pipeline_stage
from core.transformer.transformer_config import TransformerConfig
from core.weights import WeightStream
from tests.unit._lane import lanes_that
from tests.unit._runs import ddp_config, in_precision
from tests.unit._whole import assembled

VOCABULARY, LENGTH, LAYERS, BATCH, STEPS = 32, 8, 4, 2, 4
SGD = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 1.0}
MUON = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.01, "clip_grad": 1.0}


@dataclass(frozen=True)
class Case:
    """A training over pipeline stages."""

    wrapper: str = "ddp"
    pp: int = 2
    vpp: int | None = None
    tp: int = 1
    dp: int = 1
    tied: bool = False
    per_token: bool = False
    micro_batches: int = 4
    schedule: str | None = None
    first: int | None = None
    """Layers of the first stage, where these are not as many as others."""
    fields: tuple[tuple[str, Any], ...] = ()
    """More of the model's config."""
    freeze: tuple[str, ...] = ()
    lora: int | None = None
    precision: str = "fp32"
    """``fp16`` has a dynamic loss scale that starts too high, so that steps are skipped."""
    muon: bool = False
    """Matrices are updated by Muon, and the curve has an average of the weights too."""
    packed: bool = False
    """Each sequence holds two documents, which do not see each other."""

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "wrapper"}
        changed = [
            name if value is True or isinstance(value, tuple) else f"{name}{value}"
            for name, value in values.items()
            if value != getattr(Case, name)
        ]
        return "-".join([self.wrapper.replace(", ", "_").replace(" ", "_"), *changed])

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def is_bitwise(self) -> bool:
        """Whether one process adds in the same order: a tied weight's two gradients of all micro-batches are added at
        the end of a step, and other ranks of a stage add after micro-batches."""
        return not self.tied and self.tp == self.dp == 1

    def optimizer(self, **fields: Any) -> OptimizerConfig:
        return OptimizerConfig(**(MUON if self.muon else SGD), **fields)

    def config(self, *, is_serial: bool) -> TransformerConfig:
        cut = {
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "tensor_model_parallel_size": self.tp,
            "pipeline_parallel_schedule": self.schedule,
            "num_layers_in_first_pipeline_stage": self.first,
        }
        return TransformerConfig(
            num_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.2,
            calculate_per_token_loss=self.per_token,
            **({} if self.precision == "fp32" else {self.precision: True}),
            **dict(self.fields),
            **({} if is_serial else cut | {"sequence_parallel": self.tp > 1}),
        )


@dataclass
class Curve:
    losses: list[float]
    """Of each step: the mean over tokens, or the mean of micro-batches' means."""
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    """After the last step, whole. Those of the average begin with ``average.``."""


def build(case: Case, *, is_serial: bool = False, vp_stage: int | None = None) -> GPTModel:
    config = case.config(is_serial=is_serial)
    stage = pipeline_stage(config, vp_stage)
    model = GPTModel(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute",
        pre_process=stage.is_first,
        post_process=stage.is_last,
        vp_stage=vp_stage,
    )
    add_lora(model, case.lora, None, None)
    return model


def micro_batches(step: int, replica: int, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields tokens and labels, `[b, s]`; labels are masked, more in some micro-batches than in others."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    for index in range(number):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = (5 * tokens + 1) % VOCABULARY
        labels[:, LENGTH - index % 3 :] = -100
        yield tokens, labels


def loss_of(labels: torch.Tensor, per_token: bool, losses: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a loss function of Megatron-LM's loops returns."""
    mask = labels != -100
    total, number = (losses * mask).sum(), mask.sum()
    report = total.detach().double(), number
    return (total, number, report) if per_token else (total / number, report)


def forward_step(case: Case, data: Iterator[Any], model: nn.Module) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    positions: dict[str, torch.Tensor] = {}
    if case.packed:
        begins = torch.where(torch.arange(LENGTH) < LENGTH // 3, 0, LENGTH // 3).expand(BATCH, LENGTH)
        positions = {"position_ids": torch.arange(LENGTH) - begins, "document_starts": begins}
    return model(tokens, labels=labels, **positions), partial(loss_of, labels, case.per_token)


def train_on_stages(case: Case) -> Curve:
    """Trains on this rank's stages; every rank calls it. The first rank's curve has all weights."""
    instances = ddp_config(case.wrapper).num_distributed_optimizer_instances
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vpp, num_distributed_optimizer_instances=instances)
    torch.manual_seed(7)
    turns = [None] if case.vpp is None else range(case.vpp)
    models = [build(case, vp_stage=turn) for turn in turns]
    freeze_parameters(models, case.freeze)
    chunks = wrapped(models, case.wrapper)
    fields = {"fp16": {"fp16": True, "initial_loss_scale": 2.0**18, "hysteresis": 1}, "bf16": {"bf16": True}}
    optimizer = get_megatron_optimizer(case.optimizer(**fields.get(case.precision, {})), chunks)
    average = AveragedWeights(optimizer, 0.5) if case.muon else None
    curve = Curve([], [], {})
    for step in range(STEPS):
        for chunk in chunks:
            chunk.config.grad_scale_func = optimizer.scale_loss
        train_step(case, chunks, step, curve)
        _, norm, _ = optimizer.step()
        curve.grad_norms.append(norm)
    curve.weights = whole_weights(chunks, optimizer, average)
    return curve


def train_at_other_times(case: Case, silent: int | None, failing: int | None, is_elsewhere: bool = False) -> str:
    """Makes a step, and then one that the pipeline rank `silent` does not join, or in which `failing` raises.

    Args:
        is_elsewhere: the silent rank waits for the others in an all-reduce of the pipeline.

    Returns:
        What this rank's second step raised.
    """
    parallel_state.initialize_model_parallel(1, case.pp, distributed_timeout_minutes=0.05)
    chunks = wrapped([build(case)], case.wrapper)
    curve = Curve([], [], {})
    train_step(case, chunks, 0, curve)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if rank == silent:
        if is_elsewhere:
            group = parallel_state.get_pipeline_model_parallel_group()
            with pytest.raises(RuntimeError):
                all_reduce_by_backend(torch.ones(1), group, what="the loss")
        return ""
    data = micro_batches(1, 0, case.micro_batches)
    if rank == failing:
        data = iter([next(data)])  # there is no second micro-batch
    chunks[0].zero_grad_buffer()
    try:
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, case),
            data_iterator=data,
            model=chunks,
            num_microbatches=case.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing"


def export_from_stages(case: Case, folder: Path) -> tuple[list[tuple[str, torch.Tensor]], bool]:
    """Writes the model of this rank's stages for Hugging Face, reads it back into others, and streams its weights.

    Returns:
        The stream's names and tensors, on the first rank; and whether what was read is what was written.
    """
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vpp)
    torch.manual_seed(7)
    turns = [None] if case.vpp is None else range(case.vpp)
    chunks = wrapped([build(case, vp_stage=turn) for turn in turns], case.wrapper)
    save_hugging_face(chunks, folder)
    stream = [(name, tensor.clone()) for name, tensor in WeightStream(chunks, "module", receivers=[0])]
    before = assembled(stages_state_dict([unwrap_model(chunk) for chunk in chunks]))
    torch.manual_seed(8)
    others = wrapped([build(case, vp_stage=turn) for turn in turns], case.wrapper)
    load_hugging_face(others, folder)
    after = assembled(stages_state_dict([unwrap_model(chunk) for chunk in others]))
    return stream, all(torch.equal(after[name], before[name]) for name in before)


def events_of_steps(cases: list[Case]) -> list[list[str]]:
    """Returns what this rank does in a step of each case, in order: backwards of its stages and deferred gradients of
    their weights, reductions over replicas as they are submitted, and the end of the schedule."""
    return [_events(case) for case in cases]


def _events(case: Case) -> list[str]:
    parallel_state.initialize_model_parallel(1, case.pp, case.vpp)
    torch.manual_seed(7)
    replicas = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    events: list[str] = []
    in_lane = threading.local()  # its `place` is that of the task in `events`, on a lane's thread while it runs one

    def submit(lane: CommLane, run: Callable[[], None]) -> Handle:
        events.append("")
        return lane.submit(partial(run_at, len(events) - 1, run))

    def run_at(place: int, run: Callable[[], None]) -> None:
        in_lane.place = place
        run()
        del in_lane.place

    def collective(record: CollectiveRecord, kind: str, *args: Any, **kwargs: Any) -> Any:
        if list(record.ranks) == replicas and "reduce" in kind:
            if hasattr(in_lane, "place"):
                events[in_lane.place] = "reduction"  # when it was submitted: when it runs is by chance
            else:
                events.append("reduction")
        return _collective(record, kind, *args, **kwargs)

    def note(stage: stages.Stage, what: str, *args: Any) -> None:
        if what == "backward":
            events.append(f"backward of stage {stage.stage_index}")
        _note(stage, what, *args)

    def compute_deferred(products: Any) -> None:
        events.append("weights")
        _compute_deferred(products)

    def finalize(*args: Any, **kwargs: Any) -> None:
        events.append("end of the schedule")
        _finalize(*args, **kwargs)

    _collective, _note, _finalize = CollectiveRecord.collective, stages.Stage.note, finalize_model_grads
    _compute_deferred = stages.compute_deferred
    with lanes_that(submit):
        turns = [None] if case.vpp is None else range(case.vpp)
        chunks = wrapped([build(case, vp_stage=turn) for turn in turns], case.wrapper)
    with (
        mock.patch.object(CollectiveRecord, "collective", collective),
        mock.patch.object(stages.Stage, "note", note),
        mock.patch.object(stages, "compute_deferred", compute_deferred),
        mock.patch(f"{__name__}.finalize_model_grads", finalize),
    ):
        train_step(case, chunks, 0, Curve([], [], {}))
    parallel_state.destroy_model_parallel()
    return [event for event in events if event]


def wrapped(models: list[GPTModel], wrapper: str) -> list[_BaseDataParallel]:
    return [wrap_model(in_precision(model, wrapper), model.config, ddp_config(wrapper)) for model in models]


def train_step(case: Case, chunks: list[_BaseDataParallel], step: int, curve: Curve) -> None:
    """Runs forwards and backwards of a step, and adds its loss, of the last stage's replicas, to the curve."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.config.finalize_model_grads_func = finalize_model_grads
    replica = parallel_state.get_data_parallel_rank()
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, case),
        data_iterator=[micro_batches(step, replica, case.micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=case.micro_batches,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    assert len(reports) == (case.micro_batches if any(unwrap_model(c).post_process for c in chunks) else 0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, reports)
    curve.losses.append(mean_loss(case, [report for of_rank in found[:: case.tp] for report in of_rank]))


def mean_loss(case: Case, reports: list[Any]) -> float:
    totals = [float(total) for total, _ in reports]
    numbers = [int(number) for _, number in reports]
    if case.per_token:
        return sum(totals) / sum(numbers)
    return sum(total / number for total, number in zip(totals, numbers, strict=True)) / len(reports)


def whole_weights(
    chunks: list[Any], optimizer: MegatronOptimizer, average: AveragedWeights | None
) -> dict[str, torch.Tensor]:
    """Returns the weights of all stages and their average, whole."""
    optimizer.finish_step()
    found: dict[str, torch.Tensor] = {}
    if average is not None:
        with average.swapped():
            found = {f"average.{name}": t.clone() for name, t in whole_weights(chunks, optimizer, None).items()}
    return found | assembled(
        {name: view for chunk in chunks for name, view in model_state_dict(unwrap_model(chunk)).items()}
    )


@functools.cache
def train_in_one_process(case: Case) -> Curve:
    """Trains on the micro-batches of all replicas; `case` with one stage, as `serial` makes it."""
    torch.manual_seed(7)
    model = build(case, is_serial=True)
    freeze_parameters(model, case.freeze)
    optimizer = get_megatron_optimizer(case.optimizer(), [model])
    average = AveragedWeights(optimizer, 0.5) if case.muon else None
    curve = Curve([], [], {})
    for step in range(STEPS):
        optimizer.zero_grad()
        for layer in counting_modules(model):
            layer.clear_step_sums()
        reports = []
        for replica in range(case.dp):
            data = micro_batches(step, replica, case.micro_batches)
            for _ in range(case.micro_batches):
                output, loss_function = forward_step(case, data, model)
                loss, *_, report = loss_function(output)
                reports.append(report)
                (loss if case.per_token else loss / case.micro_batches / case.dp).backward()
        for parameter in model.parameters():
            if case.per_token and parameter.grad is not None:
                parameter.grad *= 1 / sum(number for _, number in reports)
        curve.losses.append(mean_loss(case, reports))
        _, norm, _ = optimizer.step()
        curve.grad_norms.append(norm)
    curve.weights = whole_weights([model], optimizer, average)
    return curve


def serial(case: Case) -> Curve:
    """Returns the training in one process that a case has to equal."""
    return train_in_one_process(replace(case, wrapper="ddp", pp=2, vpp=None, tp=1, schedule=None, first=None))
