"""The command: its tables and files, what it takes from a launcher's words, and its exit status."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.base.errors import ConfigError, MissingExtraError
from core.planner import find_hardware, hardware, search
from core.planner.__main__ import plan as main
from core.planner.estimates import WRAPPERS
from core.planner.tables import recommendation
from tests.unit.planner._lines import TINY


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


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
    drawn = Drawn(page.read_text())
    assert drawn.num_pictures == 3 and drawn.references and all(is_inside(each) for each in drawn.references)
    assert len(drawn.ids) == len(set(drawn.ids)) and {each for each in drawn.references if each[0] == "#"} <= {
        f"#{name}" for name in drawn.ids
    }
    labels = {"memory (GiB)", "time in the step (ms)", "sent by a rank in a step (GiB)", "ranks", "tokens/s of a rank"}
    legends = {"activations", "optimizer state", "computation", "stay in the node", "hybrid ZeRO-3"}
    assert labels | legends <= {*drawn.texts} and drawn.num_tables == 4
    assert "Use ZeRO-3 (--data-parallel-sharding-strategy optim_grads_params): fits with " in drawn.body
    # What may be wider than a phone scrolls in its own box, and what a picture says is inside of it.
    assert drawn.wide_outside == [] and drawn.texts_outside == []
    assert "prefers-color-scheme: dark" in drawn.body and "#000000" not in drawn.body


def is_inside(reference: str) -> bool:
    """Returns whether a reference needs no other file."""
    return reference.startswith(("#", "data:image/png;base64,"))


class Drawn(HTMLParser):
    """What a page holds: its tables, and its pictures with the texts in them."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.body, self.open, self.num_pictures, self.num_tables = body, [("", "")], 0, 0
        self.ids, self.references, self.texts = list[str](), re.findall(r"url\(([^)]+)\)", body), list[str]()
        self.wide_outside, self.texts_outside = list[str](), list[str]()
        self._size = self._place = (0.0, 0.0)
        self.feed(body)
        assert len(self.open) == 1  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values[name] for name in ("src", "href", "xlink:href", "data") if name in values]
        self.num_pictures, self.num_tables = self.num_pictures + (tag == "svg"), self.num_tables + (tag == "table")
        if tag in ("svg", "table") and not any(style == "scroll" for _, style in self.open):
            self.wide_outside.append(tag)
        if tag == "svg":
            self._size = (float(values["viewbox"].split()[2]), float(values["viewbox"].split()[3]))
        if tag == "text":
            place = re.search(r"translate\((\S+) (\S+)\)", values["transform"]) if "transform" in values else None
            self._place = (float(place[1]), float(place[2])) if place else (float(values["x"]), float(values["y"]))
        if tag not in ("meta", "br", "wbr"):
            self.open.append((tag, values.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1][0] == "text" and data.strip():
            self.texts.append(data.strip())
            if not (0 <= self._place[0] <= self._size[0] and 0 <= self._place[1] <= self._size[1]):
                self.texts_outside.append(data)


def test_a_page_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = tmp_path / "plan.html"
    flags = ["--world-size", "2", "--wrappers", "ZeRO-1", *TINY.split()]
    with pytest.raises(MissingExtraError, match=r"needs the package 'matplotlib': pip install 'shardstack\[train\]'"):
        main([*flags, "--html", str(page)])
    assert "Use ZeRO-1" in capsys.readouterr().out and not page.exists()


@pytest.mark.parametrize("columns", [60, 80])
def test_text_fits_the_terminal(capsys, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--world-size", "16", *TINY.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    heads = [line.split() for line in lines if line.startswith("sent in a step")]
    assert len(heads) > 1 and [name for head in heads for name in head[4:]] == [*WRAPPERS]


@pytest.mark.parametrize(
    ("steps", "spare", "said"),
    [
        ((2.0, 1.0, 1.5), (50, 50, 50), "Use ZeRO-1 (--data-parallel-sharding-strategy optim): fits with 50 GiB to "
         "spare; 50.0% faster than ZeRO-3, the next."),
        ((2.0, 1.0, 1.5), (-1, 1, 50), "Use ZeRO-3 (--data-parallel-sharding-strategy optim_grads_params): fits with "
         "50 GiB to spare; ZeRO-1 is 33.3% faster, with only 1 GiB; replicated does not fit."),
        ((2.0, 1.0, 1.5), (-1, 1, 2), "Use ZeRO-1 (--data-parallel-sharding-strategy optim): fits with 1 GiB to "
         "spare; 50.0% faster than ZeRO-3, the next; replicated does not fit."),
        ((2.0, 1.0, 1.5), (-1, -1, -1), "No wrapper fits."),
    ],
)  # fmt: skip
def test_the_fastest_that_fits_with_a_margin_is_recommended(steps, spare, said):
    hardware = SimpleNamespace(memory_bytes=80 * 2**30)
    planned: list[Any] = [
        SimpleNamespace(
            wrapper=name,
            time=SimpleNamespace(step_s=step),
            fits=gib >= 0,
            spare_bytes=gib * 2**30,
            peak_bytes=0,
            hardware=hardware,
        )
        for name, step, gib in zip(("replicated", "ZeRO-1", "ZeRO-3"), steps, spare, strict=True)
    ]
    assert recommendation(planned) == said


def test_a_search_ranks_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "MICRO_BATCH_SIZES", (1, 2))
    monkeypatch.setattr(search, "_powers", lambda first, last: [1, 2])
    flags = ["--world-size", "4", "--wrappers", "ZeRO-1", "--search", *TINY.split()]
    assert main(flags) == 0
    lines = capsys.readouterr().out.split("what fits, the fastest first")[1].splitlines()[2:]
    assert len(lines) > 5 and "ZeRO-1, micro-batch 2, recomputes none" in lines[0]
    rates = [float(line.split()[-1].replace(",", "")) for line in lines if line.startswith("ZeRO-1")]
    assert rates == sorted(rates, reverse=True)


def test_a_run_that_does_not_fit_names_a_change_that_does(capsys: pytest.CaptureFixture[str]):
    large = "--num-layers 2 --hidden-size 1024 --vocab-size 32000 --seq-length 512"
    flags = ["--world-size", "8", "--wrappers", "replicated", "--gpu-memory", "3", *TINY.split(), *large.split()]
    assert main(flags) == 1
    shown = capsys.readouterr().out
    assert "NO" in shown and "the cheapest change that fits: " in shown
    assert "M parameters on 8 h100" in shown
    assert main([*flags, "--gpu-memory", "0.001"]) == 1
    assert "No wrapper fits. No single change makes replicated fit." in capsys.readouterr().out


def test_flags_that_are_missing_are_all_named():
    with pytest.raises(ConfigError, match=r"missing: --hidden-size, .*, --micro-batch-size; see --help"):
        main(["--num-layers", "2"])
    with pytest.raises(ConfigError, match=r"'base\.yaml' is no flag; did you mean --config base\.yaml\?"):
        main(["--hardware", "h100", "base.yaml"])


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
