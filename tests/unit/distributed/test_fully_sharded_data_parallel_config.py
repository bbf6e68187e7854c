"""What a setting of resharding means for a unit; what it does is in `fsdp2/test_fsdp2_engine.py`."""

from __future__ import annotations

import pytest

from core.base.errors import ParallelConfigError
from core.distributed import FullyShardedDataParallelConfig
from core.distributed.plan.contradictions import check_reshard


def test_overrides_are_name_patterns_and_the_last_match_counts():
    settings = FullyShardedDataParallelConfig(
        reshard_overrides=("decoder.layers.*=False", "decoder.layers.1?=2", "=true")
    )
    found = {name: settings.reshard_of(name, True) for name in ("decoder.layers.3", "decoder.layers.12", "", "head")}
    assert found == {"decoder.layers.3": False, "decoder.layers.12": 2, "": True, "head": True}


@pytest.mark.parametrize("entry", ["decoder.layers.0", "decoder=maybe", "decoder=-2", "decoder=1.5"])
def test_an_entry_of_another_form_is_refused_by_name(entry):
    with pytest.raises(ParallelConfigError, match=entry):
        FullyShardedDataParallelConfig(reshard_overrides=(entry,))


def test_a_number_divides_the_ranks_that_share_a_parameter():
    assert [check_reshard(value, 12) for value in (True, False, 1, 2, 6, 12)] == [True, False, False, 2, 6, True]
    with pytest.raises(
        ParallelConfigError, match=r"is 5, .* the 12 ranks .* True, False, or one of 1, 2, 3, 4, 6, 12"
    ):
        check_reshard(5, 12)
