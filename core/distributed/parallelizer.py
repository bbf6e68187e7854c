"""Re-exports `core.adapters.nemo` under NeMo Automodel's path, ``distributed.parallelizer``."""

from ..adapters.nemo import *  # noqa: F403  # the names that it lists
from ..adapters.nemo import __all__ as __all__
