"""Settings from a command line: see `core.training.config.arguments`."""

from .config.arguments import build_config, parse_arguments, parse_call

__all__ = ["build_config", "parse_arguments", "parse_call"]
