"""Runs any model on this library's engines, under the names of NeMo Automodel's module of this name."""

from .parallelize import *  # noqa: F403  # the names that it lists
from .parallelize import __all__ as __all__
