"""torchtitan's trainer on this library's FSDP2 engine.

    torchtitan_train --module core.adapters.torchtitan --config llama3_8b     # every config of torchtitan, by its name

In a config function of your own, `with_fsdp2` does the same to any ``Trainer.Config``: it replaces the model's
``parallelize_fn`` by `parallelize`.
"""

from ..bridge.translation import check_version

check_version("torchtitan", __name__)

from .parallelize import parallelize, with_fsdp2  # noqa: E402

__all__ = ["parallelize", "with_fsdp2"]
