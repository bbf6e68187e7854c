"""An adapter says which versions of its system it knows, and which extra installs one."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest

from core.adapters.bridge import versions
from core.errors import ConfigError, MissingExtraError

ROOT = Path(__file__).resolve().parents[4]


def _check(package: str, found: str | None) -> None:
    with (
        mock.patch.object(versions.util, "find_spec", lambda name: found),
        mock.patch.object(versions.metadata, "version", lambda name: found),
    ):
        versions.check_version(package, "core.adapters.some_adapter")


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


@pytest.mark.parametrize("package", versions.SUPPORTED)
def test_a_package_that_is_not_installed_is_named_with_its_extra(package: str):
    with pytest.raises(MissingExtraError, match=rf"{package}.*shardstack\[{versions.SUPPORTED[package][2]}\]"):
        _check(package, None)


@pytest.mark.parametrize("package", versions.SUPPORTED)
def test_extras_match_supported_versions(package: str):
    at_least, below, extra = versions.SUPPORTED[package]
    line = re.search(rf'"{extra}": \[(.*?)\]', (ROOT / "setup.py").read_text(encoding="utf-8"), re.DOTALL)
    assert line is not None and f'"{package}>={at_least},<{below}"' in line[1]
