"""The table and the page of every wrapper: aligned, in their width, complete, and safe to open."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from core.base.errors import ConfigError
from core.distributed import FullyShardedDataParallel, _BaseDataParallel
from core.distributed.report.table import WIDTH, ModelFacts, model_facts
from tests.unit._gpt import build_gpt
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import WRAPPERS, batches, build, loss_of, toy


def _describes(kind: str) -> tuple[str, str, int]:
    model = build(kind, toy())
    kept = sum(t.untyped_storage().nbytes() for t in _kept(model))
    facts: ModelFacts = model_facts(model.plan, model.module, 4)
    assert model.describe(num_microbatches=4).splitlines()[0].startswith(f"{type(model).__name__}: 246 parameters")
    if kind in ("fsdp2", "zero3"):
        assert sum(unit.kept.nbytes for unit in facts.units) == kept
    assert sum(unit.num_parameters for unit in facts.units) == sum(p.numel() for p in toy().parameters())
    before = model.describe()
    loss_of(model, batches(0)[0]).backward()  # gathered, or with gradients, it is the same model
    assert model.describe() == before
    model.finish_grad_sync()
    with pytest.raises(ConfigError, match="format is 'pdf'"):
        model.describe("pdf")
    return model.describe(num_microbatches=4), model.describe("html", 4), len(facts.units)


def _kept(model: _BaseDataParallel) -> list[torch.Tensor]:
    """Returns this rank's part of the parameters."""
    if isinstance(model, FullyShardedDataParallel):
        return model.engine.held()["parameters"][:-1]  # without the model's one buffer
    return [p.to_local() if isinstance(p, DTensor) else p for p in dict.fromkeys(model.parameters())]


class _Page(HTMLParser):
    """What a page holds, and everything that it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_wrapper_describes_itself(kind):
    (text, html, num_units), other = run_distributed(_describes, 2, kind)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    table = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("all "))]
    assert {line.rstrip()[-1] for line in table} <= set("tB-")  # numbers end where their heading ends
    assert "a step of 4 micro-batches: " in text
    assert "tied: embedding.weight = head.weight" in text
    assert "replicated: 1 buffer, 28 B" in text
    assert ("replicated and not trained: frozen" in text) == (kind not in ("fsdp2", "zero3"))
    assert other[0] == text  # shards are padded to be equal
    state = {"zero1": "optimizer state", "zero2": "gradients and optimizer state"}
    what = "" if kind.startswith("ddp") else state.get(kind.partition("_")[0], "everything")
    assert lines[0].endswith(f", {what} sharded over 2" if what else ", replicated")
    advice = "Keep these units: the largest, " if kind in ("fsdp2", "zero3") else "take ZeRO-3 or FSDP2"
    assert advice in lines[-1] and lines[-1] in unescape(html)
    assert re.findall(r"<dt>(\w+)</dt><dd>\w", html) == lines[2].split()  # each with its meaning
    page = _Page(html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags) and page.fetched == []
    bars = re.findall(r'class="bar (\w+) \w+" style="width: ([\d.]+)%"', html)
    assert {style for style, _ in bars} == ({"kept", "gathered"} if kind in ("fsdp2", "zero3") else {"kept"})
    assert max(float(width) for _, width in bars) == 100 and len(bars) >= num_units


@on_ranks(2)
def test_bars_are_in_proportion_to_bytes() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 192, bias=False))
    html = build("fsdp2", module, config=SimpleNamespace(bf16=True)).describe("html")
    bars = re.findall(r'class="bar (\w+ \w+)" style="width: ([\d.]+)%"', html)
    # Three times the bytes; half of the fp32 values here, all of them in bf16 while gathered: as many bytes.
    expected = [("kept fp32", "33.3"), ("gathered bf16", "33.3"), ("kept fp32", "100.0"), ("gathered bf16", "100.0")]
    assert bars == expected


@on_ranks(2)
def test_a_unit_with_most_of_the_model_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 80))
    text = build("fsdp2", model).describe()
    assert text.endswith(
        f"Split 1 ({720 / 792:.0%} of the parameters): name the classes of its layers in sub_modules_to_wrap."
    )


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<script>alert(1)</script>&", nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


@on_ranks(1)
def test_names_are_escaped() -> None:
    page = build("fsdp2", _Named()).describe("html")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page
    assert "script" not in _Page(page).tags


class _TableOfPage(HTMLParser):
    """The cells of a page's table, each as the pieces between which a browser may begin a new line."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[list[str]] = []
        self._is_cell = self._wraps = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.lines.append([])
        elif tag in ("td", "th"):
            self._is_cell, self._wraps = True, tag == "td" and ("class", "text") in attrs
            self.lines[-1].append("")
        elif tag == "wbr" and self._is_cell:
            self.lines[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.lines[-1][-1] += data.replace(" ", "\n") if self._wraps else data


def _describes_gpt_on_pages() -> dict[str, tuple[str, str]]:
    layer = type(build_gpt(True).decoder.layers[0])
    models = {kind: build(kind, build_gpt(True), unit_classes=(layer,)) for kind in ("ddp", "zero1", "zero2", "fsdp2")}
    half = sum(parameter.numel() for parameter in build_gpt(True).parameters()) // 2
    models["two buckets"] = build("ddp", build_gpt(True), bucket_size=half)
    return {kind: (model.describe(), model.describe("html")) for kind, model in models.items()}


LETTER_PX, PADDING_PX, PAGE_PX = 8.0, 19.2, 1160 - 48
"""Of the page's style: a wide digit at 13 px, a cell's padding on both sides, and the text's width in 1,160 px."""


def test_the_table_of_a_page_is_not_wider_than_the_page():
    for kind, (text, html) in run_distributed(_describes_gpt_on_pages, 2)[0].items():
        assert "tied: embedding.word_embeddings.weight = output_layer.weight" in text
        head, *body = _TableOfPage(html).lines
        assert head == text.splitlines()[2].split(), kind  # columns that say nothing are left out there too
        longest = [
            max(len(piece) for line in (head, *body) for piece in line[i].split("\n")) for i in range(len(head))
        ]
        assert sum(longest) * LETTER_PX + len(head) * PADDING_PX < PAGE_PX, (kind, longest)
        parts = max(len(part) for name, _ in build_gpt(True).named_parameters() for part in name.split("."))
        assert longest[0] <= parts + 1 and "td.text { white-space: normal;" in html  # names go on after their dots
        assert not any(re.search(r"\d\n[a-z]", cell) for line in body for cell in line), kind  # "39 parameters"
