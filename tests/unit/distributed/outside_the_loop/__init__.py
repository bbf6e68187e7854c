"""What users do outside the training loop that the README shows, one file for each table of the contract."""

from tests.unit.distributed.outside_the_loop import (
    forwards,
    gradients,
    models,
    optimizers,
    parameters,
    saving,
    weights,
)
from tests.unit.distributed.outside_the_loop.scenario import SCENARIOS

__all__ = ["SCENARIOS", "forwards", "gradients", "models", "optimizers", "parameters", "saving", "weights"]
