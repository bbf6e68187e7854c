"""An adapter says what becomes of settings, which versions of its system it knows, and which extra installs one."""

from __future__ import annotations

import re
import tomllib
import warnings
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch

from core.adapters.bridge import translation
from core.adapters.bridge.translation import check_settings
from core.base.errors import ConfigError, MissingExtraError, ParallelConfigError, warn_once
from core.base.megatron_names import changed_fields

ROOT = Path(__file__).resolve().parents[4]


def _check(package: str, found: str | None) -> None:
    version = mock.Mock(side_effect=metadata.PackageNotFoundError) if found is None else mock.Mock(return_value=found)
    spec = mock.Mock(return_value=object())  # installed, also where extras are not
    with (
        mock.patch.object(translation.metadata, "version", version),
        mock.patch.object(translation.util, "find_spec", spec),
    ):
        translation.check_version(package, "core.adapters.some_adapter")


@pytest.mark.parametrize(
    ("package", "supported", "others"),
    [
        ("accelerate", ["1.15.0", "1.99.1"], ["1.14.0", "2.0.0.dev0", "2.1"]),
        ("lightning", ["2.6.6"], ["2.5.1", "2.7.0"]),
        ("megatron-core", ["0.16.1", "0.20.0rc0"], ["0.15.3", "0.21.0", "0.21.0rc1", "1.0"]),
        ("torchtitan", ["0.3.0"], ["0.2.2", "0.4.0"]),
        ("transformers", ["5.23.0"], ["4.57.1", "5.22.0", "6.0.0rc1"]),
        ("verl", ["0.9.1"], ["0.9.0", "0.10.0"]),
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"{package}>={at_least},<{below}" in project["optional-dependencies"][extra]


class _Kind(Enum):
    SMALL = 1
    LARGE = 2


@dataclass
class _Settings:
    prefetch: bool = True
    kind: _Kind = _Kind.SMALL
    static: bool = True
    graphs: int = 0


_TABLES = {
    "settings": {
        "refused": {"graphs": {"reason": "drop it", "unless": [0, 1]}, "mask": "drop it"},
        "ignored": {"kind": "there is one kind", "static": {"reason": "nothing is", "only": [False]}},
    },
    "names": {"refused": {"name other": "it only hurts; drop it"}},
}


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "_TABLES", _TABLES)


def _warned(settings: object) -> list[str]:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_settings(settings, "settings")
    return [str(w.message) for w in caught]


def test_each_row_is_an_error_or_a_warning():
    assert _warned(_Settings()) == []
    assert _warned(_Settings(prefetch=False, graphs=1)) == []
    changed = ["kind=LARGE changes nothing: there is one kind", "static=False changes nothing: nothing is"]
    assert _warned(_Settings(kind=_Kind.LARGE, static=False)) == changed
    with pytest.raises(ParallelConfigError, match=r"^graphs is 2 with a flag: drop it$"):
        check_settings(_Settings(graphs=2), "settings", where=" with a flag")


def test_a_setting_that_is_set_as_an_attribute_counts():
    settings = _Settings()
    settings.mask = 1
    assert changed_fields(settings) == {"mask": 1}
    with pytest.raises(ParallelConfigError, match="mask is 1: drop it"):
        check_settings(settings, "settings")


def test_values_of_settings_in_no_row_are_not_looked_at():
    check_settings({"loss": torch.ones(2), "graphs": 0}, "settings")


def test_a_setting_without_a_default_counts_if_not_empty():
    for empty in (None, False, 0, "", ()):
        check_settings({"name": empty}, "names")
    for name in ("name", "other"):
        with pytest.raises(ParallelConfigError, match=f"{name} is 'a': it only hurts; drop it"):
            check_settings({name: "a"}, "names")
