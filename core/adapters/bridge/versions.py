"""Checks the version of the system that an adapter is for, when the adapter is imported."""

from __future__ import annotations

from importlib import metadata, util

from torch.torch_version import TorchVersion

from ...errors import ConfigError, MissingExtraError

SUPPORTED = {
    "accelerate": ("1.15", "2", "hf"),
    "lightning": ("2.6", "2.7", "lightning"),
    "megatron-core": ("0.16", "0.21", "megatron"),
    "torchtitan": ("0.3", "0.4", "titan"),
    "transformers": ("5.23", "6", "hf"),
}
"""The first version that an adapter supports, the first that it does not, and the extra that installs it; `setup.py`
has the same."""


def check_version(package: str, adapter: str) -> None:
    """Raises unless a supported version of a package is installed.

    Args:
        package: of `SUPPORTED`.
        adapter: its name, for messages.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: another version.
    """
    at_least, below, extra = SUPPORTED[package]
    if util.find_spec(package.partition("-")[0]) is None:
        raise MissingExtraError(package, extra, adapter)
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(package, extra, adapter) from None
    if TorchVersion(found) < TorchVersion(at_least) or not TorchVersion(_released(found)) < TorchVersion(below):
        raise ConfigError(
            f"{package} {found} is installed, and {adapter} knows {package}>={at_least},<{below}; install one of "
            f"these: pip install 'shardstack[{extra}]'"
        )


def _released(version: str) -> str:
    """Returns the version that a candidate or a development version precedes."""
    return version.split("rc")[0].split(".dev")[0]
