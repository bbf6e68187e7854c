"""Lightning's strategies, for its Trainer and its Fabric, on this library's wrappers.

Importing it registers them under the name ``shardstack``, and ``shardstack_...`` for each sharding.
"""

from ..bridge.translation import check_version

check_version("lightning", __name__)

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from ..bridge.translation import FSDP2, STRATEGIES  # noqa: E402
from .fabric_strategy import ShardstackFabricStrategy  # noqa: E402
from .shared import ShardstackOptimizer  # noqa: E402
from .trainer_strategy import ShardstackStrategy  # noqa: E402

__all__ = ["ShardstackFabricStrategy", "ShardstackOptimizer", "ShardstackStrategy"]


def _register() -> None:
    """Registers the strategies with the Trainer and with Fabric; a second call replaces the first's."""
    for registry, strategy in ((StrategyRegistry, ShardstackStrategy), (STRATEGY_REGISTRY, ShardstackFabricStrategy)):
        registry.register("shardstack", strategy, f"Sharding by {FSDP2}", override=True, sharding=FSDP2)
        for name in STRATEGIES:
            registry.register(f"shardstack_{name}", strategy, f"Sharding by {name}", override=True, sharding=name)


_register()
