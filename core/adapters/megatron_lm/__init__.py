"""Megatron-LM's training loop on the wrappers of this library: import it before ``megatron.training``.

    import core.adapters.megatron_lm                          # the first line of pretrain_gpt.py

or run a script without a change in it::

    torchrun --nproc-per-node 8 -m core.adapters.megatron_lm pretrain_gpt.py --use-torch-fsdp2 ...

Megatron-LM's flags choose the wrapper. Without any it is `DistributedDataParallel` of this module, with
``--use-distributed-optimizer`` its ZeRO-1, and with ``--use-torch-fsdp2`` `TorchFullyShardedDataParallel`. The first
rank prints which was built. ``--use-megatron-fsdp`` still means Megatron-LM's own. `with_fsdp2` selects FSDP2 without
the flag, for what Megatron-LM's check of the flag refuses, as tied embeddings and fp16; `register` gives FSDP2
settings that have no flag. Fields of Megatron-LM's settings that differ from their defaults become fields of ours;
`adapters/bridge/foreign_settings.json` says what is refused.
"""

from __future__ import annotations

from ..bridge.translation import check_version

check_version("megatron-core", "core.adapters.megatron_lm")

from .registration import register, with_fsdp2  # noqa: E402
from .wrappers import DistributedDataParallel, TorchFullyShardedDataParallel  # noqa: E402

__all__ = ["DistributedDataParallel", "TorchFullyShardedDataParallel", "register", "with_fsdp2"]

register()
