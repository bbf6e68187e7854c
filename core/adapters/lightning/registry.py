"""The names by which Lightning finds the strategies: ``shardstack``, and one for each sharding."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from ..strategies import FSDP2, STRATEGIES
from .fabric_strategy import ShardstackFabricStrategy
from .trainer_strategy import ShardstackStrategy

NAME = "shardstack"


def register() -> None:
    """Registers the strategies with the Trainer and with Fabric; a second call replaces the first's."""
    for registry, strategy in ((StrategyRegistry, ShardstackStrategy), (FABRIC_REGISTRY, ShardstackFabricStrategy)):
        registry.register(NAME, strategy, f"Sharding by {FSDP2}", override=True, sharding=FSDP2)
        for name in STRATEGIES:
            registry.register(f"{NAME}_{name}", strategy, f"Sharding by {name}", override=True, sharding=name)
