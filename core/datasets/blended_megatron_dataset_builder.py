"""Builds the datasets of a run under Megatron-LM's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import ConfigError
from .gpt_dataset import SPLITS, GPTDataset, GPTDatasetConfig, MockGPTDataset, document_range


class BlendedMegatronDatasetBuilder:
    """Builds a dataset for training, validation and test from one corpus, or from mock data.

    Args:
        cls: `GPTDataset`, of the corpus of `config.blend`; or `MockGPTDataset`, without one.
        sizes: at least this many samples for each of the three; None is one epoch.
        is_built_on_rank: whether this rank reads data; others get None.
        config: settings of the datasets.

    Raises:
        ConfigError: the config has several corpora or weights, or not what `cls` reads.
    """

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        self.cls, self.sizes, self.is_built_on_rank, self.config = cls, sizes, is_built_on_rank, config
        is_mock = issubclass(cls, MockGPTDataset)
        if config.blend is not None and (len(config.blend[0]) != 1 or config.blend[1] is not None):
            raise ConfigError(f"blend is {config.blend}, and one corpus is read; write it as ([path], None)")
        if is_mock != (config.blend is None):
            reads = "no corpus; leave blend out" if is_mock else "a corpus; give its path as blend=([path], None)"
            raise ConfigError(f"{cls.__name__} reads {reads}")
        if len(sizes) != len(SPLITS):
            raise ConfigError(f"sizes is {list(sizes)}; it takes one for each of {', '.join(SPLITS)}")

    def build(self) -> list[GPTDataset | None]:
        """Returns three datasets, with None for a split without documents."""
        if not self.is_built_on_rank():
            return [None] * len(SPLITS)
        path = None if self.config.blend is None else self.config.blend[0][0]
        corpus: Any = self.cls.build_low_level_dataset(path, self.config)  # type: ignore[arg-type]  # None for mock data
        split = "1,1,1" if path is None else self.config.split
        datasets: list[GPTDataset | None] = []
        for name, size in zip(SPLITS, self.sizes, strict=True):
            first, last = document_range(len(corpus), name, split)
            datasets.append(None if first == last else self.cls(corpus, name, self.config, size))
        return datasets
