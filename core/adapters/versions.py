"""Checks the version of a system that has a door here, when the door is imported."""

from __future__ import annotations

from torch.torch_version import TorchVersion

from ..errors import ConfigError


def check_version(package: str, found: str, at_least: str, below: str, extra: str) -> None:
    """Raises unless a version is in the range that an adapter knows.

    Raises:
        ConfigError: naming the range, and the extra that installs it.
    """
    version = TorchVersion(found)
    if version < TorchVersion(at_least) or not TorchVersion(TorchVersion(found).split("rc")[0]) < TorchVersion(below):
        raise ConfigError(
            f"{package} is {found}, and core.adapters knows {package} from {at_least} to before {below}; install one "
            f"of these: pip install 'shardstack[{extra}]'"
        )
