"""The rows of `gpt_throughput.py`: techniques one on the other, then other wrappers and attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from _llama import Preset
from _llama_training import TORCHS, WRAPPERS, Training


@dataclass(frozen=True)
class Technique:
    """What a row adds: fields of the model's config and of the wrapper's."""

    name: str
    model: dict[str, Any]
    wrapper: dict[str, Any]


LADDER = (
    Technique("plain", {}, {}),
    Technique("compiled layers", {}, {"compile_units": True}),
    Technique("loss in parts", {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}, {}),
    Technique("selective recomputation", {}, {"activation_checkpointing": "selective"}),
    Technique("full recomputation", {}, {"activation_checkpointing": "full"}),
)
"""Each row has the techniques above it too, but for those that set the same."""

DEFAULT = ("compiled layers", "loss in parts")
"""The techniques of a run without a ladder, and of rows that compare wrappers or attention kernels."""

ATTENTION = ("flash", "flash3", "fused", "unfused")
"""Values of `attention_backend`, each a row of the ladder."""

UNFUSED_SAMPLES = 1
"""Sequences of a micro-batch of the row "unfused attention", which keeps the scores of all pairs of tokens: of a
sequence in 1b 2 GB a layer in fp32, and as much again for each copy of them."""


@dataclass(frozen=True)
class Row:
    """A measurement: what is trained, under what."""

    name: str
    """For `--ladder`: of the technique that it adds, or of what differs."""
    wrapper: str
    techniques: tuple[Technique, ...]
    most_samples: int | None = None
    """The most sequences of a micro-batch; None takes the preset's."""
    may_run_out_of_memory: bool = False
    """Whether running out of memory is an answer: it then does not make the run fail."""

    def __str__(self) -> str:
        techniques = " + ".join(one.name for one in self.techniques) or "plain"
        return f"{self.wrapper}: {techniques}" + (f", samples {self.most_samples}" if self.most_samples else "")

    def preset(self, preset: Preset) -> Preset:
        """Returns the preset with the samples of this row."""
        samples = preset.samples if self.most_samples is None else min(preset.samples, self.most_samples)
        return replace(preset, samples=samples)

    def training(self, preset: Preset) -> Training:
        """Builds the model and its optimizer, for the samples of this row."""
        model_fields = {k: v for one in self.techniques for k, v in one.model.items()}
        wrapper_fields = {k: v for one in self.techniques for k, v in one.wrapper.items()}
        return Training(self.preset(preset), model_fields, wrapper_fields, self.wrapper)


def rows_of(wrapper: str, is_ladder: bool) -> list[Row]:
    """Returns the rows of a run."""
    usual = tuple(one for one in LADDER if one.name in DEFAULT)
    if not is_ladder:
        return [Row("default", wrapper, usual)]
    rows = []
    for index, last in enumerate(LADDER):
        kept = [one for one in LADDER[:index] if one.wrapper.keys().isdisjoint(last.wrapper)]
        if wrapper in TORCHS and any(one.wrapper.keys() - {"compile_units"} for one in (*kept, last)):
            continue  # only this project's wrappers have it
        rows.append(Row(last.name, wrapper, (*kept, last)))
    rows += [Row(other, other, usual) for other in WRAPPERS if other != wrapper]
    for kernel in ATTENTION:
        attends = Technique(f"{kernel} attention", {"attention_backend": kernel}, {})
        row = Row(attends.name, wrapper, (*usual, attends))
        if kernel == "unfused":
            row = replace(row, most_samples=UNFUSED_SAMPLES, may_run_out_of_memory=True)
        rows.append(row)
    return rows
