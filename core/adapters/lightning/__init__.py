"""Lightning's strategies, for its Trainer and its Fabric, on this library's wrappers.

Importing it registers them under the name ``shardstack``, and ``shardstack_...`` for each sharding.
"""

from ..bridge.translation import check_version

check_version("lightning", __name__)

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from ...distributed.fully_sharded_data_parallel_config import FSDP2, STRATEGIES  # noqa: E402
from .fabric_strategy import ShardstackFabricStrategy  # noqa: E402
from .trainer_strategy import ShardstackStrategy  # noqa: E402

__all__ = ["ShardstackFabricStrategy", "ShardstackStrategy"]


# A second import replaces what the first has registered.
for _registry, _strategy in ((StrategyRegistry, ShardstackStrategy), (STRATEGY_REGISTRY, ShardstackFabricStrategy)):
    _registry.register("shardstack", _strategy, f"Sharding by {FSDP2}", override=True, sharding=FSDP2)
    for _name in STRATEGIES:
        _registry.register(f"shardstack_{_name}", _strategy, f"Sharding by {_name}", override=True, sharding=_name)
