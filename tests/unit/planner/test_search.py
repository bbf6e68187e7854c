"""Shallow plans compared with whole ones, and what is chosen of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.planner import PRESETS, estimate, search
from core.planner.search import Candidate, Scaling, candidates, scalings, shallow_estimate, single_changes
from core.training.config import PretrainConfig
from core.training.config.arguments import parse_arguments, parse_values
from tests.unit.planner._lines import LLAMA, TINY

H100 = PRESETS["h100"]
FLAGS = f"{TINY} {LLAMA} --use-torch-fsdp2 --num-layers 8".split()


def test_two_depths_give_the_costs_of_any_depth():
    config = parse_arguments(FLAGS)
    whole, shallow = estimate("", config, 2, H100), shallow_estimate("", config, 2, H100)
    assert shallow.peak_bytes == pytest.approx(max(whole.peak_bytes, whole.simulation.construction_peak), rel=0.01)
    assert shallow.step_s == pytest.approx(whole.time.step_s, rel=0.01)
    assert shallow.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.01)


def test_the_fastest_that_fits_comes_first():
    variants = {
        "full": [*FLAGS, "--activation-checkpointing", "full"],
        "none": FLAGS,
        "refused": [*FLAGS, "--no", "1"],
    }
    assert [each.name for each in candidates({}, variants, 2, H100)] == ["none", "full"]
    assert candidates({}, {"none": FLAGS}, 2, replace(H100, memory_bytes=2**31)) == []


def test_a_change_is_one_setting_of_the_run():
    values = parse_values([*FLAGS, "--micro-batch-size", "4"])
    changes = single_changes(values)
    assert "wrapper ZeRO-3" in changes and "wrapper FSDP2" not in changes
    assert parse_arguments(changes["--micro-batch-size 2"], values).data.micro_batch_size == 2
    assert not parse_arguments(changes["wrapper ZeRO-1"], values).use_torch_fsdp2


def test_a_search_changes_one_setting_at_a_time(monkeypatch: pytest.MonkeyPatch):
    def planned(name: str, config: PretrainConfig, ranks: int, *rest: Any) -> Candidate:
        """FSDP2 is fastest, with large micro-batches on two stages and two expert-parallel ranks."""
        model, size = config.model, config.data.micro_batch_size
        memory = 2**20 * size * (1 if config.ddp.activation_checkpointing == "full" else 2)
        sizes = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.expert_model_parallel_size
        off = sum(abs(own - best) for own, best in zip(sizes, (1, 2, 2), strict=True))
        return Candidate(name, ranks, memory, 1.0, 0.0, 0.0, config.use_torch_fsdp2 - off + size / 10)

    monkeypatch.setattr(search, "shallow_estimate", planned)
    flags = f"{TINY} {LLAMA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall".split()
    hardware = replace(H100, memory_bytes=search.RESERVED_BYTES + 5 * 2**20)
    found = search.search(parse_values(flags), ["ZeRO-1", "FSDP2"], 8, hardware)
    assert found[0].name == "FSDP2, pipeline-parallel 2, expert-parallel 2, micro-batch 4, recomputes full"
    assert found == sorted(found, key=lambda each: -each.tokens_per_second)
    assert len(found) == len({each.name for each in found}) < 20  # of 2 x 4 x 2 x 3 x 3 ways


def test_a_sweep_keeps_the_micro_batches_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    flags = f"{TINY} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 8 --global-batch-size 16"
    planned = []
    monkeypatch.setattr(search, "MOST_RANKS", 64)
    monkeypatch.setattr(search, "shallow_estimate", lambda _, config, ranks, *rest: planned.append((config, ranks)))
    list(scalings({"replicated": parse_arguments(flags.replace("heads 4", "heads 8").split())}, 32, H100))
    assert [(config.num_microbatches(ranks), ranks) for config, ranks in planned] == [(4, 16), (4, 32), (4, 64)]


def test_activations_of_all_micro_batches_under_way_count():
    stages = "--pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-parallel-schedule"
    of_all, of_two = (
        estimate("", parse_arguments(f"{TINY} {stages} {name}".split()), 2, H100).formula_bytes["activations"]
        for name in ("GPipe", "1F1B")
    )
    assert of_all == 2 * of_two


def test_a_wrapper_stops_scaling_below_nine_tenths_of_its_best():
    point = Candidate("", 8, 0, 1.0, 0.0, 0.0, 1000.0)
    points = (
        point,
        replace(point, world_size=16, tokens_per_second=950.0),
        replace(point, world_size=32, tokens_per_second=890.0),
    )
    assert Scaling("", points).stops_at == 32
    assert Scaling("", points[:2]).stops_at is None
