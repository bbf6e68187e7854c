"""Trainings of a small GPT over pipeline stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.module_protocol import unwrap_model
from core.comm.call import CollectiveRecord
from core.comm.collectives import all_reduce_by_backend
from core.comm.lane import CommLane, Handle
from core.dist_checkpointing.model_state import stages_state_dict
from core.distributed import finalize_model_grads
from core.models.gpt import GPTModel
from core.models.gpt.hugging_face import load_hugging_face, save_hugging_face
from core.pipeline_parallel import stages
from core.transformer.lora import add_lora, freeze_parameters
from core.weights import WeightStream
from tests.functional._equality import SGD
from tests.unit import _runs
from tests.unit._gpt import Training, batches_of
from tests.unit._lane import lanes_that
from tests.unit._runs import run_micro_batches, run_stages, wrapped
from tests.unit._whole import assembled

MUON = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.01, "clip_grad": 1.0}
_GPT = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "normalization": "LayerNorm",
    "vocab": 64,
    "positions": "learned_absolute",
}


def over_stages(
    *,
    pp: int = 2,
    vpp: int | None = None,
    tp: int = 1,
    schedule: str | None = None,
    first: int | None = None,
    fields: dict[str, Any] | None = None,
    freeze: tuple[str, ...] = (),
    lora: int | None = None,
    muon: bool = False,
    precision: str = "fp32",
    **settings: Any,
) -> Training:
    """Returns a training over pipeline stages.

    Args:
        first: layers of the first stage, where these are not as many as others.
        muon: matrices are updated by Muon, and the curve has an average of the weights too.
        settings: other fields of `Training`.
    """
    groups = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    cut = {
        "sequence_parallel": tp > 1,
        "pipeline_parallel_schedule": schedule,
        "num_layers_in_first_pipeline_stage": first,
    }
    return Training(
        MUON if muon else SGD,
        steps=10 if settings.get("micro_batches") == 1 else 8 if precision == "fp16" else 5,  # until the loss falls
        precision=precision,
        fields=_GPT | (fields or {}),
        groups=groups if vpp is None else groups | {"virtual_pipeline_model_parallel_size": vpp},
        cut=cut,
        length=8,
        has_average=muon,
        prepare=partial(_prepare, freeze, lora),
        **{"tied": False, **settings},
    )


def _prepare(freeze: Sequence[str], lora: int | None, models: Sequence[GPTModel]) -> None:
    for model in models:
        add_lora(model, lora)
    if freeze:
        freeze_parameters(models, freeze)


def train_at_other_times(
    training: Training, silent: int | None, failing: int | None, is_elsewhere: bool = False
) -> str:
    """Makes a step, and then one that the pipeline rank `silent` does not join, or in which `failing` raises.

    Args:
        is_elsewhere: the silent rank waits for the others in an all-reduce of the pipeline.

    Returns:
        What this rank's second step raised.
    """
    chunks = wrapped("ddp", replace(training, groups={**training.groups, "distributed_timeout_minutes": 0.05}))
    run_micro_batches(training, chunks, 0, None)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if rank == silent:
        if is_elsewhere:
            group = parallel_state.get_pipeline_model_parallel_group()
            with pytest.raises(RuntimeError):
                all_reduce_by_backend(torch.ones(1), group, what="the loss")
        return ""
    data = batches_of(training, 1, 0)[: 1 if rank == failing else None]  # there is no second micro-batch
    chunks[0].zero_grad_buffer()
    try:
        run_stages(training, chunks, data)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing"


def export_from_stages(wrapper: str, training: Training, folder: Path) -> tuple[list[tuple[str, torch.Tensor]], bool]:
    """Writes the model of this rank's stages for Hugging Face, reads it back into others, and streams its weights.

    Returns:
        The stream's names and tensors, on the first rank; and whether what was read is what was written.
    """
    chunks = wrapped(wrapper, training)
    save_hugging_face(chunks, folder)
    stream = [(name, tensor.clone()) for name, tensor in WeightStream(chunks, "module", receivers=[0])]
    before = assembled(stages_state_dict([unwrap_model(chunk) for chunk in chunks]))
    for chunk in chunks:
        with chunk.whole_parameters(), torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
    load_hugging_face(chunks, folder)
    after = assembled(stages_state_dict([unwrap_model(chunk) for chunk in chunks]))
    return stream, all(torch.equal(after[name], before[name]) for name in before)


def events_of_steps(cases: list[tuple[str, Training]]) -> list[list[str]]:
    """Returns what this rank does in a step of each case, in order: backwards of its stages and deferred gradients of
    their weights, reductions over replicas as they are submitted, and the end of the schedule."""
    return [_events(*case) for case in cases]


def _events(wrapper: str, training: Training) -> list[str]:
    events: list[str] = []
    replicas: list[int] = []
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
        chunks = wrapped(wrapper, training)
    replicas += dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    with (
        mock.patch.object(CollectiveRecord, "collective", collective),
        mock.patch.object(stages.Stage, "note", note),
        mock.patch.object(stages, "compute_deferred", compute_deferred),
        mock.patch.object(_runs, "finalize_model_grads", finalize),
    ):
        run_micro_batches(training, chunks, 0, None)
    parallel_state.destroy_model_parallel()
    return [event for event in events if event]
