"""Megatron-LM's training loop on the wrappers of this library: import it before ``megatron.training``.

    import core.adapters.megatron_lm                          # the first line of pretrain_gpt.py

or run a script without a change in it::

    torchrun --nproc-per-node 8 -m core.adapters.megatron_lm pretrain_gpt.py --use-torch-fsdp2 ...

Megatron-LM's flags choose the wrapper. Without any it is `DistributedDataParallel` of this package, with
``--use-distributed-optimizer`` its ZeRO-1, and with ``--use-torch-fsdp2`` `TorchFullyShardedDataParallel`.
``--data-parallel-sharding-strategy``, with or without ``--use-megatron-fsdp``, chooses by name: ``optim_grads``
(ZeRO-2) or ``optim_grads_params`` (ZeRO-3, `FullyShardedDataParallel`), for example, and an optimizer of this library.
The first rank prints which wrapper was built. `with_fsdp2` selects FSDP2 without the flag, for what Megatron-LM's
check of the flag refuses, as tied embeddings and fp16; `register` gives FSDP2 settings that have no flag. Fields of
Megatron-LM's settings that differ from their defaults become fields of ours; what is refused is in
`adapters/bridge/foreign_settings.json`.
"""

from __future__ import annotations

from ..bridge.translation import check_version

check_version("megatron-core", "core.adapters.megatron_lm")

from .registration import register, with_fsdp2  # noqa: E402
from .wrappers import DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel  # noqa: E402

__all__ = [
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "TorchFullyShardedDataParallel",
    "register",
    "with_fsdp2",
]

register()
