"""The table and the page of every wrapper: aligned, in their width, complete, and safe to open."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from core.distributed import FullyShardedDataParallel, _BaseDataParallel
from core.distributed.report.facts import ModelFacts, model_facts
from core.distributed.report.table import WIDTH
from core.errors import ConfigError
from tests.functional._runs import build_gpt
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import WRAPPERS, batches, build, loss_of, toy


def _describes(kind: str) -> tuple[str, str, int, int]:
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
    return model.describe(num_microbatches=4), model.describe("html", 4), len(facts.units), len(facts.ties)


def _kept(model: _BaseDataParallel) -> list[torch.Tensor]:
    """What this rank keeps of the parameters."""
    if isinstance(model, FullyShardedDataParallel):
        return model.held_tensors()["parameters"][:-1]  # without the model's one buffer
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
    (text, html, num_units, num_ties), other = run_distributed(_describes, 2, kind)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    table = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("all "))]
    assert {line.rstrip()[-1] for line in table} <= set("tB-")  # numbers end where their heading ends
    assert "a step of 4 micro-batches: " in text
    assert "tied: embedding.weight = head.weight" in text
    assert "replicated: 1 buffer, 28 B" in text
    assert ("replicated and not trained: frozen" in text) == (kind not in ("fsdp2", "zero3"))
    assert other[0] == text  # shards are padded to be equal
    page = _Page(html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags) and page.fetched == []
    picture = ET.fromstring(re.search(r"<svg.*?</svg>", html, re.DOTALL).group())
    titles = [title.text for group in picture.iter("g") for title in group.iter("title")]
    assert len(titles) == num_units
    assert sum(path.get("class") == "tie" for path in picture.iter("path")) == num_ties == 1
    hatched = sum(box.get("fill") == "url(#hatch)" for box in picture.iter("rect"))
    assert hatched == (0 if kind in ("fsdp2", "zero3") else num_units)
    assert all(float(box.get("width")) > 0 and float(box.get("height")) >= 0 for box in picture.iter("rect"))


def _draws_in_proportion() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 192, bias=False))
    model = build("fsdp2", module, config=SimpleNamespace(bf16=True))
    picture = ET.fromstring(re.search(r"<svg.*?</svg>", model.describe("html"), re.DOTALL).group())
    areas = {}
    for group in picture.iter("g"):
        boxes = [(box.get("class"), float(box.get("width")) * float(box.get("height"))) for box in group.iter("rect")]
        areas[group.find("title").text.split(":")[0]] = dict(boxes)
    # Three times the bytes; half of the fp32 values here, all of them in bf16 while gathered: as many bytes.
    assert areas["1"]["fp32"] / areas["0"]["fp32"] == pytest.approx(3, rel=0.02)
    assert areas["1"]["gathered bf16"] == pytest.approx(areas["1"]["fp32"], rel=0.02)


def test_areas_are_in_proportion_to_bytes():
    run_distributed(_draws_in_proportion, 2)


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<script>alert(1)</script>&", nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


def _escapes() -> str:
    return build("fsdp2", _Named()).describe("html")


def test_names_are_escaped():
    page = run_distributed(_escapes, 1)[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page
    assert "script" not in _Page(page).tags


def _describes_gpt() -> list[str]:
    return [
        build(kind, build_gpt(True), unit_classes=(type(build_gpt(True).decoder.layers[0]),)).describe()
        for kind in ("fsdp2", "ddp")
    ]


def test_the_weight_that_a_gpt_lends_to_its_output_is_tied():
    for text in run_distributed(_describes_gpt, 1)[0]:
        assert "tied: embedding.word_embeddings.weight = output_layer.weight" in text
