"""Whole runs over pipeline stages: the example on the command line, its log and its checkpoints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.base.errors import ParallelConfigError
from core.pipeline_parallel import stages
from examples.gpt.run_model import load_run_model
from tests.functional._pipelines import events_of_steps, export_from_stages, over_stages, train_at_other_times
from tests.unit._program import run_program
from tests.unit._spawn import run_distributed

MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "48"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "8", "--log-interval", "1"),
    *("--eval-iters", "1", "--log-weights-hash", "2", "--save-interval", "2"),
)
STAGES = ("--pipeline-model-parallel-size", "2")


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the values of each step in a run's log."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "step" in values:
            steps.setdefault(values["step"], {}).update(values)
    return steps


def _run(folder: Path, corpus: Path, *flags: str, ranks: int) -> dict[int, dict[str, Any]]:
    ended = run_program(
        "pretrain_gpt", "--data-path", corpus, "--save", folder, *MODEL, *flags, folder=folder.parent, ranks=ranks
    )
    assert ended.status == 0, ended.err[-4000:]
    return _steps(folder)


def test_stages_have_the_same_bits_on_any_number_of_replicas(tmp_path: Path, corpus: Path):
    same = (*STAGES, "--reproducible-across-ranks", "--train-iters", "4")
    runs = [
        _run(tmp_path / f"{number}", corpus, *same, *wrapper, ranks=ranks)
        for number, (ranks, wrapper) in enumerate(
            ((2, ("--data-parallel-sharding-strategy", "optim")), (4, ("--use-torch-fsdp2",)))
        )
    ]
    for run in runs[1:]:
        assert [{name: run[step].get(name) for name in COMPARED} for step in range(1, 5)] == [
            {name: runs[0][step].get(name) for name in COMPARED} for step in range(1, 5)
        ]


LIKE_GPT2 = {"activation_func": "gelu_tanh"}
COMPARED = ("loss", "grad_norm", "weights_hash", "validation_loss")


def test_a_run_over_stages_logs_and_saves_as_one_process(tmp_path: Path, corpus: Path):
    """Stages of different wrappers continue a run of one process, and one process continues theirs."""
    packed = ("--reset-position-ids", "--reset-attention-mask")
    untied = ("--untie-embeddings-and-output-weights", "--train-iters", "6", *packed)
    alone = _run(tmp_path / "alone", corpus, *untied, ranks=1)
    virtual = (*STAGES, "--num-layers-per-virtual-pipeline-stage", "1", "--use-torch-fsdp2")
    staged = _run(tmp_path / "staged", corpus, *untied, *virtual, ranks=2)
    for step in range(1, 7):
        shown = {name: alone[step].get(name) for name in COMPARED}
        assert {name: staged[step].get(name) for name in COMPARED} == shown
    resumed = _run(tmp_path / "resumed", corpus, *untied, "--load", str(tmp_path / "staged" / "iter_0000002"), ranks=1)
    assert [resumed[step]["loss"] for step in (3, 4, 5, 6)] == [alone[step]["loss"] for step in (3, 4, 5, 6)]
    assert resumed[6]["weights_hash"] == alone[6]["weights_hash"]
    whole, read = (load_run_model(tmp_path / run / "iter_0000006")[1].state_dict() for run in ("alone", "staged"))
    assert all(torch.equal(read[name], weight) for name, weight in whole.items())
    again = ("--pretrained-checkpoint", str(tmp_path / "alone"), "--train-iters", "2")
    started, staged = (
        _run(tmp_path / f"again{ranks}", corpus, *untied, *again, *flags, ranks=ranks)
        for ranks, flags in ((1, ()), (2, virtual))
    )
    assert {name: staged[2].get(name) for name in COMPARED} == {name: started[2].get(name) for name in COMPARED}


def test_a_stage_reduces_once_a_step_in_its_last_backward():
    """Each unit of each stage reduces once, under any schedule, while later backwards of the step are to come."""
    overlapped = (("zero2", None), ("zero3", 2), ("fsdp2", None), ("fsdp2", 2), ("ddp, overlapped", 2))
    few, many = (
        [(wrapper, over_stages(vpp=vpp, micro_batches=number)) for wrapper, vpp in overlapped] for number in (2, 6)
    )
    deferred = ("ddp, overlapped", over_stages(vpp=2, schedule="ZBVZeroBubble", micro_batches=6))
    for rank, found in enumerate(run_distributed(events_of_steps, 4, [*few, *many, deferred])):
        counts = [events.count("reduction") for events in found]
        assert counts[: len(few)] == counts[len(few) : -1] and min(counts) > 0
        for (_, case), events in zip([*few, *many], found[:-1], strict=True):
            backwards = [index for index, event in enumerate(events) if event.startswith("backward")]
            # Of virtual stages the last is done while the first has a micro-batch to come.
            end = events.index("end of the schedule") if len(case.groups) == 2 else backwards[-1]
            assert backwards[case.micro_batches - 1] < events.index("reduction") < end, (case, events)
        # The input's gradients of two stages leave before the weights' are computed, where these fill the cool-down.
        steps = [event for event in found[-1] if event != "reduction"]
        assert steps.count("weights") == 12
        of_inputs = [a.startswith("backward") and b.startswith("backward") for a, b in itertools.pairwise(steps)]
        assert any(of_inputs) == (rank >= 2), steps
        assert found[-1].index("reduction") < found[-1].index("end of the schedule")


@pytest.mark.parametrize(("wrapper", "ranks", "vpp"), [("zero3", 4, None), ("fsdp2", 2, 2)])
def test_weights_of_all_stages_go_out_and_come_in(tmp_path: Path, wrapper: str, ranks: int, vpp: int | None):
    pytest.importorskip("safetensors")
    training = over_stages(vpp=vpp, tied=True, fields=LIKE_GPT2)
    of_ranks = run_distributed(export_from_stages, ranks, wrapper, training, tmp_path / "model")
    (whole,) = training.alone.build()
    expected = whole.state_dict()
    assert all(is_equal for _, is_equal in of_ranks)
    stream = dict(of_ranks[0][0])
    assert stream.keys() == expected.keys()
    assert [name for name in stream if not torch.equal(stream[name], expected[name])] == []


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_silent_neighbour_is_named_with_its_micro_batch(is_elsewhere: bool):
    """One that does nothing, and one that waits in a collective, where the watch for deadlocks looks."""
    _, said = run_distributed(train_at_other_times, 2, over_stages(micro_batches=2), 0, None, is_elsewhere)
    assert "OutOfStepError: rank 1, pipeline stage 1 of 2 (layers 2 to 3)" in said
    assert "waits for the activations of micro-batch 0 from stage 0 (rank 0), and nothing came" in said


def test_an_interrupted_step_leaves_no_deferred_products():
    pipeline: Any = stages.Pipeline.__new__(stages.Pipeline)
    stage = SimpleNamespace(dw_runner={0: lambda: None})
    pipeline._chunks, pipeline._stages = [], [stage]
    with pytest.raises(KeyboardInterrupt), pipeline.step([], lambda model, index: torch.zeros(())):
        raise KeyboardInterrupt
    assert not stage.dw_runner


def test_a_crash_is_named_on_its_stage_and_at_its_neighbour():
    crashed, waiting = run_distributed(train_at_other_times, 2, over_stages(micro_batches=2), None, 0)
    assert crashed.startswith("StopIteration") or "pipeline stage 0 of 2" in crashed
    assert "rank 0, pipeline stage 0 of 2 (layers 0 to 1): forward of micro-batch 1" in crashed
    assert "waits for the activations of micro-batch 1 from stage 0 (rank 0), and nothing came" in waiting


def test_a_model_that_cannot_be_cut_is_one_line():
    config = over_stages().alone.build()[0].config
    with pytest.raises(ParallelConfigError, match="a Linear cannot be cut into pipeline stages: it has no set_input"):
        stages._Chunk(torch.nn.Linear(1, 1), 0, (1, 1, 16), config)
