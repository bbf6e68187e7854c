"""Settings of FSDP2 wrappers, of Megatron-LM's config and registered."""

from __future__ import annotations

from core.base.errors import ParallelConfigError
from tests.unit._quick import needs
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")


def test_settings_of_megatron_are_translated_or_refused() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig

    from core.adapters import megatron_lm
    from core.adapters.megatron_lm.settings import translate_config

    assert translate_config(TorchFullyShardedDataParallelConfig()).reshard_after_forward is True
    assert translate_config(TorchFullyShardedDataParallelConfig(reshard_after_forward=2)).reshard_after_forward == 2
    assert translate_config(DistributedDataParallelConfig(check_for_nan_in_grad=True)).check_for_nan_in_grad
    _megatron.raises_one_line(
        ParallelConfigError,
        "use_distributed_optimizer",
        translate_config,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
    added = TorchFullyShardedDataParallelConfig()
    added.forward_prefetch = 2  # which is no field of Megatron-LM's class
    assert translate_config(added).forward_prefetch == 2
    added.forward_prefetc = 3
    _megatron.raises_one_line(
        ParallelConfigError, "has forward_prefetc=3, a setting that is not known here", translate_config, added
    )
    try:
        megatron_lm.register(grad_reduce_in_fp32=True, reshard_after_forward=False)
        assert translate_config(TorchFullyShardedDataParallelConfig()).grad_reduce_in_fp32
        given = TorchFullyShardedDataParallelConfig(reshard_after_forward=2)
        _megatron.raises_one_line(ParallelConfigError, "give it once", translate_config, given)
    finally:
        megatron_lm.register()
    _megatron.raises_one_line(ParallelConfigError, "no setting of FSDP2", megatron_lm.register, grad_reduce_fp32=True)
