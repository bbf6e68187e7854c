"""An adapter says what becomes of settings, which versions of its system it knows, and which extra installs one."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch

from core.adapters.bridge import translation
from core.adapters.bridge.translation import changed_fields, config_of, honoured, ignored, refused, translate
from core.base.errors import ConfigError, MissingExtraError, ParallelConfigError, warn_once
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig

ROOT = Path(__file__).resolve().parents[4]


def _check(package: str, found: str | None) -> None:
    version = mock.Mock(side_effect=metadata.PackageNotFoundError) if found is None else mock.Mock(return_value=found)
    with mock.patch.object(translation.metadata, "version", version):
        translation.check_version(package, "core.adapters.some_adapter")


@pytest.mark.parametrize(
    ("package", "supported", "others"),
    [
        ("accelerate", ["1.15.0", "1.99.1"], ["1.14.0", "2.0.0.dev0", "2.1"]),
        ("lightning", ["2.6.6"], ["2.5.1", "2.7.0"]),
        ("megatron-core", ["0.16.1", "0.20.0rc0"], ["0.15.3", "0.21.0", "0.21.0rc1", "1.0"]),
        ("torchtitan", ["0.3.0"], ["0.2.2", "0.4.0"]),
        ("transformers", ["5.23.0"], ["4.57.1", "5.22.0", "6.0.0rc1"]),
    ],
)
def test_other_versions_are_refused(package: str, supported: list[str], others: list[str]):
    for found in supported:
        _check(package, found)
    for found in others:
        with pytest.raises(
            ConfigError, match=rf"^{package} {re.escape(found)} is installed, and core.adapters.some_adapter"
        ):
            _check(package, found)


@pytest.mark.parametrize("package", translation.SUPPORTED)
def test_a_package_that_is_not_installed_is_named_with_its_extra(package: str):
    with pytest.raises(MissingExtraError, match=rf"{package}.*shardstack\[{translation.SUPPORTED[package][2]}\]"):
        _check(package, None)


@pytest.mark.parametrize("package", translation.SUPPORTED)
def test_extras_match_supported_versions(package: str):
    at_least, below, extra = translation.SUPPORTED[package]
    line = re.search(rf'"{extra}": \[(.*?)\]', (ROOT / "setup.py").read_text(encoding="utf-8"), re.DOTALL)
    assert line is not None and f'"{package}>={at_least},<{below}"' in line[1]


class _Kind(Enum):
    SMALL = 1
    LARGE = 2


@dataclass
class _Settings:
    prefetch: bool = True
    kind: _Kind = _Kind.SMALL
    static: bool = True
    graphs: int = 0


_ROWS = (
    honoured("prefetch", "forward_prefetch", int),
    ignored("kind", "there is one kind"),
    ignored("static", "nothing is", lambda value: not value),
    refused("graphs", "drop it", lambda value: value > 1),
)


def _warned(settings: object) -> tuple[dict[str, object], list[str]]:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fields = translate(settings, _ROWS)
    return fields, [str(w.message) for w in caught]


def test_each_row_becomes_a_field_an_error_or_a_warning():
    assert _warned(_Settings()) == ({"forward_prefetch": 1}, [])
    assert _warned(_Settings(prefetch=False, graphs=1)) == ({"forward_prefetch": 0}, [])
    changed = ["kind=LARGE changes nothing: there is one kind", "static=False changes nothing: nothing is"]
    assert _warned(_Settings(kind=_Kind.LARGE, static=False))[1] == changed
    with pytest.raises(ParallelConfigError, match=r"^graphs is 2 with a flag: drop it$"):
        translate(_Settings(graphs=2), _ROWS, where=" with a flag")


def test_a_setting_that_is_set_as_an_attribute_counts():
    settings = _Settings()
    settings.mask = 1
    assert changed_fields(settings) == {"mask": 1}
    with pytest.raises(ParallelConfigError, match="mask is 1: drop it"):
        translate(settings, (refused("mask", "drop it"),))


def test_values_of_settings_in_no_row_are_not_looked_at():
    assert translate({"mask": torch.ones(2), "graphs": 0}, (refused("graphs", "drop it"),)) == {}


def test_a_setting_without_a_default_counts_if_not_empty():
    row = (refused("name", "drop it"),)
    for empty in (None, False, 0, "", ()):
        assert translate({"name": empty}, row) == {}
    with pytest.raises(ParallelConfigError, match="name is 'a': drop it"):
        translate({"name": "a"}, row)


def test_a_table_makes_the_config_of_a_strategys_wrapper():
    config = config_of("fsdp2", _Settings(), _ROWS, cpu_offload=True)
    assert isinstance(config, TorchFullyShardedDataParallelConfig)
    assert (config.forward_prefetch, config.cpu_offload) == (1, True)
    config = config_of("optim", {"asked": True}, [honoured("asked", "average_in_collective")])
    assert type(config) is DistributedDataParallelConfig
    assert (config.sharding_strategy, config.average_in_collective) == ("optim", True)
