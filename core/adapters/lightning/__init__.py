"""Lightning's strategies, for its Trainer and its Fabric, on this library's wrappers. Importing it registers them."""

from ..versions import check_version

check_version("lightning", __name__)

from .fabric_strategy import ShardstackFabricStrategy  # noqa: E402
from .optimizers import ShardstackOptimizer  # noqa: E402
from .registry import register  # noqa: E402
from .trainer_strategy import ShardstackStrategy  # noqa: E402

__all__ = ["ShardstackFabricStrategy", "ShardstackOptimizer", "ShardstackStrategy"]

register()
