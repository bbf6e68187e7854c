"""Names of Megatron-LM that only `parallel_state` has, and those that it does not have."""

from __future__ import annotations

import pytest


def test_an_absent_name_says_where_the_thing_is():
    with pytest.raises(ImportError, match=r"get_gtp_weight_remat_group: .*TorchFullyShardedDataParallel"):
        from core.parallel_state import get_gtp_weight_remat_group  # noqa: F401
    with pytest.raises(ImportError, match=r"set_tensor_model_parallel_rank: layers and converters here take"):
        from core.parallel_state import set_tensor_model_parallel_rank  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from core.parallel_state import nothing  # noqa: F401
