"""The command: its tables and files, what it takes from a launcher's words, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.planner import find_hardware, hardware, search
from core.planner.__main__ import main
from core.planner.estimates import WRAPPERS
from tests.unit.planner._lines import TINY


def test_all_wrappers_of_a_command_line_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "plan.json"
    before = ["--json", str(file), "torchrun", "--nnodes=2", "--nproc_per_node", "4", "train.py"]
    assert main([*before, *TINY.split(), "--use-torch-fsdp2"]) == 0
    planned = json.loads(file.read_text())["wrappers"]
    assert planned.keys() == WRAPPERS.keys()
    assert {entry["world_size"] for entry in planned.values()} == {8}
    table = capsys.readouterr().out
    assert "on 8 h100" in table and "all-gather over 8" in table
    peaks = [planned[name]["peak_bytes"] for name in ("replicated", "ZeRO-1", "ZeRO-2")]
    assert peaks == sorted(peaks, reverse=True)
    assert all(sum(entry["bytes_at_peak"].values()) == entry["peak_bytes"] for entry in planned.values())


def test_a_wrapper_that_the_run_would_refuse_is_listed(capsys: pytest.CaptureFixture[str]):
    flags = [*TINY.split(), "--use-torch-fsdp2", "--forward-prefetch", "2"]
    assert main(["--world-size", "2", "--wrappers", "ZeRO-1,FSDP2", *flags]) == 0
    assert "ZeRO-1: forward_prefetch is a setting of wrappers that shard parameters" in capsys.readouterr().out


def test_bandwidths_of_the_host_are_said_to_be_assumed(capsys: pytest.CaptureFixture[str]):
    for more in ([], ["--cpu-offload"]):
        assert main(["--world-size", "2", "--wrappers", "FSDP2", *TINY.split(), "--use-torch-fsdp2", *more]) == 0
        assert ("GB/s for each accelerator: both are assumed" in capsys.readouterr().out) == bool(more)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--world-size 3 --tensor-model-parallel-size 2", "3 ranks do not divide"),
        ("--hardware v100", "take a100, h100, h200, b200"),
        ("--wrappers ZeRO-9", "take replicated, ZeRO-1"),
        ("--no-such-flag 1", "no-such-flag"),
        ("--gpu-memory nan", "gpu-memory is nan; it takes a positive number"),
        ("--gpu-memory inf", "gpu-memory is inf; it takes a positive number"),
        ("--wrappers FSDP2 --world-size 2 --json no/such/folder/x.json", "give a path in a folder"),
        ("--use-torch-fsdp2 --optimizer muon", "optimizer is 'muon', which the planner simulates for replicated"),
    ],
)
def test_bad_input_is_one_line(flags: str, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        main([*flags.split(), *TINY.split()])
    assert "\n" not in str(error.value)


def test_a_launcher_whose_ranks_are_not_known_is_refused():
    with pytest.raises(ConfigError, match="gpu x 1 ranks; say how many with --world-size"):
        main(["torchrun", "--nproc-per-node", "gpu", "train.py", *TINY.split()])


def test_a_sweep_and_a_search_are_shown_on_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(search, "MOST_RANKS", 16)
    page = tmp_path / "plan.html"
    flags = ["--world-size", "2", "--wrappers", "ZeRO-3", "--sweep", "--html", str(page), *TINY.split()]
    assert main(flags) == 0
    assert "hybrid ZeRO-3: scales to 16 ranks" in capsys.readouterr().out
    drawn = page.read_text()
    assert drawn.count("<svg") == 2 and "activations" in drawn and "http" not in drawn


def test_a_search_ranks_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "MICRO_BATCH_SIZES", (1, 2))
    monkeypatch.setattr(search, "_powers", lambda first, last: [1, 2])
    flags = ["--world-size", "4", "--wrappers", "ZeRO-1", "--search", *TINY.split()]
    assert main(flags) == 0
    lines = capsys.readouterr().out.split("what fits, the fastest first")[1].splitlines()[2:]
    assert len(lines) > 5 and "ZeRO-1, micro-batch 2, recomputes none" in lines[0]
    rates = [float(line.split()[-1].replace(",", "")) for line in lines]
    assert rates == sorted(rates, reverse=True)


def test_a_run_that_does_not_fit_names_a_change_that_does(capsys: pytest.CaptureFixture[str]):
    large = "--num-layers 2 --hidden-size 1024 --vocab-size 32000 --seq-length 512"
    flags = ["--world-size", "8", "--wrappers", "replicated", "--gpu-memory", "3", *TINY.split(), *large.split()]
    assert main(flags) == 1
    shown = capsys.readouterr().out
    assert "NO" in shown and "the cheapest change that fits: " in shown


def test_a_calibration_is_a_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "here.json"
    monkeypatch.setattr(hardware, "_REPEATS", 1)
    monkeypatch.setattr(hardware, "_MOST_SPREAD", -1.0)  # as if times differed
    assert main(["--calibrate", str(file)]) == 0
    said = capsys.readouterr().out
    assert "warning: the machine was busy" in said and "links are not measured by one rank" in said
    assert find_hardware(str(file)).link_bandwidth == find_hardware("h100").link_bandwidth
