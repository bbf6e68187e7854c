"""Names of Megatron-LM that only `parallel_state` has, and those that it does not have."""

from __future__ import annotations

import pytest

from core import parallel_state as ps
from core.process_groups.rank_generator import RankGenerator


def test_an_absent_name_says_where_the_thing_is():
    with pytest.raises(ImportError, match=r"get_gtp_weight_remat_group: .*TorchFullyShardedDataParallel"):
        from core.parallel_state import get_gtp_weight_remat_group  # noqa: F401
    with pytest.raises(ImportError, match=r"set_tensor_model_parallel_rank: layers and converters here take"):
        from core.parallel_state import set_tensor_model_parallel_rank  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from core.parallel_state import nothing  # noqa: F401


def test_the_generator_is_found_where_megatron_keeps_it() -> None:
    assert ps.RankGenerator is RankGenerator
