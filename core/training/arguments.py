"""Settings from a command line (`config.arguments`), or from a flat mapping (`config.build`)."""

from .config.arguments import parse_arguments, parse_call
from .config.build import build_config

__all__ = ["build_config", "parse_arguments", "parse_call"]
