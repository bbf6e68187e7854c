"""Megatron-LM's training loop on this library's FSDP2 wrapper: import it before ``megatron.training``.

    import core.adapters.megatron_lm                          # the first line of pretrain_gpt.py

With this line ``--use-torch-fsdp2`` selects `TorchFullyShardedDataParallel` of this module. `with_fsdp2` selects it
without the flag, for what Megatron-LM's check of the flag refuses, as tied embeddings and fp16; `register` gives it
settings that have no flag.
"""

from ..bridge.translation import check_version

check_version("megatron-core", __name__)

from .wrapper import TorchFullyShardedDataParallel, register, with_fsdp2  # noqa: E402

register()

__all__ = ["TorchFullyShardedDataParallel", "register", "with_fsdp2"]
